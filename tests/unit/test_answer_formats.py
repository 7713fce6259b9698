"""Another answer format is one module and one line of the registry."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from learner.config import Config, parse_config
from learner.config.registry import ANSWER_FORMATS
from learner.config.rollout_matching import MatchingConfig
from learner.runs.run_folder import RESOLVED
from learner.stages.formats import AnswerFormat, answer_format
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.matching import match_objects
from learner.stages.targets import assess, build_ground_truth_target, with_target
from learner.stages.tokens import IM_END, token_table
from learner.training.start_checks import check_taught_format
from learner.types import GroundTruthObject, MatchResult, Role, Sample
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import object_key_token_ids
from tests.unit.answers import (
    BIRD,
    CAT,
    DOG,
    ROOF,
    encode,
    entry,
    text_of,
    with_placeholders,
)
from tests.unit.config_faults import changed, only_error
from tests.unit.small_run import rollout

CAT_LINE = "1. cat <|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n"
DOG_LINE = "2. red dog <|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n"
BROKEN_LINE = "2. hat <|coord_1|><|coord_2|>\n"


@pytest.fixture
def tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that has the other end marker, too."""
    copied = deepcopy(tokenizer)
    copied.add_tokens([AddedToken("<|endoftext|>", special=True)])
    return copied


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config that chooses the format of this folder, registered."""
    monkeypatch.setitem(ANSWER_FORMATS, "lines", "tests.unit.throwaway_format:LINES")
    return parse_config(changed("custom.answer_format", "lines"))


def roles(tokenizer: PreTrainedTokenizerFast, ids: list[int], role: object, *of: Role) -> str:
    chosen = np.isin(np.asarray(role), of)
    return text_of(tokenizer, [token for token, here in zip(ids, chosen, strict=True) if here])


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
    assert "red dog" in roles(tokenizer, target.token_ids, target.role, Role.APPENDED_DESC)
    assert "hat" in roles(tokenizer, target.token_ids, target.role, Role.FALSE_POSITIVE)
    assert roles(tokenizer, target.token_ids, target.role, Role.CLOSURE).endswith(".<|endoftext|>")
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords, DOG.shape.coords]
    for group in target.coord_groups:
        at = [target.token_ids[position] for position in group.positions]
        assert tuple(token_table(tokenizer).vocab.bins[token] for token in at) == group.bins


@pytest.mark.req("ARCH-03")
@pytest.mark.parametrize("truths", [[], [CAT], [CAT, DOG, BIRD]])
def test_a_registered_format_reads_what_it_writes(
    lines: Config, tokenizer: PreTrainedTokenizerFast, truths: list[GroundTruthObject]
) -> None:
    answers = answer_format(lines)
    target = build_ground_truth_target(truths, tokenizer, "desc_first", answers)
    text = text_of(tokenizer, target.token_ids)
    assert text == answers.write(truths, "desc_first") + "<|endoftext|>"
    again = answers.parse(target.token_ids, tokenizer)
    assert [(item.desc, item.shape) for item in again.objects] == [
        (item.desc, item.shape) for item in truths
    ]
    assert not again.truncated


@pytest.mark.req("ARCH-03", "PARSE-05")
@pytest.mark.parametrize("objects", [[], [CAT], [CAT, ROOF]])
def test_today_s_format_is_the_default_and_stands_behind_the_same_seam(
    tokenizer: PreTrainedTokenizerFast, objects: list[GroundTruthObject]
) -> None:
    answers: AnswerFormat = answer_format(parse_config(changed("custom.extra", {})))
    assert answers is COORD_JSON
    ids = encode(tokenizer, answers.write(objects, "desc_first"))
    assert [item.shape for item in answers.parse(ids, tokenizer).objects] == [
        item.shape for item in objects
    ]


@pytest.mark.req("APPEND-02")
@pytest.mark.parametrize("text", ["{}", "{" + entry(1) + ', "b": 1, ' + entry(2, "dog") + "}"])
def test_a_target_is_read_back_as_the_strict_parser_reads_it(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = encode(tokenizer, text + IM_END)
    found = COORD_JSON.read_back(ids, tokenizer)
    assert found is not None
    assert found.parsed == COORD_JSON.parse(ids, tokenizer)
    assert len(found.spans) == len(found.parsed.entry_ends)


@pytest.mark.req("LOSS-02")
@pytest.mark.parametrize("text", ["{}<|image_pad|>", '{"object_1": {"desc": "<|image_pad|>"}}'])
def test_a_target_that_ends_at_a_placeholder_is_not_read_back(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    known = with_placeholders(tokenizer)
    assert COORD_JSON.read_back(encode(known, text + IM_END), known) is None


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


@pytest.mark.req("FMT-01", "REP-01")
@pytest.mark.parametrize("name", ["objects_array", "compact"])
def test_servers_that_would_count_other_entries_are_refused(name: str) -> None:
    guard = {"enabled": True, "max_object_keys": 9}
    mapping = changed("rollout_matching.repeat_terminate", guard)
    mapping["custom"] = mapping["custom"] | {"answer_format": name}
    with pytest.raises(ContractError, match="rollout servers count the entries of object_keys"):
        answer_format(parse_config(mapping))
    mapping["rollout_matching"] = mapping["rollout_matching"] | {"rollout_backend": "hf"}
    assert answer_format(parse_config(mapping)).entry_contexts


@pytest.mark.req("REP-01")
def test_the_guard_counts_the_entries_of_the_format(
    lines: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    contexts = answer_format(lines).entry_contexts
    wanted = encode(tokenizer, "\n")
    assert object_key_token_ids(lambda text: encode(tokenizer, text), contexts) == wanted
    guard = {"enabled": True, "max_object_keys": 9}
    mapping = changed("rollout_matching.repeat_terminate", guard)
    mapping["custom"] = mapping["custom"] | {"answer_format": "lines"}
    with pytest.raises(ContractError, match="rollout servers count the entries of object_keys"):
        answer_format(parse_config(mapping))
