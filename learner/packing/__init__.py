"""Which segments share a forward (section 11 of the contract); lengths in, indices out.

A segment is one whole sample, prompt and target. `plan_packs` divides the pool of a step,
`select_segments` takes one pack out of a buffer that goes on, `SegmentBuffer` is the
buffer of both, `StepPacking` divides what a step has, while more is on its way, and
`CountedPacking` does so as a run has it set up, and counts. `forwards_due` says how many
packs all ranks take on together.
"""

from learner.packing.buffer import SegmentBuffer
from learner.packing.counted import CountedPacking, Place
from learner.packing.exact import EXACT_POOL
from learner.packing.plan import plan_packs
from learner.packing.select import select_segments
from learner.packing.step import Chunk, StepPacking, Whole, forwards_due

__all__ = [
    "EXACT_POOL",
    "Chunk",
    "CountedPacking",
    "Place",
    "SegmentBuffer",
    "StepPacking",
    "Whole",
    "forwards_due",
    "plan_packs",
    "select_segments",
]
