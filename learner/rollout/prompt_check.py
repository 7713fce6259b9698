"""Proof that both sides encoded the same prompt (ROLL-01)."""

from collections.abc import Sequence

from learner.tokens import Tokenizer, decode_exactly
from shared_contracts.errors import ContractError


def check_prompt_ids(
    sample_id: str, ours: Sequence[int], server: Sequence[int], tokenizer: Tokenizer
) -> None:
    """Our encoding must start with exactly the server's `prompt_token_ids`.

    Raises:
        ContractError: names the first differing position and both tokens, decoded.
    """
    for position, theirs in enumerate(server):
        mine = ours[position] if position < len(ours) else None
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
