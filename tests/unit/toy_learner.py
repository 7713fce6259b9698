"""A loaded toy model with its channels: packs of samples, their losses and gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from learner.config import parse_config
from learner.models.head import output_head
from learner.models.load import LoadedModel
from learner.models.packs import Pack, make_pack
from learner.models.prompts import PromptEncoder
from learner.models.self_context import SelfContext
from learner.objectives.config import ObjectiveModule
from learner.objectives.coord_reg import CoordRegModule
from learner.objectives.logit_stats import Totals
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.objectives.token_ce import TokenCEModule
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.types import Channel, RolloutOutput, Sample
from tests.unit.answers import encode
from tests.unit.config_faults import WARMUP
from tests.unit.loss_rows import COORD_REG, TOKEN_CE, bbox_geo, coord_reg, declared, token_ce
from tests.unit.small_run import rollout

PROMPT = "Detect every object in the image."

BOXES = bbox_geo()


def text(self_context: float) -> TokenCEModule:
    """self_context: weight of the structure in the last of several forwards."""
    return token_ce(TOKEN_CE.model_copy(update={"self_context_struct_ce_weight": self_context}))


def bins(text_gate: float) -> CoordRegModule:
    """text_gate: weight of the gate at the text of the last forward."""
    wide = {"text_gate_weight": text_gate, "target_sigma": 20.0, "target_truncate": 60}
    return coord_reg(COORD_REG.model_copy(update=wide))


COORDINATES = (BOXES, bins(text_gate=0.0))
EVERY_TERM = (text(self_context=0.3), BOXES, bins(text_gate=0.5))

Gradients = dict[str, Tensor]


class ToyLearner:
    """Channel A as `context` says, channel B, and the objective of `modules`."""

    def __init__(
        self,
        loaded: LoadedModel,
        context: SelfContext | None = None,
        modules: Sequence[ObjectiveModule] = EVERY_TERM,
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.coord_ids = torch.tensor(loaded.vocab.ids)
        prompt = PromptEncoder(loaded.processor, PROMPT, None)
        self.encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
        self.channel_a = ChannelA(self.encoding, context or SelfContext())
        self.channel_b = ChannelB(self.encoding, parse_config(WARMUP))
        self.pipeline = Pipeline(declared(*modules), loaded.vocab.ids)

    def pack(self, samples: Sequence[Sample]) -> Pack:
        return make_pack(self.channel_a.segments(samples))

    def answer(self, sample: Sample, text: str) -> RolloutOutput:
        """The output of a backend that answers the sample with `text`."""
        return rollout(self.encoding.prompt(sample).ids.tolist(), encode(self.tokenizer, text))

    def loss(self, pack: Pack, channel: Channel = "A", totals: Totals | None = None) -> PackLoss:
        """The loss of a pack. totals: of the whole that it is a part of; None: its own."""
        selection = self.pipeline.select(pack.supervision, channel)
        if totals is not None:
            selection = replace(selection, totals=totals)
        own = self.channel_a if channel == "A" else self.channel_b
        stats = own.forward_stats(self.model, pack, self.pipeline.reader(selection))
        return self.pipeline(stats, selection, channel)

    def gradients(self, *losses: PackLoss) -> Gradients:
        """Gradients of the sum of losses by parameter; zeros for one without a gradient."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        total = torch.stack([loss.total for loss in losses]).sum()
        grads = torch.autograd.grad(
            total, list(trained.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(trained, grads, strict=True))


@torch.no_grad()
def sharpened(loaded: LoadedModel, factor: float) -> LoadedModel:
    """Multiply the logits of coordinates by `factor`: their distributions get peaks."""
    for name, weight in loaded.model.named_parameters():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight[loaded.vocab.ids] *= factor
    return loaded


@torch.no_grad()
def with_awake_adapters(loaded: LoadedModel) -> LoadedModel:
    """Fill the halves of adapters that are zero at the start."""
    generator = torch.Generator().manual_seed(0)
    for weight in loaded.model.parameters():
        if weight.requires_grad and not weight.any():
            weight.normal_(std=0.05, generator=generator)
    return loaded


def stated_arguments() -> set[str]:
    """Names of the arguments of the model's and the language model's forwards."""
    forwards = (Qwen3VLForConditionalGeneration.forward, Qwen3VLTextModel.forward)
    named = {name for forward in forwards for name in signature(forward).parameters} - {"kwargs"}
    return named | FlashAttentionKwargs.__annotations__.keys()


class Forward(NamedTuple):
    """One call of the model: its arguments as they were, and logits (L, V) as they came.

    recorded: whether a gradient can flow through them.
    """

    arguments: dict[str, Any]
    logits: Tensor
    recorded: bool


@contextmanager
def forwards_of(model: nn.Module) -> Iterator[list[Forward]]:
    seen: list[Forward] = []
    arguments: list[dict[str, Any]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args == ()
        arguments.append({name: _copy(value) for name, value in kwargs.items()})

    def keep(head: Any, args: tuple[Tensor]) -> None:
        logits = type(head).forward(head, args[0])
        seen.append(Forward(arguments.pop(), _copy(logits[0]), logits.requires_grad))

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        output_head(model).register_forward_pre_hook(keep),
    ):
        yield seen


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
