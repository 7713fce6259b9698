"""Chat completions by vLLM's own handlers, over the engine that also answers `/infer/`.

vLLM's handler reads the sampling parameters, generates, and writes the answer or its events. The
server renders the prompt itself, by the same rules as that of `/infer/`.
"""

import copy
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from pydantic import ValidationError
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.chat_utils import ConversationMessage
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_server.engines.engine_protocol import Aborted, ChatRefused, Generated

# The prompt is rendered already, and an answer has the text that `/infer/` gives it.
_AS_INFER: dict[str, Any] = {"messages": [], "spaces_between_special_tokens": False}


class ChatHandlers:
    """vLLM's handlers of `/v1/models` and `/v1/chat/completions` for one engine.

    model: the name it is served by.
    adapter, sentinel: as in `VllmEngine` and `EngineGuard`, for every sequence.
    """

    def __init__(
        self, llm: AsyncLLM, model: str, adapter: LoRARequest | None, sentinel: int | None
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._sentinel = sentinel
        self._models = OpenAIServingModels(llm, [BaseModelPath(name=model, model_path=model)])
        renderer = OnlineRenderer(
            llm.model_config,
            llm.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        self._chat = _RenderedChat(
            llm,
            self._models,
            "assistant",
            online_renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )

    async def models(self) -> dict[str, Any]:
        """The list of the models, which is one."""
        return (await self._models.show_available_models()).model_dump()

    def read(self, fields: dict[str, Any]) -> ChatCompletionRequest:
        """Raises ChatRefused for another model, and for parameters that vLLM does not take."""
        name = fields.get("model")
        if name is not None and not self._models.is_base_model(name):
            served = self._models.model_name()
            raise ChatRefused(404, f"the model {name!a} is not served; {served!a} is", "model")
        try:
            request = ChatCompletionRequest.model_validate(_AS_INFER | fields)
            request.to_sampling_params(1, self._chat.default_sampling_params)
        except (ValidationError, VLLMClientError, ValueError) as error:
            raise _refused(create_error_response(error)) from error
        if self._sentinel is not None:
            request.stop_token_ids = [self._sentinel]
        return request

    async def answer(
        self,
        engine_input: EngineInput,
        request: ChatCompletionRequest,
        priority: int,
        send: Callable[[str], None],
    ) -> Generated:
        """Give the answer to `send`, or its events one by one.

        Raises ChatRefused, Aborted and what vLLM raises for a dead engine.
        """
        client = _Client(self._llm, self._adapter, self._sentinel)
        request.priority = priority
        chat = self._chat.over(client, engine_input)
        try:
            answer = await chat.create_chat_completion(request)
            client.raise_failure()
            if isinstance(answer, ErrorResponse):
                raise _refused(answer)
            if isinstance(answer, ChatCompletionResponse):
                send(answer.model_dump_json())
            else:
                async for event in answer:
                    client.raise_failure()
                    send(event)
        except VLLMClientError as error:
            raise _refused(create_error_response(error)) from error
        return client.generated


class _RenderedChat(OpenAIServingChat):
    """vLLM's handler of a request whose prompt is rendered."""

    _engine_input: EngineInput

    def over(self, client: "_Client", engine_input: EngineInput) -> "_RenderedChat":
        """The handler for one request: a copy, as making one reads files of the checkpoint."""
        chat = copy.copy(self)
        chat.engine_client = cast(EngineClient, client)
        chat._engine_input = engine_input
        return chat

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]]:
        return [], [self._engine_input]


class _Client:
    """What the handler needs of vLLM's `EngineClient`, for one request.

    The handler makes an answer, or an event, of what `generate` raises, also of a cancellation.
    `raise_failure` raises it again.
    """

    def __init__(self, llm: AsyncLLM, adapter: LoRARequest | None, sentinel: int | None) -> None:
        self._llm = llm
        self._adapter = adapter
        self._sentinel = sentinel
        self._tokens = self._guard_triggers = 0
        self._failure: BaseException | None = None

    async def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._llm.generate(
            prompt, sampling_params, request_id, lora_request=self._adapter, **options
        )
        try:
            async for output in outputs:
                self._count(output)
                yield output
        except BaseException as error:
            self._failure = error
            raise

    def _count(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            self._tokens += len(choice.token_ids)
            if choice.finish_reason not in (None, "stop", "length"):
                raise Aborted(f"the engine ended a sequence: {choice.finish_reason}")
            if self._sentinel is not None and choice.stop_reason == self._sentinel:
                self._guard_triggers += 1

    @property
    def generated(self) -> Generated:
        return Generated(self._tokens, self._guard_triggers)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _refused(answer: ErrorResponse) -> ChatRefused:
    error = answer.error
    return ChatRefused(error.code, error.message, error.param)
