"""`POST /infer/`: from the requests of a call to their envelopes, in order (WIRE-02).

read every request -> load its images -> render    a fault in any refuses the whole call
    |
    v
choose a replica for each -> generate -> envelope
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from PIL import Image

from rollout_server.call_record import CallRecord
from rollout_server.chat import ChatMessage, read_conversation
from rollout_server.engine_types import Aborted, Completion, EngineDead, Prompt, PromptRefused
from rollout_server.media import MediaLoader
from rollout_server.problems import BadRequest, refusal, refuse_requests
from rollout_server.routing import Load, charged, least_loaded
from shared_contracts import infer as wire

T = TypeVar("T")

# Requests whose images are held decoded at the same time, over all calls.
MOST_PREPARED = 64


class RolloutEngine(Protocol):
    """What answering needs of an engine (see `engine.Engine`)."""

    @property
    def index(self) -> int: ...
    @property
    def load(self) -> Load: ...
    @property
    def weights_version(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt: ...
    def check_sampling(self, config: wire.RequestConfig) -> None: ...
    async def generate(
        self,
        prompt: Prompt,
        config: wire.RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
    ) -> list[Completion]: ...


class Rollouts:
    """Answers calls with the engines of all replicas.

    serving: the engines with the current weights, once no update of them runs; raises the
        problem that says why there are none.
    model: the name the answers carry.
    media: loads the images of a conversation.
    """

    def __init__(
        self,
        serving: Callable[[], Awaitable[Sequence[RolloutEngine]]],
        model: str,
        media: MediaLoader,
        server_epoch: Callable[[], str],
    ) -> None:
        self._serving = serving
        self._model = model
        self._media = media
        self._server_epoch = server_epoch
        self._preparing = asyncio.Semaphore(MOST_PREPARED)

    async def answer(self, call: wire.InferCall, record: CallRecord) -> list[wire.RolloutEnvelope]:
        """One envelope per request, in order; `record` is told what the call amounts to.

        Raises the `invalid-request` problem, listing every bad request, before anything
        is generated, `not-ready` when an engine dies or its weights break meanwhile, and
        `other-weights` when other weights than the expected ones would answer, or did in
        the end because an update came in between.
        Cancelling the call aborts its sequences.
        """
        config = call.request_config or wire.RequestConfig()
        with record.phase("wait"):
            (engine, *_) = await self._serving()
        require_weights(call, engine.weights_version)
        with record.phase("prepare"):
            self._check_sampling(engine, config)
            prompts = await self._prepare(engine, call.infer_requests, record)
        with record.phase("generate"):
            envelopes = await all_or_cancel(
                [self._roll_out(prompt, call, config, i) for i, prompt in enumerate(prompts)]
            )
        for envelope in envelopes:
            require_weights(call, *envelope.coordexp.weights_version)
        record.add_answers(envelopes)
        return envelopes

    def _check_sampling(self, engine: RolloutEngine, config: wire.RequestConfig) -> None:
        try:
            engine.check_sampling(config)
        except PromptRefused as error:
            raise refusal("invalid-request", str(error), "request_config") from error

    async def _prepare(
        self,
        engine: RolloutEngine,
        requests: Sequence[wire.RolloutInferRequest],
        record: CallRecord,
    ) -> list[Prompt]:
        """Render every request or refuse them all."""
        outcomes = await asyncio.gather(
            *(self._render(engine, request, record) for request in requests),
            return_exceptions=True,
        )
        faults: dict[int, BadRequest] = {}
        prompts: list[Prompt] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BadRequest):
                faults[index] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                prompts.append(outcome)
        if faults:
            raise refuse_requests(faults)
        return prompts

    async def _render(
        self, engine: RolloutEngine, request: wire.RolloutInferRequest, record: CallRecord
    ) -> Prompt:
        """Rendering happens in this process, so any engine's renderer serves all."""
        conversation = read_conversation(request)
        record.images += len(conversation.sources)
        try:
            async with self._preparing:
                images = await self._media.load(conversation.sources)
                prompt = await engine.render(conversation.messages, images)
        except PromptRefused as error:
            raise BadRequest("messages", str(error)) from error
        length = len(prompt.token_ids)
        if length + 1 > engine.max_model_len:
            raise BadRequest(
                "messages",
                f"the prompt has {length} tokens, which leaves no room for an answer in a "
                f"context of {engine.max_model_len} (max_model_len)",
            )
        record.prompt_tokens += length
        return prompt

    async def _roll_out(
        self, prompt: Prompt, call: wire.InferCall, config: wire.RequestConfig, index: int
    ) -> wire.RolloutEnvelope:
        seed = None if config.seed is None else config.seed + index
        engine = least_loaded(await self._serving())
        require_weights(call, engine.weights_version)
        room = engine.max_model_len - len(prompt.token_ids)
        max_tokens = min(config.max_tokens or room, room)
        tokens = len(prompt.token_ids) + config.n * max_tokens
        request_id = uuid.uuid4().hex
        try:
            with charged(engine.load, tokens, config.n):
                completions = await engine.generate(prompt, config, seed, max_tokens, request_id)
        except PromptRefused as error:
            where = f"infer_requests[{index}]"
            raise refusal("invalid-request", str(error), where) from error
        except (EngineDead, Aborted) as error:
            raise refusal("not-ready", str(error), f"replicas[{engine.index}]") from error
        return self._envelope(prompt, completions, config, seed, request_id)

    def _envelope(
        self,
        prompt: Prompt,
        completions: list[Completion],
        config: wire.RequestConfig,
        seed: int | None,
        request_id: str,
    ) -> wire.RolloutEnvelope:
        details = config.return_details
        new_tokens = sum(len(completion.token_ids) for completion in completions)
        response = wire.ChatCompletionResponse(
            model=self._model,
            choices=[_choice(completion, details) for completion in completions],
            usage=wire.Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=new_tokens,
                total_tokens=len(prompt.token_ids) + new_tokens,
            ),
            id=request_id,
            created=int(time.time()),
            prompt_token_ids=prompt.token_ids if details else None,
        )
        stamp = wire.RolloutStamp(
            repeat_terminate_triggered=1 if any(c.repeat_terminated for c in completions) else 0,
            repeat_terminated_choices=[c.index for c in completions if c.repeat_terminated],
            weights_version=(
                min(completion.weights_version[0] for completion in completions),
                max(completion.weights_version[1] for completion in completions),
            ),
            server_epoch=self._server_epoch(),
            seed=seed,
            finish=completions[0].finish,
        )
        return wire.RolloutEnvelope(response=response, coordexp=stamp)


def _choice(completion: Completion, details: bool) -> wire.Choice:
    return wire.Choice(
        index=completion.index,
        message=wire.ChatMessage(content=completion.text),
        finish_reason=completion.finish,
        token_ids=completion.token_ids if details else None,
    )


def require_weights(call: wire.InferCall, *versions: int) -> None:
    """Raises the `other-weights` problem for a version that is not the expected one."""
    expected = call.expected_weights_version
    for version in versions:
        if expected not in (None, version):
            raise refusal(
                "other-weights",
                f"version {expected} is expected, and the server's is {version}",
                "expected_weights_version",
            )


async def all_or_cancel(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Gather; when one fails or the whole is cancelled, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
