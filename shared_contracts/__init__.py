"""Contracts between the rollout server and the learner.

Imports pydantic and the standard library only (ARCH-01).
"""
