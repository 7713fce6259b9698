"""Public names of `learner.stages.schedule` for other programs (ARCH-02)."""

from learner.stages.schedule import channel_for_step

__all__ = ["channel_for_step"]
