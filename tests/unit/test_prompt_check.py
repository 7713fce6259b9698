"""The learner's encoding of a prompt equals the server's ids, all of them, or the run stops."""

import pytest
from transformers import PreTrainedTokenizerFast

from learner.rollout.answers import check_prompt_ids
from learner.stages.tokens import decode_exactly
from shared_contracts.errors import ContractError
from tests.unit.answers import encode

pytestmark = pytest.mark.req("ROLL-01", "RES-16")


def test_equal_ids_pass(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(toy_tokenizer, "the red square")
    check_prompt_ids("a:1", ids, list(ids), toy_tokenizer)


@pytest.mark.parametrize("missing", [1, 2, None], ids=["the last id", "two ids", "all ids"])
def test_a_server_prompt_that_is_shorter_is_a_difference(
    toy_tokenizer: PreTrainedTokenizerFast, missing: int | None
) -> None:
    ids = encode(toy_tokenizer, "cat<|coord_7|><|coord_8|>")
    theirs = ids[: -missing if missing else 0]
    with pytest.raises(ContractError) as caught:
        check_prompt_ids("a:1", ids, theirs, toy_tokenizer)
    assert caught.value.where == f"prompt of a:1, position {len(theirs)}"
    token = ids[len(theirs)]
    text = decode_exactly(toy_tokenizer, [token])
    assert f"the learner has {token} {text!r}, the server no token" in caught.value.found
    assert f"lengths {len(ids)} and {len(theirs)}" in caught.value.found


def test_the_first_difference_is_shown_with_both_tokens(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ours = encode(toy_tokenizer, "cat<|coord_7|><|coord_8|>dog")
    theirs = encode(toy_tokenizer, "cat<|coord_7|><|coord_9|>cat")
    position = len(encode(toy_tokenizer, "cat")) + 1
    with pytest.raises(ContractError) as caught:
        check_prompt_ids("train.jsonl:3", ours, theirs, toy_tokenizer)
    assert caught.value.where == f"prompt of train.jsonl:3, position {position}"
    eight, nine = ours[position], theirs[position]
    assert f"learner has {eight} '<|coord_8|>'" in caught.value.found
    assert f"server {nine} '<|coord_9|>'" in caught.value.found
    assert f"lengths {len(ours)} and {len(theirs)}" in caught.value.found
    assert "chat template" in caught.value.do


def test_ours_that_ends_early_has_no_token_there(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    theirs = encode(toy_tokenizer, "cat<|coord_7|>")
    with pytest.raises(ContractError) as caught:
        check_prompt_ids("a:1", theirs[:-1], theirs, toy_tokenizer)
    assert caught.value.where == f"prompt of a:1, position {len(theirs) - 1}"
    assert "the learner has no token" in caught.value.found
    assert "'<|coord_7|>'" in caught.value.found
