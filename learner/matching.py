"""Public names of `learner.stages.matching` for other programs (ARCH-02)."""

from learner.stages.matching import mask_iou, match_objects

__all__ = ["mask_iou", "match_objects"]
