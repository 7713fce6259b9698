"""The model that a run started from, beside the one that it trains (GROUP-04)."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from peft import PeftModel

from learner.config.schema import Config
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import packed_forward
from learner.models.packs import Pack
from learner.objectives.logit_stats import HeadInput

T = TypeVar("T")


class StartModel:
    """Forwards packs with the weights of `model.model`, without gradients.

    With adapters it is the trained model with disabled adapters. Without, it is a second copy on
    the same device, without gradients and moments. A resumed run uses the same folder.
    """

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        """loaded: the model that the run trains, before anything wraps it."""
        model = loaded.model
        self._adapted = model if isinstance(model, PeftModel) else None
        self._model = model if self._adapted else load_model(config).model.requires_grad_(False)

    def forward(self, pack: Pack, read: Callable[[HeadInput], T]) -> T:
        """Return `read` of a forward; call it before the forward of training."""
        disabled = nullcontext() if self._adapted is None else self._adapted.disable_adapter()
        with torch.no_grad(), disabled:
            return packed_forward(self._model, pack, read)
