"""Classes that replace those of layers in a loaded model. Each one has another forward."""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers.utils import is_causal_conv1d_available, is_flash_linear_attention_available

from learner.models.head import refused


class PatchProduct(nn.Conv3d):
    """The patch embedding of a vision tower, as a matrix product (FULL-04).

    Stride and kernel of the convolution are equal, so each patch is one row of a product. The
    convolution takes seven times as long on a CPU, and longer on a GPU without a kernel for its
    shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(patches, channels, frames, height, width) -> (patches, out, 1, 1, 1)."""
        output = linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return output[:, :, None, None, None]


def use_product(model: nn.Module, ending: str) -> None:
    """Make each patch embedding a `PatchProduct`; errors and `ending` of `patch_embeddings`."""
    for module in patch_embeddings(model, ending):
        module.__class__ = PatchProduct


def patch_embeddings(model: nn.Module, ending: str) -> list[nn.Conv3d]:
    """Return the convolutions that can be `PatchProduct`s; `ending`: suffix of their names.

    Raises ContractError if there is none, if one is no convolution, and if its patches overlap or
    are padded.
    """
    named = [each for each in model.named_modules() if each[0].endswith(ending)]
    if not named:
        raise refused(f"its vision tower has no {ending}")
    found = []
    for name, module in named:
        if not isinstance(module, nn.Conv3d):
            raise refused(f"its patch embedding {name} is {module}, and no Conv3d")
        plain = module.stride == module.kernel_size and module.groups == 1
        if not plain or any(module.padding) or any(size != 1 for size in module.dilation):
            raise refused(
                f"its patch embedding {name} is {module}, whose patches overlap or are padded"
            )
        found.append(module)
    return found


class TrainedRows(TrainableTokensLayer):
    """Rows of an embedding, or of a head without bias, that LoRA trains beside its adapters.

    peft copies the whole (V, H) weight for each use, once per chunk of the head, and makes a
    gradient of that size. Here outputs of the trained rows are computed separately, and replace
    those of the frozen rows.

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
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            module.__class__ = TrainedRows


def separate_segments(model: nn.Module, ending: str) -> None:
    """Make each layer of linear attention keep segments apart; `ending`: suffix of their names."""
    for name, module in model.named_modules():
        if name.endswith(ending):
            kind = type(module)
            module.__class__ = type(kind.__name__, (_Separate, kind), {})


class _Separate(nn.Module):
    """Before the class of a layer: no state of a segment of a packed row reaches the next one.

    The layers of linear attention of Qwen3.5 have a causal convolution and a recurrence, which run
    along a whole row. Kernels for GPUs take the bounds of segments. transformers' own functions in
    torch do not, so with them each segment has a call of its own. A forward without bounds, such as
    that of `generate`, is the layer's own.
    """

    def forward(
        self,
        hidden_states: Tensor,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        segment_lengths: Sequence[int] = (),
        **kwargs: Any,
    ) -> Tensor:
        """(1, L, hidden) -> (1, L, hidden).

        segment_lengths: of a pack, on the host. The others are of `packed_bounds`.
        """
        forward = super().forward
        found: Tensor
        if cu_seq_lens_q is None:
            found = forward(hidden_states, **kwargs)
        elif (  # transformers finds kernels for the convolution and the recurrence
            hidden_states.is_cuda
            and is_flash_linear_attention_available()
            and is_causal_conv1d_available()
        ):
            token = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            segment = torch.searchsorted(cu_seq_lens_q[1:], token, out_int32=True, right=True)
            own = {"cu_seq_lens_q": cu_seq_lens_q, "seq_idx": segment[None]}
            found = forward(hidden_states, **kwargs, **own)
        else:
            parts = hidden_states.split(list(segment_lengths), dim=1)
            found = torch.cat([forward(part, **kwargs) for part in parts], dim=1)
        return found
