"""`POST /infer/`: from the requests of a call to their envelopes, in order (WIRE-02).

read every request -> load its images -> render    a fault in any refuses the whole call
    |
    v
choose a replica for each -> generate -> envelope
"""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from PIL import Image

from rollout_server.chat import ChatMessage, ImageSource, read_conversation
from rollout_server.engine_types import Aborted, Completion, EngineDead, Prompt, PromptRefused
from rollout_server.media import load_image
from rollout_server.problems import BadRequest, refusal, refuse_requests
from rollout_server.routing import Router
from shared_contracts import infer as wire

T = TypeVar("T")


class RolloutEngine(Protocol):
    """What answering needs of an engine (see `engine.Engine`)."""

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

    model: the name the answers carry.
    media_dirs: where local images may lie.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        model: str,
        media_dirs: Sequence[Path],
        server_epoch: str,
    ) -> None:
        self._engines = engines
        self._model = model
        self._media_dirs = [directory.resolve() for directory in media_dirs]
        self._server_epoch = server_epoch
        self._router = Router(len(engines))

    async def answer(self, call: wire.InferCall) -> list[wire.RolloutEnvelope]:
        """One envelope per request, in order.

        Raises the `invalid-request` problem, listing every bad request, before anything
        is generated, and `not-ready` when an engine dies or its weights break meanwhile.
        Cancelling the call aborts its sequences.
        """
        config = call.request_config or wire.RequestConfig()
        self._check_sampling(config)
        prompts = await self._prepare(call.infer_requests)
        return await all_or_cancel(
            [self._roll_out(prompt, config, index) for index, prompt in enumerate(prompts)]
        )

    def _check_sampling(self, config: wire.RequestConfig) -> None:
        try:
            self._engines[0].check_sampling(config)
        except PromptRefused as error:
            raise refusal("invalid-request", str(error), "request_config") from error

    async def _prepare(self, requests: Sequence[wire.RolloutInferRequest]) -> list[Prompt]:
        """Render every request or refuse them all."""
        outcomes = await asyncio.gather(
            *(self._render(request) for request in requests), return_exceptions=True
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

    async def _render(self, request: wire.RolloutInferRequest) -> Prompt:
        """Rendering happens in this process, so any engine's renderer serves all."""
        conversation = read_conversation(request)
        images = await asyncio.to_thread(self._load_images, conversation.sources)
        engine = self._engines[0]
        try:
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
        return prompt

    def _load_images(self, sources: Sequence[ImageSource]) -> list[Image.Image]:
        return [load_image(source, self._media_dirs) for source in sources]

    async def _roll_out(
        self, prompt: Prompt, config: wire.RequestConfig, index: int
    ) -> wire.RolloutEnvelope:
        seed = None if config.seed is None else config.seed + index
        room = self._engines[0].max_model_len - len(prompt.token_ids)
        max_tokens = min(config.max_tokens or room, room)
        tokens = len(prompt.token_ids) + config.n * max_tokens
        request_id = uuid.uuid4().hex
        replica = self._router.acquire(tokens)
        try:
            completions = await self._engines[replica].generate(
                prompt, config, seed, max_tokens, request_id
            )
        except PromptRefused as error:
            where = f"infer_requests[{index}]"
            raise refusal("invalid-request", str(error), where) from error
        except (EngineDead, Aborted) as error:
            raise refusal("not-ready", str(error), f"replicas[{replica}]") from error
        finally:
            self._router.release(replica, tokens)
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
            repeat_terminate_triggered=int(any(c.repeat_terminated for c in completions)),
            repeat_terminated_choices=[c.index for c in completions if c.repeat_terminated],
            weights_version=(
                min(completion.weights_version[0] for completion in completions),
                max(completion.weights_version[1] for completion in completions),
            ),
            server_epoch=self._server_epoch,
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
