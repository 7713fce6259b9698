"""Another answer format is one module and one line of the registry."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from learner.config import Config, parse_config
from learner.config.registry import ANSWER_FORMATS
from learner.config.rollout_matching import MatchingConfig
from learner.runs.run_folder import RESOLVED
from learner.stages.formats import answer_format
from learner.stages.matching import match_objects
from learner.stages.targets import assess, with_target
from learner.stages.tokens import encode_answer, token_table
from learner.training.checkpoint_checks import check_taught_format
from learner.types import MatchResult, Role, Sample
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, entry_token_ids
from tests.unit.answers import (
    BIRD,
    CAT,
    DOG,
    encode,
    text_in_role,
    text_of,
)
from tests.unit.config_faults import changed, only_error
from tests.unit.small_run import rollout

CAT_LINE = "1. cat <|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n"
DOG_LINE = "2. red dog <|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n"
BROKEN_LINE = "2. hat <|coord_1|><|coord_2|>\n"


@pytest.fixture(scope="module")
def tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that has the other end marker, too."""
    copied = deepcopy(tokenizer)
    copied.add_tokens([AddedToken("<|endoftext|>", special=True)])
    return copied


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config that chooses the format of this folder, registered."""
    monkeypatch.setitem(ANSWER_FORMATS, "lines", "tests.unit.throwaway_format:LINES")
    monkeypatch.setitem(ENTRY_CONTEXTS, "lines", ("\n",))
    return parse_config(changed("custom.answer_format", "lines"))


@pytest.mark.req("ARCH-03")
def test_a_registered_format_parses_appends_and_teaches(
    lines: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    answers = answer_format(lines)
    end_id = token_table(tokenizer, "<|endoftext|>").vocab.end_id
    assert token_table(tokenizer).vocab.end_id != end_id

    ids = encode(tokenizer, CAT_LINE + BROKEN_LINE + "3. cut <|coord_1|>")
    sample = Sample("a:1", (), 64, 64, (CAT, DOG))
    output = rollout([], [*ids, end_id, *encode(tokenizer, DOG_LINE)])

    def match(predicted: object, truths: object) -> MatchResult:
        return match_objects(predicted, truths, MatchingConfig())  # type: ignore[arg-type]

    found = assess(sample, output, tokenizer, match, allow_poly=False, answers=answers)
    assert [item.desc for item in found.parsed.objects] == ["cat"]
    assert found.parsed.dropped == [("2", "wrong_arity")]
    assert found.parsed.truncated
    assert found.match.pairs == [(0, 0)]

    target = with_target(found, tokenizer, "desc_first", MatchingConfig(), answers).target
    assert target is not None
    assert target.token_ids[-1] == end_id
    assert target.fn_keys == ["3"]
    text = text_of(tokenizer, target.token_ids)
    assert text == CAT_LINE + BROKEN_LINE + DOG_LINE.replace("2.", "3.") + ".<|endoftext|>"
    assert text_of(tokenizer, target.token_ids[: target.prefix_len]) == CAT_LINE + BROKEN_LINE
    assert "red dog" in text_in_role(tokenizer, target, Role.APPENDED_DESC)
    assert "hat" in text_in_role(tokenizer, target, Role.FALSE_POSITIVE)
    assert text_in_role(tokenizer, target, Role.CLOSURE).endswith(".<|endoftext|>")
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords, DOG.shape.coords]
    for group in target.coord_groups:
        at = [target.token_ids[position] for position in group.positions]
        assert tuple(token_table(tokenizer).vocab.bins[token] for token in at) == group.bins


@pytest.mark.req("CFG-02")
def test_a_format_that_is_not_registered_is_refused() -> None:
    error = only_error(changed("custom.answer_format", "xml"))
    assert error.where == "custom.answer_format"
    assert error.found == "'xml' is not known"
    assert error.do == "Use object_keys, objects_array or compact"


@pytest.mark.req("FMT-01")
def test_a_checkpoint_of_a_run_with_another_format_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    check_taught_format(checkpoint, "compact", "model.model")
    resolved = tmp_path / RESOLVED
    resolved.write_text("custom: {answer_format: objects_array}\n")
    check_taught_format(checkpoint, "objects_array", "model.model")
    with pytest.raises(ContractError) as caught:
        check_taught_format(checkpoint, "compact", "--checkpoint")
    assert caught.value.where == "--checkpoint"
    assert "as objects_array" in caught.value.found
    assert "custom.answer_format is compact" in caught.value.found
    assert "learner export" in caught.value.do


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize(
    ("text", "taught"), [("custom: {}\n", "object_keys"), ("custom: [", None), ("a: 1", None)]
)
def test_an_older_run_had_the_default_and_a_damaged_file_says_nothing(
    tmp_path: Path, text: str, taught: str | None
) -> None:
    (tmp_path / RESOLVED).write_text(text)
    for name in ANSWER_FORMATS:
        if taught in (None, name):
            check_taught_format(tmp_path / "checkpoint-5", name, "model.model")
        else:
            with pytest.raises(ContractError, match=f"as {taught}"):
                check_taught_format(tmp_path / "checkpoint-5", name, "model.model")


def counting(written_as: str | None, **guard: object) -> dict[str, Any]:
    """A config whose guard counts entries; None: the default format."""
    settings = {"enabled": True, "max_object_keys": 9} | guard
    mapping = changed("rollout_matching.repeat_terminate", settings)
    named = {} if written_as is None else {"answer_format": written_as}
    return mapping | {"custom": mapping["custom"] | named}


@pytest.mark.req("FMT-01", "REP-01")
@pytest.mark.parametrize("name", [None, *ANSWER_FORMATS])
def test_the_guard_counts_the_entries_of_the_format(name: str | None) -> None:
    """It is written once, in `custom`; what a run writes down of it can be read again."""
    config = parse_config(counting(name))
    guard = config.rollout_matching.repeat_terminate
    assert guard.answer_format == config.custom.answer_format == (name or "object_keys")
    assert parse_config(counting(name, answer_format=guard.answer_format)) == config


@pytest.mark.req("FMT-01", "CFG-03")
@pytest.mark.parametrize(
    ("custom", "guard", "found"),
    [
        ("compact", "object_keys", "object_keys, and custom.answer_format is compact"),
        (None, "compact", "compact, and custom.answer_format is object_keys"),
        ("compact", "xml", "'xml' is not known"),
    ],
)
def test_a_guard_of_another_format_is_refused(custom: str | None, guard: str, found: str) -> None:
    error = only_error(counting(custom, answer_format=guard))
    assert error.where == "rollout_matching.repeat_terminate.answer_format"
    assert error.found == found


@pytest.mark.req("REP-01", "ARCH-03")
def test_the_entries_of_a_registered_format_are_counted(
    lines: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    answers = answer_format(lines)
    assert lines.rollout_matching.repeat_terminate.answer_format == "lines"
    marker = entry_token_ids(partial(encode, tokenizer), "lines")
    ids = encode_answer(tokenizer, answers.write([CAT, DOG, BIRD], "desc_first"))
    assert [ids.count(token) for token in marker] == [3]
