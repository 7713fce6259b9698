"""What the rollout server and the learner agree on.

Imports pydantic and the standard library only (ARCH-01).
"""
