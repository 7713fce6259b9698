"""Public names of `learner.stages.packing` for other programs (ARCH-02)."""

from learner.stages.packing.plan import plan_packs, select_segments

__all__ = ["plan_packs", "select_segments"]
