"""Public names of `learner.stages.targets` for other programs (ARCH-02)."""

from learner.stages.targets import build_target

__all__ = ["build_target"]
