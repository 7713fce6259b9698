"""Public names of `learner.stages.formats.coord_json` for other programs (ARCH-02)."""

from learner.stages.formats.coord_json import serialize_append

__all__ = ["serialize_append"]
