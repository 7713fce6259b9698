"""What an engine takes, gives and raises, in our words: no vLLM here."""

from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["stop", "length"]


class PromptRefused(Exception):
    """The engine cannot take this prompt or these sampling parameters."""


class EngineDead(Exception):
    """The engine process is gone."""


class GuardInactive(Exception):
    """The repeat guard is asked for and does not work inside the engine."""


class Aborted(Exception):
    """The engine ended a sequence that was neither done nor cut."""


class WeightPhaseFailed(Exception):
    """A phase of a weight update failed in a worker."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation.

    engine_input: vLLM's `EngineInput`, for any engine of the same model.
    token_ids: with image placeholders expanded.
    """

    engine_input: Any
    token_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    token_ids: without the end-of-sequence or stop token that ended it.
    repeat_terminated: the repeat guard ended it, by its own signal.
    weights_version: under which the first and the last token were sampled.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: Finish
    repeat_terminated: bool
    weights_version: tuple[int, int]
