"""`POST /v1/chat/completions`: OpenAI's chat completions over the engines of all replicas (OAI-01).

The prompt of a call is made as one of `/infer/` is (`prompts.py`); the answer is written by the
engine's own handler. What is not served is refused by its name.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollout_server.engines.engine_protocol import (
    Aborted,
    ChatEngine,
    ChatMessage,
    ChatRefused,
    EngineDead,
)
from rollout_server.runtime.refusals import BadRequest, refusal
from rollout_server.serving.infer import Turns, charged, least_loaded
from rollout_server.serving.media import ImageSource
from rollout_server.serving.prompts import Conversation, Prompts, Renderers
from rollout_server.serving.telemetry import CallRecord
from shared_contracts.errors import ProblemError
from shared_contracts.infer import Role, TextPart, Wire


class ImageUrl(Wire):
    """url: as an image of `/infer/`. detail: is taken and means nothing, as in vLLM."""

    url: str
    detail: str | None = None


class ImageUrlPart(Wire):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImageUrlPart, Field(discriminator="type")]


class ChatTurn(Wire):
    """One turn of a conversation."""

    role: Role
    content: str | Annotated[list[Part], Field(fail_fast=True)]


class StreamOptions(Wire):
    """Of a streamed answer: whether it tells the tokens at its end, or with every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Wire):
    """Answers are text."""

    type: Literal["text"]


class ChatCall(Wire):
    """Body of `POST /v1/chat/completions`: what is served of OpenAI's fields, and of vLLM's.

    A field that is null counts as left out. The defaults are vLLM's: what is left out of the
    sampling parameters comes from the checkpoint's `generation_config.json`, or from OpenAI.

    model: the one that is served, or null.
    max_completion_tokens, max_tokens: the first counts where both are given; null, or more than
        there is room for, fills up to the model's context.
    skip_special_tokens: leave them out of the text; as in `/infer/` they stay.
    user: is taken and means nothing.
    """

    messages: Annotated[list[ChatTurn], Field(fail_fast=True)] = Field(min_length=1)
    model: str | None = Field(default=None, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    n: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**62)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    skip_special_tokens: bool = False
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: field for name, field in value.items() if field is not None}
        return value

    @property
    def fields(self) -> dict[str, Any]:
        """What the engine's handler reads: all but the messages."""
        return self.model_dump(exclude={"messages"}, exclude_none=True)

    @property
    def longest(self) -> int | None:
        """Most tokens of an answer, if that is bounded."""
        return self.max_completion_tokens or self.max_tokens


def read_messages(messages: Sequence[ChatTurn]) -> Conversation:
    """The conversation; text is text, `<image>` in it too."""
    read, sources = [], []
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            read.append(ChatMessage(message.role, [message.content]))
            continue
        parts: list[str | None] = []
        for number, part in enumerate(message.content):
            if isinstance(part, TextPart):
                parts.append(part.text)
                continue
            parts.append(None)
            where = f"messages[{index}].content[{number}].image_url.url"
            sources.append(ImageSource(where, part.image_url.url))
        read.append(ChatMessage(message.role, parts))
    return Conversation(read, sources)


class Chats:
    """Answers chat completions.

    serving: as of `Rollouts`.
    """

    def __init__(
        self, serving: Callable[[], Awaitable[Sequence[ChatEngine]]], prompts: Prompts
    ) -> None:
        self._serving = serving
        self._prompts = prompts

    async def models(self) -> tuple[dict[str, Any], int]:
        """The body of `GET /v1/models`, and the version of the weights."""
        engine = (await self._serving())[0]
        return await engine.chat_models(), engine.weights_version

    async def answer(self, call: ChatCall, record: CallRecord, send: Callable[[str], None]) -> None:
        """Give the answer to `send`, or every event of it; `record` has the weights by then.

        Raises the problem of a bad request, or of a server that cannot answer. Cancelling the call
        aborts its sequences.
        """
        record.requests = 1
        with record.phase("wait"):
            engines = await self._serving()
        try:
            with record.phase("prepare"):
                request = engines[0].read_chat(call.fields)
                conversation, renderers = read_messages(call.messages), Renderers(engines)
                await self._prompts.check(conversation, renderers.max_model_len)
                prompt = await self._prompts.render(conversation, renderers, record)
            engine = least_loaded(await self._serving())

            def pass_on(piece: str) -> None:
                # An engine ends its sequences before its version changes.
                record.weights_version = (engine.weights_version, engine.weights_version)
                send(piece)

            room = renderers.max_model_len - len(prompt.token_ids)
            tokens = len(prompt.token_ids) + call.n * min(call.longest or room, room)
            turn = Turns().take(engine, call.n)
            with record.phase("generate"), charged(engine.load, tokens, call.n, turn):
                generated = await engine.chat(prompt, request, turn, pass_on)
        except BadRequest as fault:
            raise refusal("invalid-request", fault.found, fault.where) from fault
        except ChatRefused as error:
            raise _refused(error) from error
        except (EngineDead, Aborted) as error:
            raise refusal("not-ready", str(error), "replicas") from error
        record.generated_tokens += generated.tokens
        record.guard_triggers += generated.guard_triggers


def _refused(error: ChatRefused) -> ProblemError:
    kind = "not-found" if error.status == 404 else "invalid-request"
    return refusal("internal" if error.status >= 500 else kind, str(error), error.where or "body")
