"""Families of models: one object each; the checkpoint's `model_type` selects it.

A family has the positions of tokens and images, the parts of the model, and what keeps the segments
of a packed row apart. `CONTRIBUTING.md` has an example of a new family.
"""

from typing import TYPE_CHECKING, Any

from learner.config.registry import model_family
from learner.models.families.qwen_vl import Family as Family
from learner.models.families.qwen_vl import Multimodal as Multimodal
from learner.models.families.qwen_vl import Part as Part

if TYPE_CHECKING:
    from torch import Tensor

    from learner.models.packs import Pack
    from learner.models.prompts import EncodedPrompt


def family_of(model: Any) -> Family:
    """Return the family of a model, or of its multimodal module, by its config."""
    family: Family = model_family(model.config.model_type)
    return family


def vision_inputs(
    family: Family, images: "EncodedPrompt | Pack", types: "Tensor"
) -> "dict[str, Tensor | None]":
    """Return the arguments of a forward beside ids and positions. types: 1 at image tokens."""
    values = (types, images.pixel_values, images.image_grid_thw)
    return dict(zip(family.inputs, values, strict=True))
