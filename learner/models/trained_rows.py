"""Rows of the vocabulary that LoRA trains as they are, beside its adapters.

peft copies the whole (V, H) weight for each use, once per chunk of the head, and makes a gradient
of that size. `TrainedRows` computes the outputs of the trained rows separately: they replace those
of the frozen rows.
"""

from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from torch.nn.functional import embedding, linear


class TrainedRows(TrainableTokensLayer):
    """The layer of an embedding, or of a head without bias.

    row_ids: (rows,) on the device of the last input; the head has an input for each chunk.
    """

    row_ids: Tensor | None = None

    def forward_adapters(
        self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Ids (...) -> (..., H) of an embedding; rows (..., H) -> logits (..., V) of a head."""
        if self.disable_adapters or self.merged or not active_adapters:
            return super().forward_adapters(x, active_adapters, *args, **kwargs)
        base: Any = self.get_base_layer()
        frozen: Tensor = base(x)
        (name,) = active_adapters
        rows = self.trainable_tokens_delta[name].to(base.weight.dtype)
        if self.row_ids is None or self.row_ids.device != x.device:
            self.row_ids = torch.tensor(self.token_indices[name], device=x.device)
        if isinstance(base, nn.Linear):
            return frozen.index_copy(-1, self.row_ids, linear(x, rows))
        place = torch.full((base.num_embeddings,), -1, device=x.device)
        place[self.row_ids] = torch.arange(len(rows), device=x.device)
        own = place[x]
        return torch.where((own >= 0)[..., None], embedding(own.clamp(min=0), rows), frozen)


def train_rows_alone(model: nn.Module) -> None:
    """Make each layer of peft that trains rows a `TrainedRows`, in place."""
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            module.__class__ = TrainedRows
