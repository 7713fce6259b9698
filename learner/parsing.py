"""Public names of `learner.stages.formats.coord_json` for other programs (ARCH-02)."""

from learner.stages.formats.coord_json import parse_rollout

__all__ = ["parse_rollout"]
