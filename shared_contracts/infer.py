"""Bodies of `POST /infer/`, field-compatible with ms-swift 4.6 (WIRE-01, WIRE-02).

They follow ms-swift's `RolloutInferRequest`, `RequestConfig` and `ChatCompletionResponse`; a test
compares them with `swift.infer_engine.protocol`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from shared_contracts.weights import Count, Wire

Role = Literal["system", "user", "assistant"]

# Each fault of a call takes memory: longer calls are refused without validation of their items, and
# `fail_fast` reports the first bad item of a list only.
MAX_REQUESTS = 2**16

_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]

# Bounds of vLLM's `SamplingParams`, also for a training YAML.
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]


class TextPart(Wire):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImagePart(Wire):
    """An image of a message; null: the next one of `images`."""

    type: Literal["image"]
    image: str | None = None


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Wire):
    """One turn of a conversation: text with `<image>` marks, or parts."""

    role: Role
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


def _refuse_unserved(model: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Raise ValueError for a field of ms-swift that this server does not support, unless empty."""
    assert info.field_name is not None
    if value not in (model.model_fields[info.field_name].default, None, [], {}, ""):
        raise ValueError(f"field '{info.field_name}' is not served; leave it out, null or empty")
    return value


class RolloutInferRequest(Wire):
    """One conversation to continue.

    images: in the order of the image parts of `messages`; each an http(s) URL, a data URL, base64
        text or a path that the server may read. A text message can have `<image>` marks instead of
        image parts.
    uuid: the caller's id of this request.
    """

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    images: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    audios: Annotated[list[str], Field(fail_fast=True)] | None = None
    videos: Annotated[list[str], Field(fail_fast=True)] | None = None
    tools: list[Any] | None = None
    objects: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    data_dict: dict[str, Any] | None = None
    uuid: str | None = None
    add_eos: Literal[False, "auto"] | None = None

    @field_validator("images", mode="before")
    @classmethod
    def _one_image_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    _only_served_fields = field_validator(
        "audios", "videos", "tools", "objects", "chat_template_kwargs", "data_dict"
    )(classmethod(_refuse_unserved))


class RequestConfig(Wire):
    """Decoding settings. `temperature` 0 or null is greedy.

    max_tokens: null: up to the model's context.
    seed: request i of a call is sampled with `seed + i`.
    logprobs: each choice has the log-probability of each of its tokens.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    num_beams: int = 1
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**62)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    return_details: bool = False
    structured_outputs_regex: str | None = None

    _only_served_fields = field_validator(
        *("stream", "top_logprobs", "prompt_logprobs", "best_of", "structured_outputs_regex"),
        *("num_beams", "length_penalty"),
    )(classmethod(_refuse_unserved))


class InferCall(Wire):
    """Body of `POST /infer/`.

    request_id: the caller's id of this call; a repeated call with the same id and body gets the
        answer of the first one.
    expected_weights_version: refuse the call unless the weights have this version.
    """

    infer_requests: list[RolloutInferRequest] = Field(max_length=MAX_REQUESTS)
    request_config: RequestConfig | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    expected_weights_version: int | None = Field(default=None, ge=0)
    metrics: None = None
    template: None = None
    use_tqdm: bool | None = None
    adapter_request: None = None


class ChatMessage(Wire):
    """The answer's text, as a message of chat completions."""

    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: None = None
    reasoning_content: None = None


# Replaces lower log-probabilities and NaN: JSON has no infinity.
LEAST_LOGPROB = -9999.0


class TokenLogprob(Wire):
    """logprob: of one token, in nats, by the model's raw logits.

    Temperature, penalties, top-k, top-p and the repeat guard do not change it.
    """

    logprob: float = Field(ge=LEAST_LOGPROB, le=0.0)


class ChoiceLogprobs(Wire):
    """content: one for each of `token_ids`, as ms-swift's client reads them."""

    content: Annotated[list[TokenLogprob], Field(fail_fast=True)]

    @classmethod
    def of(cls, values: list[float]) -> "ChoiceLogprobs":
        """Clip log-probabilities to the bounds; NaN becomes `LEAST_LOGPROB`."""
        bounded = [min(0.0, max(LEAST_LOGPROB, value)) for value in values]
        return cls(content=[TokenLogprob(logprob=value) for value in bounded])


class Choice(Wire):
    """One of the `n` continuations of a request.

    token_ids: response ids without the final stop token; only with `return_details`.
        A stop string is cut from the text, but not from the ids.
    logprobs: only with `RequestConfig.logprobs`.
    """

    index: Count
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChoiceLogprobs | None = None
    token_ids: _TokenIds | None = None


class Usage(Wire):
    """Tokens of one request; completion_tokens: of all its choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class ChatCompletionResponse(Wire):
    """The answer to one request.

    prompt_token_ids: with image placeholders expanded; only with `return_details`.
    """

    model: str
    choices: Annotated[list[Choice], Field(fail_fast=True, min_length=1)]
    usage: Usage
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    prompt_token_ids: _TokenIds | None = None
    prompt_logprobs: None = None
    images_size: Annotated[list[tuple[int, int]], Field(fail_fast=True)] | None = None


class RolloutStamp(Wire):
    """Additional facts about a rollout (WIRE-03).

    repeat_terminate_triggered: 1 if the repeat guard ended any choice of the rollout.
    repeat_terminated_choices: the indices of these choices.
    weights_version: (first, last) of the generation; they differ if a push finished in between.
    """

    repeat_terminate_triggered: Literal[0, 1]
    repeat_terminated_choices: Annotated[list[Count], Field(fail_fast=True)]
    weights_version: tuple[Count, Count]
    server_epoch: str
    seed: int | None
    finish: str


class RolloutEnvelope(Wire):
    """One element of the answer of `POST /infer/`: the response and its stamp."""

    response: ChatCompletionResponse
    coordexp: RolloutStamp
