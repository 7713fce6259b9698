"""The values of `custom.trainer_variant`. Imports no torch."""

from typing import NamedTuple


class Variant(NamedTuple):
    """recipe: class of its training recipe, imported when a run starts.

    meaning: a line for the reference. polygons: whether they are trained and predicted beside boxes
    (RES-02).
    sections: of the config, which it requires and other variants refuse. `stage2_ab` has the
    schedule of the channels and the objective; without it channel B runs alone, and
    `rollout_matching.pipeline` has the objective. With `group_relative` several answers to a sample
    are compared in channel B (GROUP-01).
    """

    recipe: str
    meaning: str
    sections: tuple[str, ...]
    polygons: bool = False


_RECIPE = "learner.training.recipes:Recipe"

VARIANTS = {
    "stage2_two_channel": Variant(_RECIPE, "channels A and B, boxes", ("stage2_ab",)),
    "stage2_rollout_aligned": Variant(
        _RECIPE, "channel B alone, boxes and polygons", ("pipeline",), polygons=True
    ),
    "stage2_group_relative": Variant(
        _RECIPE,
        "channels A and B, boxes; B by rewards of several answers to a sample",
        ("stage2_ab", "group_relative"),
    ),
}
