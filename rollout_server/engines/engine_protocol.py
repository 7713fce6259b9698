"""What the server needs of an engine: its types, its errors, and the protocol of one replica.

No vLLM here.
"""

import shutil
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import FastAPI
from PIL.Image import Image

from shared_contracts.infer import RequestConfig, Role
from shared_contracts.weights import DtypeName, InitCommunicator, ParameterMeta

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


@dataclass
class Load:
    """What an engine has been given and not yet answered.

    tokens: still to prefill, or that may still be decoded.
    turn: the highest one that it has answered.
    rendering: pixels that its renderer has left to do, and one more for each request.
    """

    tokens: int = 0
    sequences: int = 0
    turn: int = 0
    rendering: int = 0


@dataclass(frozen=True)
class ChatMessage:
    """parts: text, or None where the next image stands."""

    role: Role
    parts: list[str | None]


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation.

    engine_input: the engine's own form of it, for any engine of the same model.
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
    logprobs: of each of `token_ids` by the model's logits alone, in nats; if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: Finish
    repeat_terminated: bool
    weights_version: tuple[int, int]
    logprobs: list[float] | None = None


class Adapter:
    """A pushed LoRA adapter: the weights version with it, and the folder of peft's two files.

    An engine may read the folder again for a running sequence, so it is removed with the last
    reference to the adapter.
    """

    def __init__(self, version: int, folder: Path) -> None:
        self.version = version
        self.folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


# The version of the weights a server starts with; the learner's pushes count from 1.
FIRST_VERSION = 0

# (prompt, sampling parameters, tokens of both, sequences) -> the outputs of the chosen engine.
ChatGenerate = Callable[[Any, Any, int, int], AsyncGenerator[Any, None]]


class Engine(Protocol):
    """One replica, whatever engine it is of.

    dtype: of the model's weights. alive: its process is there. asleep: some memory is given up.
    heartbeat_age_s: seconds since it last answered; 0 while a weight phase runs.
    guard_active: the repeat guard is asked for and proven.
    holds_checkpoint: its base weights are those of the checkpoint: none were pushed.

    Every call of the workers in a weight phase raises WeightPhaseFailed with the worker's reason,
    or EngineDead.
    """

    index: int
    load: Load
    max_model_len: int
    dtype: DtypeName
    weights_version: int
    holds_checkpoint: bool

    @property
    def alive(self) -> bool: ...
    @property
    def asleep(self) -> bool: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def guard_active(self) -> bool: ...

    # --- its life

    async def prepare(self) -> None:
        """Make ready for the first sequence. Raises GuardInactive and WeightPhaseFailed."""

    async def heartbeat(self) -> None: ...
    def declare_dead(self) -> None:
        """Make every call that waits for this engine raise EngineDead."""

    def shutdown(self) -> None:
        """End the engine's processes; blocking."""

    # --- answers

    async def render(self, messages: list[ChatMessage], images: list[Image]) -> Prompt:
        """images: one for each None of the messages. Raises PromptRefused and EngineDead.

        The prompts of other engines of the same model are the same.
        """

    def check_sampling(self, config: RequestConfig) -> None:
        """Raises PromptRefused for parameters that the engine does not take."""

    async def generate(
        self,
        prompt: Prompt,
        config: RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
        turn: int,
    ) -> list[Completion]:
        """Continue `prompt` `config.n` times; cancelling the call aborts its sequences.

        turn: of requests that wait, the lowest goes first. Raises PromptRefused, EngineDead and
        Aborted.
        """

    async def openai_app(self, generate_chat: ChatGenerate) -> FastAPI:
        """Make an app with `/v1/models` and `/v1/chat/completions`.

        It renders with this engine, and generates with `generate_chat` alone.
        """

    async def stream(
        self, prompt: Any, sampling: Any, turn: int, send: Callable[[Any], None]
    ) -> None:
        """Continue `prompt` and pass each of the engine's own outputs to `send`.

        prompt, sampling: as the app gave them to `generate_chat`. turn: as in `generate`.
        Cancelling the call aborts its sequences. Raises EngineDead and Aborted.
        """

    # --- memory of the device

    async def pause(self) -> None:
        """Let running sequences end, and hold new ones."""

    async def resume(self) -> None:
        """Take back the memory that was given up, and continue with what waits."""

    async def sleep(self) -> None:
        """Pause, and give up the memory of the device until `resume`; the weights are kept.

        A second call changes nothing. Raises EngineDead where it is not known what is left.
        """

    async def wake_weights(self) -> None:
        """Take back the memory of the weights alone, for a push. Raises EngineDead."""

    # --- phases of a push

    async def join_group(self, init: InitCommunicator, first_worker: int) -> None:
        """Have the workers join the weight group.

        first_worker: number of the engine's first worker among those of all engines.
        """

    async def leave_group(self) -> None: ...
    async def start_update(self) -> None:
        """Make the workers ready to load weights of the checkpoint's layout."""

    async def receive_weights(self, parameters: Sequence[ParameterMeta]) -> None:
        """Receive and load what the learner sends; the digests of all buckets are compared."""

    async def finish_update(self, version: int) -> None:
        """Complete the load, drop all caches of the old weights, stamp later answers."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, for `use_adapter`; wakes from `sleep`."""

    async def use_adapter(self, adapter: Adapter) -> None:
        """Answer with an adapter that was loaded; sequences that run keep theirs."""


class Engines(Protocol):
    """The engines of all replicas (see `replicas.Replicas`)."""

    def all(self) -> Sequence[Engine]:
        """By index; raises the `not-ready` problem when one is missing."""

    def alive(self) -> Sequence[Engine]:
        """Those that are there."""
