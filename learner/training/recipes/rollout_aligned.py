"""`stage2_rollout_aligned`: every step is channel B, with boxes and polygons (RES-02)."""

from learner.training.recipes import Recipe
from learner.types import Channel


class RolloutAligned(Recipe):
    """Channel A gives the packs that a rank without packs replays, and no more."""

    def channel(self, step: int) -> Channel:
        return "B"
