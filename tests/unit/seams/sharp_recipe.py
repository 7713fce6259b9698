"""A throw-away recipe: every step is channel A, with one loss that no config declares."""

from learner.training.recipes import Recipe
from learner.types import Channel
from tests.unit.seams.sharpness import SharpnessConfig, SharpnessModule


class SharpRecipe(Recipe):
    extra_objectives = (
        SharpnessModule(
            name="sharpness",
            enabled=True,
            weight=0.5,
            channels=("A",),
            config=SharpnessConfig(entropy_weight=2.0),
        ),
    )

    def channel(self, step: int) -> Channel:
        return "A"
