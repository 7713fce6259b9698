"""The answer of `/infer/`: compared with its call, and as the learner's rollouts."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated

from pydantic import Field, TypeAdapter

from learner.stages.tokens import Tokenizer, decode_exactly
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope

_ENVELOPES: TypeAdapter[list[RolloutEnvelope]] = TypeAdapter(
    Annotated[list[RolloutEnvelope], Field(fail_fast=True)]
)


def parse_rollouts(body: bytes, call: InferCall) -> list[RolloutEnvelope]:
    """Return one envelope per request, in order.

    Raises ValueError if a field breaks the wire contract, if the number of envelopes differs, or if
    requested ids or logprobs are missing.
    """
    envelopes, requests = _ENVELOPES.validate_json(body), call.infer_requests
    if len(envelopes) != len(requests):
        raise ValueError(f"{len(envelopes)} envelopes for {len(requests)} requests")
    config = call.request_config or RequestConfig()
    for index, response in enumerate(envelope.response for envelope in envelopes):
        wanted = [response.prompt_token_ids, *(choice.token_ids for choice in response.choices)]
        if config.return_details and None in wanted:
            raise ValueError(f"[{index}].response: token ids are missing")
        if config.logprobs and any(choice.logprobs is None for choice in response.choices):
            raise ValueError(f"[{index}].response.choices: logprobs are missing")
    return envelopes


def output_of(envelope: RolloutEnvelope) -> RolloutOutput:
    """Return the first choice of an envelope that has details."""
    choice, stamp = envelope.response.choices[0], envelope.coordexp
    logprobs = None if choice.logprobs is None else [one.logprob for one in choice.logprobs.content]
    assert envelope.response.prompt_token_ids is not None
    assert choice.token_ids is not None
    return RolloutOutput(
        prompt_token_ids=envelope.response.prompt_token_ids,
        response_token_ids=choice.token_ids,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        repeat_terminated=choice.index in stamp.repeat_terminated_choices,
        weights_version=stamp.weights_version,
        seed=stamp.seed,
        logprobs=logprobs,
    )


def check_prompt_ids(
    sample_id: str, ours: Sequence[int], server: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Compare all ids of the learner's encoding with all of the server's `prompt_token_ids`.

    Raises ContractError with both lengths, the first position that differs, and both tokens there.
    """
    for position, (mine, theirs) in enumerate(zip_longest(ours, server)):
        if mine != theirs:
            raise ContractError(
                f"prompt of {sample_id}, position {position}",
                f"the learner has {_decoded(mine, tokenizer)}, "
                f"the server {_decoded(theirs, tokenizer)} "
                f"(lengths {len(ours)} and {len(server)})",
                "Start the server from the checkpoint the learner loads: tokenizer, chat template "
                "and image processor must be the same on both sides",
            )


def _decoded(token: int | None, tokenizer: Tokenizer) -> str:
    if token is None:
        return "no token"
    return f"{token} {decode_exactly(tokenizer, [token])!r}"
