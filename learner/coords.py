"""Public names of `learner.stages.coords` for other programs (ARCH-02)."""

from learner.stages.coords import decode_bin, encode_bin

__all__ = ["decode_bin", "encode_bin"]
