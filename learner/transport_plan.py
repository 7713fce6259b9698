"""Public names of `learner.stages.transport_plan` for other programs (ARCH-02)."""

from learner.stages.transport_plan import sinkhorn_barycentric

__all__ = ["sinkhorn_barycentric"]
