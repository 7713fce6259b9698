"""Pushes of weights: their states and phases, and the manifest that a push must have."""
