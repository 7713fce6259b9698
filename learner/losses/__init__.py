"""Objectives (section 10 of the contract): small typed units and the pipeline of them."""
