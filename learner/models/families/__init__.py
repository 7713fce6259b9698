"""Families of models: one object each; the checkpoint's `model_type` selects it.

A family has the positions of tokens and images, the parts of the model, and what keeps the segments
of a packed row apart. `CONTRIBUTING.md` has an example of a new family.
"""

from typing import Any

from learner.config.registry import model_family
from learner.models.families.qwen_vl import Family as Family
from learner.models.families.qwen_vl import Part as Part


def family_of(model: Any) -> Family:
    """Return the family of a model, or of its multimodal module, by its config."""
    family: Family = model_family(model.config.model_type)
    return family
