"""The learner's encoding of a prompt equals the server's ids, all of them, or the run stops."""

import pytest
from transformers import PreTrainedTokenizerFast

from learner.rollout.answers import check_prompt_ids
from shared_contracts.errors import ContractError
from tests.unit.answers import encode, pieces

pytestmark = pytest.mark.req("ROLL-01", "RES-16")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("<|coord_7|><|coord_8|>", "<|coord_7|>"),
        ("<|coord_7|>", "<|coord_7|><|coord_8|>"),
        ("<|coord_7|><|coord_8|>dog", "<|coord_7|><|coord_9|>cat"),
    ],
    ids=["shorter", "longer", "another token"],
)
def test_the_first_difference_is_shown_with_both_tokens(
    toy_tokenizer: PreTrainedTokenizerFast, ours: str, theirs: str
) -> None:
    a, b = (encode(toy_tokenizer, text) for text in (ours, theirs))
    with pytest.raises(ContractError) as caught:
        check_prompt_ids("train.jsonl:3", a, b, toy_tokenizer)
    assert caught.value.where == "prompt of train.jsonl:3, position 1"
    left, right = (
        f"{ids[1]} {pieces(toy_tokenizer, ids)[1]!r}" if len(ids) > 1 else "no token"
        for ids in (a, b)
    )
    assert f"the learner has {left}, the server {right}" in caught.value.found
    assert f"lengths {len(a)} and {len(b)}" in caught.value.found
    assert "chat template" in caught.value.do
