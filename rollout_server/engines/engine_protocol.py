"""The protocol of an engine, with its types and errors. Imports no vLLM."""

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


class BadRequest(Exception):
    """A fault inside one request of a call.

    where: path inside the request, such as `images[0]`. found: the fault.
    """

    def __init__(self, where: str, found: str) -> None:
        super().__init__(where, found)
        self.where = where
        self.found = found


class EngineDead(Exception):
    """The engine process has ended."""


class Aborted(Exception):
    """The engine ended a sequence that was neither complete nor at its length limit."""


class WeightPhaseFailed(Exception):
    """A phase of a weight update failed in a worker."""


@dataclass
class Load:
    """Outstanding work of an engine.

    tokens: to prefill, or at most to decode. turn: the highest answered one.
    rendering: pixels in its renderer, plus one for each request.
    """

    tokens: int = 0
    sequences: int = 0
    turn: int = 0
    rendering: int = 0


@dataclass(frozen=True)
class PromptMessage:
    """parts: text, or None for the next image."""

    role: Role
    parts: list[str | None]


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation.

    engine_input: valid for all engines of the same model.
    token_ids: with image placeholders expanded.
    """

    engine_input: Any
    token_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    token_ids: without the final end-of-sequence or stop token.
    repeat_terminated: the repeat guard ended it.
    weights_version: of the first and of the last sampled token.
    logprobs: of each of `token_ids`, by the model's raw logits, in nats; if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish: Finish
    repeat_terminated: bool
    weights_version: tuple[int, int]
    logprobs: list[float] | None = None


class Adapter:
    """A pushed LoRA adapter: its weights version, and the folder of peft's two files.

    The folder is removed with the last reference to the adapter, because an engine may read it
    again for a running sequence.
    """

    def __init__(self, version: int, folder: Path) -> None:
        self.version = version
        self.folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


# The version of the checkpoint's weights; pushes count from 1.
FIRST_VERSION = 0

# (prompt, sampling parameters, tokens of both, sequences) -> the outputs of the chosen engine.
ChatGenerate = Callable[[Any, Any, int, int], AsyncGenerator[Any, None]]
# Takes an output of the engine.
Send = Callable[[Any], None]


class Engine(Protocol):
    """One replica.

    dtype: of the model's weights. alive: its process runs. asleep: from `sleep` to `resume`.
    heartbeat_age_s: seconds since the last answer; 0 during a weight phase.
    guard_active: the repeat guard is enabled and verified.
    holds_checkpoint: no full weights were pushed.

    Calls of a weight phase raise WeightPhaseFailed with the worker's reason, or EngineDead.
    """

    index: int
    load: Load
    max_model_len: int
    dtype: DtypeName
    weights_version: int
    holds_checkpoint: bool
    asleep: bool

    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def guard_active(self) -> bool: ...

    # --- start and end

    async def prepare(self) -> None:
        """Prepare for the first sequence. Raises ContractError if the guard does not work."""

    async def heartbeat(self) -> None: ...
    def declare_dead(self) -> None:
        """Make all waiting calls of this engine raise EngineDead."""

    def shutdown(self) -> None:
        """End the engine's processes; blocking."""

    # --- answers

    async def render(self, messages: list[PromptMessage], images: list[Image]) -> Prompt:
        """Return the prompt, which is the same for all engines of a model.

        images: one for each None of the messages. Raises BadRequest, also for a control token in a
        text, and EngineDead.
        """

    def check_sampling(self, config: RequestConfig) -> None:
        """Raise the `invalid-request` problem for parameters that the engine does not support."""

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

        turn: the lowest of waiting requests is next. Raises BadRequest, EngineDead and Aborted.
        """

    async def openai_app(self, generate_chat: ChatGenerate) -> FastAPI:
        """Return an app with `/v1/models` and `/v1/chat/completions`, rendered by this engine."""

    async def stream(self, prompt: Any, sampling: Any, turn: int, send: Send) -> None:
        """Continue a prompt of `generate_chat` with its `sampling`; pass each output to `send`.

        turn: as in `generate`. Cancelling the call aborts its sequences. Raises EngineDead, Aborted
        and the engine's own errors for a bad request.
        """

    # --- memory of the device

    async def pause(self) -> None:
        """Let running sequences end, and hold new ones back."""

    async def resume(self) -> None:
        """Restore released memory, and continue with waiting sequences."""

    async def sleep(self) -> None:
        """Pause, and release the memory of the device until `resume`; the weights are kept.

        Running sequences end, and waiting ones raise Aborted. A second call has no effect. Raises
        EngineDead if the state of the memory is unknown.
        """

    # --- phases of a push

    async def join_group(self, init: InitCommunicator, first_worker: int) -> None:
        """Let the workers join the weight group.

        first_worker: index of the engine's first worker among the workers of all engines.
        """

    async def leave_group(self) -> None: ...
    async def start_weight_update(self) -> None:
        """Restore the memory of the weights, and prepare to load the checkpoint's layout."""

    async def update_weights(self, parameters: Sequence[ParameterMeta]) -> None:
        """Receive and load the learner's weights; compare the digests of all buckets."""

    async def finish_weight_update(self, version: int) -> None:
        """Complete the load, drop all caches of the old weights, and set the new version."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, for `use_adapter`; wakes from `sleep`."""

    async def use_adapter(self, adapter: Adapter) -> None:
        """Answer with a loaded adapter; running sequences keep theirs."""


class Engines(Protocol):
    """The engines of all replicas (see `replicas.Replicas`)."""

    def all(self) -> Sequence[Engine]:
        """Return all engines by index; raises the `not-ready` problem if one is missing."""

    def alive(self) -> Sequence[Engine]: ...
