"""Training recipes: the channel of a step, and the loss of a pack.

`learner.objectives` names the recipe of each `custom.trainer_variant`. `Recipe` has them
all: channels A and B by `b_ratio`, A with self-context (CHA-01); channel B alone (RES-02); and
groups of answers in channel B (GROUP-01):

    Sample x group_size -> RolloutOutput of each -> reward, advantage -> Segment

The answers of a sample are consecutive, in one process. Their segments may share a pack or not,
because advantages are made before. The step collects its packs before its first forward, because
the loss is a mean over the answer tokens of all processes (GROUP-03). CONTRIBUTING.md has an
example of another recipe.
"""

from pkgutil import resolve_name

from torch import nn

from learner.config.schema import Config
from learner.models.flops import Arithmetic
from learner.models.load import LoadedModel
from learner.models.packed_forward import StartModel
from learner.models.packs import Pack
from learner.models.prompts import PromptEncoder
from learner.models.self_context import SelfContext
from learner.objectives import VARIANTS
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.stages.formats import answer_format
from learner.stages.schedule import channel_for_step
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.types import Channel


class Recipe:
    """Both channels of a run, the channel of each step, and the loss of a pack.

    A run without channel A still uses its segments for replays (DDP-02).
    """

    def __init__(
        self, config: Config, channel_a: ChannelA, channel_b: ChannelB, objective: Pipeline
    ) -> None:
        self.config = config
        self.channel_a = channel_a
        self.channel_b = channel_b
        self.objective = objective
        self._arithmetic: Arithmetic | None = None

    def channel(self, step: int) -> Channel:
        """Return the channel of step `step`, counted from 0 (STEP-01)."""
        return channel_for_step(step, self.config.b_ratio)

    def loss(
        self, model: nn.Module, pack: Pack, channel: Channel, answer_tokens: float | None = None
    ) -> PackLoss:
        """Return the loss of one pack, of all its forwards. answer_tokens: as in `Totals`."""
        selection = self.objective.select(pack.supervision, channel)
        if answer_tokens is not None:
            selection = selection.over(answer_tokens)
        own = self.channel_a if channel == "A" else self.channel_b
        stats = own.forward_stats(model, pack, self.objective.reader(selection))
        return self.objective(stats, selection, channel)

    def flops(self, model: nn.Module, pack: Pack, channel: Channel) -> float:
        """Return the FLOPs of all forwards and backwards of a pack."""
        if self._arithmetic is None:
            self._arithmetic = Arithmetic.of(model, self.channel_a.encoding.inner.config)
        rows = self.objective.select(pack.supervision, channel).head_rows
        forward, both = self._arithmetic.of_pack(pack, rows)
        context = self.channel_a.context if channel == "A" else SelfContext()
        recorded = context.recorded
        return recorded * both + (context.iterations - recorded) * forward


def recipe_of(config: Config, loaded: LoadedModel, start: StartModel | None = None) -> Recipe:
    """Build the recipe of `custom.trainer_variant`. start: of a run that `needs_start`."""
    kind: type[Recipe] = resolve_name(VARIANTS[config.custom.trainer_variant].recipe)
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    fields, answers = config.custom.object_field_order, answer_format(config)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, fields, answers)
    context, own = SelfContext(), config.stage2_ab
    if own is not None:
        context = SelfContext(own.n_softctx_iter, own.coord_ctx_embed_mode, own.softctx_grad_mode)
    return kind(
        config,
        ChannelA(encoding, context),
        ChannelB(encoding, config, start),
        Pipeline(config.pipeline, loaded.vocab.ids),
    )
