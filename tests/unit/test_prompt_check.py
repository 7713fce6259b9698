"""The learner's encoding of a prompt starts with the server's ids, or the run stops."""

import pytest
from transformers import PreTrainedTokenizerFast

from learner.rollout.prompt_check import check_prompt_ids
from shared_contracts.errors import ContractError
from tests.unit.answers import encode

pytestmark = pytest.mark.req("ROLL-01")


def test_equal_ids_pass(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(toy_tokenizer, "the red square")
    check_prompt_ids("a:1", ids, list(ids), toy_tokenizer)


def test_ours_may_go_on_behind_the_servers(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(toy_tokenizer, "the red square")
    check_prompt_ids("a:1", ids, ids[:-1], toy_tokenizer)


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
