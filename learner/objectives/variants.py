"""The values of `custom.trainer_variant`. Imports no torch."""

from typing import Literal, NamedTuple


class Variant(NamedTuple):
    """recipe: class of its training recipe, imported when a run starts.

    meaning: a line for the reference. objective_in: the section that declares the objective;
    `stage2_ab` also has the schedule of the channels, and without it channel B runs alone.
    polygons: whether they are trained and predicted beside boxes (RES-02).
    grouped: whether several answers to a sample are compared in channel B (GROUP-01).
    """

    recipe: str
    meaning: str
    objective_in: Literal["stage2_ab", "rollout_matching"]
    polygons: bool
    grouped: bool = False


_RECIPE = "learner.training.recipes:Recipe"

VARIANTS = {
    "stage2_two_channel": Variant(_RECIPE, "channels A and B, boxes", "stage2_ab", polygons=False),
    "stage2_rollout_aligned": Variant(
        _RECIPE,
        "channel B alone, boxes and polygons",
        "rollout_matching",
        polygons=True,
    ),
    "stage2_group_relative": Variant(
        _RECIPE,
        "channels A and B, boxes; B by rewards of several answers to a sample",
        "stage2_ab",
        polygons=False,
        grouped=True,
    ),
}
