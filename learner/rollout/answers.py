"""Checks of a server's answer, before it is used: every field, and its length.

parse_answer      of probes and of the phases of a push; its text can be shown
most_bytes        most bytes of the requested rollouts
parse_rollouts    the rollouts, each compared with its request
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from learner.stages.tokens import Tokenizer, decode_exactly
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError
from shared_contracts.infer import (
    ChatCompletionResponse,
    Choice,
    InferCall,
    RequestConfig,
    RolloutEnvelope,
    RolloutStamp,
)

A = TypeVar("A", bound=BaseModel)

# Of an answer to anything but a call for rollouts: numbers, texts, lists and objects in it, and
# the characters of each text that are kept.
_MOST_VALUES = 2**16
MOST_CHARACTERS = 1000
# The longest tokens of Qwen's vocabulary have 128 characters, and ids of them six digits.
TOKEN_CHARACTERS = 128
_ID_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 8, 160, 48
# Of an envelope, without its ids and texts.
_ENVELOPE_BYTES = 2**14

_ROLLOUTS: TypeAdapter[list[RolloutEnvelope]] = TypeAdapter(
    Annotated[list[RolloutEnvelope], Field(fail_fast=True)]
)


class Unfit(ValueError):
    """A fault of an answer: where it is, and what was found."""


class NoJson(ValueError):
    """An answer that is not JSON."""


@dataclass(frozen=True)
class Expected:
    """What is known of the model behind a server.

    vocabulary: its ids are below this. context: most tokens of a prompt with its answer.
    """

    vocabulary: int = 2**31
    context: int = 2**17


UNKNOWN = Expected()


def parse_answer(body: bytes, kind: type[A]) -> A:
    """Return the answer, with every text `printable` and cut to `MOST_CHARACTERS`.

    Raises NoJson, Unfit.
    """
    try:
        said = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise NoJson(str(error)) from None
    try:
        return kind.model_validate(_shown(said, iter(range(_MOST_VALUES))))
    except ValidationError as error:
        raise Unfit(_first_fault(error)) from None


def _shown(said: Any, left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise Unfit(f"it has more than {_MOST_VALUES} values")
    if isinstance(said, str):
        return printable(said, most=MOST_CHARACTERS)
    if isinstance(said, list):
        return [_shown(item, left) for item in said]
    if isinstance(said, dict):
        return {_shown(key, left): _shown(item, left) for key, item in said.items()}
    return said


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{_place(fault['loc'])}{fault['msg']}"


def _place(location: tuple[int | str, ...]) -> str:
    """Return a place such as `[0].response.choices: `; empty for the whole answer."""
    names = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in location]
    return f"{''.join(names).removeprefix('.')}: " if names else ""


def most_bytes(call: InferCall, expected: Expected) -> int:
    """Return the bytes of the longest answer that the call can have."""
    config = call.request_config or RequestConfig()
    new = min(config.max_tokens or expected.context, expected.context)
    tokens = config.n * new * (_TOKEN_BYTES + _LOGPROB_BYTES * config.logprobs)
    prompt = expected.context * _ID_BYTES if config.return_details else 0
    return len(call.infer_requests) * (_ENVELOPE_BYTES * config.n + prompt + tokens)


def parse_rollouts(body: bytes, call: InferCall, expected: Expected) -> list[RolloutEnvelope]:
    """Return one envelope per request, in order.

    Raises NoJson, and Unfit for the first field that does not fit its request.
    """
    try:
        envelopes = _ROLLOUTS.validate_json(body)
    except ValidationError as error:
        if error.errors(include_input=False)[0]["type"] == "json_invalid":
            raise NoJson(str(error)) from None
        raise Unfit(_first_fault(error)) from None
    requests = call.infer_requests
    if len(envelopes) != len(requests):
        raise Unfit(f"{len(envelopes)} envelopes for {len(requests)} requests")
    config = call.request_config or RequestConfig()
    for index, envelope in enumerate(envelopes):
        if fault := next(_faults(envelope, config, index, expected), None):
            about = f" (request {requests[index].uuid})" if requests[index].uuid else ""
            raise Unfit(f"[{index}].{fault}{about}")
    return envelopes


def _faults(
    envelope: RolloutEnvelope, config: RequestConfig, index: int, expected: Expected
) -> Iterator[str]:
    """Yield each fault: the field, and what is wrong with it."""
    yield from _choice_faults(envelope.response, config, expected)
    yield from _usage_faults(envelope.response, config)
    yield from _stamp_faults(envelope.coordexp, config, index)


def _choice_faults(
    response: ChatCompletionResponse, config: RequestConfig, expected: Expected
) -> Iterator[str]:
    indices = [choice.index for choice in response.choices]
    if indices != list(range(config.n)):
        yield f"response.choices[].index: {indices[:10]}, and {config.n} answer(s) were asked for"
    prompt = response.prompt_token_ids
    if config.return_details and not prompt:
        yield "response.prompt_token_ids: there are none, and details were requested"
    yield from _id_faults("response.prompt_token_ids", prompt or [], expected)
    most = min(config.max_tokens or expected.context, expected.context)
    for choice in response.choices:
        where, ids = f"response.choices[{choice.index}]", choice.token_ids
        if ids is None and config.return_details:
            yield f"{where}.token_ids: there are none, and details were requested"
        if ids is not None and len(ids) > most:
            yield f"{where}.token_ids: {len(ids)} ids, and at most {most} were asked for"
        yield from _id_faults(f"{where}.token_ids", ids or [], expected)
        yield from _logprob_faults(where, choice, config)
        tokens = most if ids is None else len(ids)
        if len(choice.message.content) > tokens * TOKEN_CHARACTERS:
            found = f"{len(choice.message.content)} characters of {tokens} tokens"
            yield f"{where}.message.content: {found}"


def _logprob_faults(where: str, choice: Choice, config: RequestConfig) -> Iterator[str]:
    if (choice.logprobs is not None) != config.logprobs:
        found = "there are none, and they were" if config.logprobs else "they were not"
        yield f"{where}.logprobs: {found} requested"
    elif choice.logprobs is not None and choice.token_ids is not None:
        numbers, ids = len(choice.logprobs.content), len(choice.token_ids)
        if numbers != ids:
            yield f"{where}.logprobs.content: {numbers} numbers for {ids} ids"


def _id_faults(where: str, ids: list[int], expected: Expected) -> Iterator[str]:
    if ids and max(ids) >= expected.vocabulary:
        place = next(place for place, one in enumerate(ids) if one >= expected.vocabulary)
        found = f"{ids[place]}, and the model has {expected.vocabulary} ids"
        yield f"{where}[{place}]: {found}"


def _usage_faults(response: ChatCompletionResponse, config: RequestConfig) -> Iterator[str]:
    usage = response.usage
    if usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
        yield "response.usage.total_tokens: not the sum of the other two"
    if config.return_details:
        prompt = len(response.prompt_token_ids or [])
        new = sum(len(choice.token_ids or []) for choice in response.choices)
        if (usage.prompt_tokens, usage.completion_tokens) != (prompt, new):
            yield f"response.usage: not the {prompt} and {new} tokens that are there"


def _stamp_faults(stamp: RolloutStamp, config: RequestConfig, index: int) -> Iterator[str]:
    first, last = stamp.weights_version
    if first > last:
        yield f"coordexp.weights_version: from {first} to {last}"
    seed = None if config.seed is None else config.seed + index
    if stamp.seed not in (None, seed):
        yield f"coordexp.seed: {stamp.seed}, and {seed} was asked for"
    ended = stamp.repeat_terminated_choices
    if ended != sorted(set(ended)) or any(each >= config.n for each in ended):
        yield f"coordexp.repeat_terminated_choices: {ended[:10]} of {config.n} choice(s)"
    if bool(ended) != bool(stamp.repeat_terminate_triggered):
        yield "coordexp.repeat_terminate_triggered: not what repeat_terminated_choices says"
    epoch = stamp.server_epoch
    if epoch != printable(epoch, most=MOST_CHARACTERS):
        yield f"coordexp.server_epoch: {printable(epoch, most=80)}"


def check_prompt_ids(
    sample_id: str, ours: Sequence[int], server: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Compare all ids of our encoding with all of the server's `prompt_token_ids`.

    Raises:
        ContractError: names both lengths, the first position that differs, and both tokens
            there, decoded; a side that has ended has no token.
    """
    for position, (mine, theirs) in enumerate(zip_longest(ours, server)):
        if mine != theirs:
            raise ContractError(
                f"prompt of {sample_id}, position {position}",
                f"the learner has {_show(mine, tokenizer)}, "
                f"the server {_show(theirs, tokenizer)} "
                f"(lengths {len(ours)} and {len(server)})",
                "Start the server from the checkpoint the learner loads: tokenizer, chat template "
                "and image processor must be the same on both sides",
            )


def _show(token: int | None, tokenizer: Tokenizer) -> str:
    if token is None:
        return "no token"
    return f"{token} {decode_exactly(tokenizer, [token])!r}"
