"""Base classes of objectives and diagnostics: config entry, loss terms and metrics in one class.

`learner/objectives/__init__.py` is their registry; the config's types, the JSON schema and the
reference of metrics follow from it. The classes are types of the config: their files import torch
within functions. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from learner.types import Channel
from shared_contracts.strict_model import Refusal, StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from learner.objectives.logit_stats import ForwardStats, LogitStats, Selection, Supervision

Weight = Annotated[float, Field(ge=0)]

# The input of a term: text in the first forward, text in the last of several, coordinates and
# gates in the last, tokens with which removed duplicates depart from the target, or the tokens of
# the answer that the target keeps.
Family = Literal["text", "context_text", "coord", "departure", "answer"]

# family -> name of the term -> meaning
LossMetrics = Mapping[Family, Mapping[str, str]]
# name of the metric -> (unit, meaning)
SlotMetrics = Mapping[str, tuple[str, str]]

LOSS_PREFIX: dict[tuple[Channel, Family], str] = {
    ("A", "text"): "loss/A1_text",
    ("A", "context_text"): "loss/A2_text",
    ("A", "coord"): "loss/A2_coord",
    ("B", "text"): "loss/B_rollout_text",
    ("B", "coord"): "loss/B_coord",
    ("B", "departure"): "loss/B_rollout_text",
    ("B", "answer"): "loss/B_answer",
}


class Term(NamedTuple):
    """One additive part of an objective's loss: its name in the logs and its scalar value."""

    name: str
    family: Family
    value: Tensor


class ModuleEntry(StrictModel):
    """The keys of every entry of a pipeline; a subclass narrows `name` and `config`."""

    name: str
    enabled: bool = Field(description="false: the module is not used")
    weight: Weight = Field(description="weight of the module's loss in the total")
    channels: Annotated[tuple[Channel, ...], Field(strict=False)] = Field(
        description="channels it runs in, a subset of [A, B]"
    )
    config: Any

    @field_validator("channels")
    @classmethod
    def _each_once(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if len(set(channels)) < len(channels):
            raise Refusal("a channel is listed twice", "List each channel once")
        return channels

    def counts_in(self, channel: Channel) -> bool:
        return self.enabled and self.weight > 0 and channel in self.channels


class Objective(ModuleEntry):
    """A loss module.

    metrics: meanings of all terms of `terms`, by their input. With `text`, `text_weights` selects
        the text to train on; a term of `answer` is a mean over the whole step (GROUP-03).
    token_metrics: meanings of all names of `token_sums`.
    """

    metrics: ClassVar[LossMetrics]
    token_metrics: ClassVar[SlotMetrics] = {}

    @classmethod
    def reads(cls, family: Family) -> bool:
        return family in cls.metrics

    def terms(self, stats: ForwardStats, selection: Selection) -> Iterator[Term]:
        """Yield the terms of a pack's loss over `selection.totals`; none for an empty input."""
        raise NotImplementedError

    def token_sums(self, stats: ForwardStats, selection: Selection) -> dict[str, float]:
        """Return monitoring sums over the R kept tokens, by name."""
        return {}

    def text_weights(self, row: Supervision, channel: Channel) -> Tensor:
        """Return the cross-entropy weight of each token of a row, (L,)."""
        raise NotImplementedError

    @property
    def teaches(self) -> bool:
        """Whether any weight of its config moves the model."""
        return True

    @property
    def learns_from_last(self) -> bool:
        """Whether it learns from the last of several forwards."""
        return True

    @property
    def reads_last_text(self) -> bool:
        """Whether it reads the text of the last of several forwards."""
        return False

    @property
    def reads_start(self) -> bool:
        """Whether it compares kept tokens with those of the model that the run started from."""
        return False

    @property
    def gate_temperature(self) -> float | None:
        """Temperature of the gates; None: it has no gates."""
        return None

    @property
    def departure_radius(self) -> int | None:
        """Bins on each side that count as a departing coordinate; None: any token may depart."""
        return None

    def conflicts(self, modules: Sequence[Objective]) -> Iterator[Refusal]:
        """Yield conflicts with the enabled modules; keys are relative to the entry."""
        if "A" in self.channels and (self.reads("departure") or self.reads("answer")):
            yield Refusal(
                f"{list(self.channels)}, and channel A has no answers", "Use [B]", "channels"
            )


class Diagnostic(ModuleEntry):
    """A monitoring module: it adds to no loss."""

    metrics: ClassVar[SlotMetrics]

    def sums(self, stats: LogitStats, selection: Selection, temperature: float) -> dict[str, float]:
        """Return sums over the K supervised slots, by name. temperature: of the gates."""
        raise NotImplementedError
