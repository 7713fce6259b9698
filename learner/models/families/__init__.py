"""Families of models: one object for each, chosen by the `model_type` of the checkpoint.

A family knows how its models place tokens and images, which modules are trained, and how a packed
row keeps its segments apart. `CONTRIBUTING.md` says how another one is added.
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
    """The family of a model, or of its multimodal module, by its config."""
    found: Family = model_family(model.config.model_type)
    return found


def vision_inputs(
    family: Family, images: "EncodedPrompt | Pack", types: "Tensor"
) -> "dict[str, Tensor | None]":
    """Arguments of a forward beside ids and positions. types: 1 where an image is."""
    values = (types, images.pixel_values, images.image_grid_thw)
    return dict(zip(family.inputs, values, strict=True))
