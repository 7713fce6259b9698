"""One suite over all answer formats: any ids are read, continued, closed and read back."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config import parse_config
from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.config.rollout_matching import MatchingConfig
from learner.runs.run_folder import RESOLVED
from learner.stages.formats import AnswerFormat, answer_format
from learner.stages.formats.compact import COMPACT
from learner.stages.formats.coord_json import COORD_JSON, serialize_append, serialize_objects
from learner.stages.formats.objects_array import CLOSING, HEAD, OBJECTS_ARRAY
from learner.stages.matching import match_objects
from learner.stages.targets import TargetUnreadable, assess, build_ground_truth_target, with_target
from learner.stages.tokens import IM_END, Tokenizer, encode_answer, token_table
from learner.training.checkpoint_checks import check_model, check_taught_format
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout, Role, Sample
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, entry_token_ids
from tests.unit.answers import (
    CAT,
    DOG,
    ROOF,
    coords,
    encode,
    entry,
    ground_truths,
    rollouts,
    text_in_role,
    text_of,
    with_placeholders,
)
from tests.unit.config_faults import changed
from tests.unit.format_readers import (
    CAT_ITEM,
    CAT_LINE,
    DOG_ITEM,
    DOG_LINE,
    LIST_FRAGMENTS,
    broken_lines,
    broken_lists,
    check_lines,
    check_list,
    list_item,
)
from tests.unit.parse_invariants import check_parsed
from tests.unit.reference_parser import read_symbols
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf, rollout


def check_keys(
    ids: list[int], parsed: ParsedRollout, tokenizer: PreTrainedTokenizerFast, allow_poly: bool
) -> None:
    """`test_parsing_properties` holds it against a second reader, too."""
    check_parsed(ids, parsed, tokenizer)
    if not parsed.invalid_rollout:
        whole = read_symbols(ids, tokenizer).symbols
        assert whole.startswith(read_symbols(parsed.prefix_token_ids, tokenizer).symbols)
    assert allow_poly or all(found.kind == "bbox_2d" for found in parsed.objects)


def joined_keys(values: list[str]) -> str:
    return "{" + ", ".join(f'"object_{n}": {value}' for n, value in enumerate(values, 1))


def json_values(ending: str, text: str) -> list[Any]:
    """Values of a prefix, with the bare coordinate tokens in quotes."""
    text = text.replace('"<|', "<|").replace('|>"', "|>")
    whole = json.loads(text.replace("<|", '"<|').replace("|>", '|>"') + ending)
    return whole["objects"] if ending == CLOSING else list(whole.values())


class Case(NamedTuple):
    """A format and its answers.

    rollouts: ids of more or less broken answers. check: raises if an answer is read wrongly.
    head: how an answer begins. values: of entries. join: a prefix of some values; split: the values
    of a prefix. answer: with the entries CAT, `hat` (invalid), CAT and the beginning of another.
    target: what it becomes if CAT and DOG are true. leads: the text before the departure.
    """

    name: str
    answers: AnswerFormat
    rollouts: Callable[[Tokenizer], st.SearchStrategy[list[int]]]
    check: Callable[[list[int], ParsedRollout, Any, bool], None]
    head: str
    join: Callable[[list[str]], str]
    split: Callable[[str], list[Any]]
    values: list[str]
    answer: str
    target: str
    hat: str
    leads: str


HAT_ITEM, HAT_LINE, HAT_ENTRY = (
    list_item("hat", 1, 2),
    "hat<|coord_1|><|coord_2|>\n",
    entry(2, "hat", (1, 2)),
)
CASES = [
    Case(
        name="object_keys",
        answers=COORD_JSON,
        rollouts=rollouts,
        check=check_keys,
        head="{",
        join=joined_keys,
        split=partial(json_values, "}"),
        values=LIST_FRAGMENTS[:7],
        answer="{" + ", ".join([entry(1), HAT_ENTRY, entry(3)]) + ', "object_4": {"desc": "bir',
        target="{" + ", ".join([entry(1), HAT_ENTRY, entry(3, "red dog", DOG.shape.coords)]) + "}",
        hat=HAT_ENTRY,
        leads='"desc": "',
    ),
    Case(
        name="objects_array",
        answers=OBJECTS_ARRAY,
        rollouts=broken_lists,
        check=check_list,
        head=HEAD,
        join=lambda values: HEAD + ",".join(values),
        split=partial(json_values, CLOSING),
        values=LIST_FRAGMENTS[:7],
        answer=HEAD + ",".join([CAT_ITEM, HAT_ITEM, CAT_ITEM]) + ',{"desc":"bir',
        target=HEAD + ",".join([CAT_ITEM, HAT_ITEM, DOG_ITEM]) + CLOSING,
        hat=HAT_ITEM,
        leads='"desc":"',
    ),
    Case(
        name="compact",
        answers=COMPACT,
        rollouts=broken_lines,
        check=check_lines,
        head="",
        join="".join,
        split=partial(str.splitlines, keepends=True),
        values=[CAT_LINE, DOG_LINE, HAT_LINE, "toy 🚀\n", CAT_LINE],
        answer=CAT_LINE + HAT_LINE + CAT_LINE + "bir",
        target=CAT_LINE + HAT_LINE + DOG_LINE + ".",
        hat=HAT_LINE,
        leads="<|coord_2|>\n",
    ),
]
each_format = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
TRUTHS = st.lists(ground_truths(allow_poly=True), max_size=5)
ORDERS = st.sampled_from(["desc_first", "geometry_first"])


@pytest.mark.req("FMT-01", "REP-01")
def test_every_format_is_here_and_has_entries_that_a_guard_counts() -> None:
    assert [case.name for case in CASES] == list(ENTRY_CONTEXTS)
    assert ANSWER_FORMATS.keys() == ENTRY_CONTEXTS.keys()
    for case in CASES:
        config = parse_config(changed("custom.answer_format", case.name))
        assert answer_format(config) is case.answers


@pytest.mark.req("FMT-01", "PARSE-07")
@each_format
@given(data=st.data(), headed=st.booleans())
def test_no_ids_raise(
    data: st.DataObject, headed: bool, case: Case, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The same ids give the same, and the prefix of an answer holds its objects."""
    ids = data.draw(st.lists(st.integers(-2, len(tokenizer) + 5), max_size=60))
    ids = encode(tokenizer, case.head) * headed + ids
    parsed = case.answers.parse(ids, tokenizer)
    assert case.answers.parse(ids, tokenizer) == parsed
    if case.answers is COORD_JSON:
        check_parsed(ids, parsed, tokenizer)
    again = case.answers.parse(parsed.prefix_token_ids, tokenizer)
    assert [o.coords for o in again.objects] == [o.coords for o in parsed.objects]


@pytest.mark.req("FMT-01", "PARSE-01", "PARSE-03", "PARSE-04", "PARSE-05", "PARSE-06", "PARSE-07")
@each_format
@given(data=st.data(), allow_poly=st.booleans())
def test_any_answer_is_read_as_the_words_of_the_format_say(
    data: st.DataObject, allow_poly: bool, case: Case, tokenizer: Tokenizer
) -> None:
    ids = data.draw(case.rollouts(tokenizer))
    parsed = case.answers.parse(ids, tokenizer, allow_poly=allow_poly)
    case.check(ids, parsed, tokenizer, allow_poly)


@pytest.mark.req("FMT-01", "CLEAN-01")
@each_format
@given(data=st.data())
def test_any_entries_are_kept(data: st.DataObject, case: Case, tokenizer: Tokenizer) -> None:
    values = data.draw(st.lists(st.sampled_from(case.values), min_size=1, max_size=5))
    parsed = case.answers.parse(encode(tokenizer, case.join(values)), tokenizer)
    entries = case.split(text_of(tokenizer, parsed.prefix_token_ids))
    assert len(entries) == len(parsed.entry_ends)
    kept = [p for p in range(len(entries)) if data.draw(st.booleans())]
    ids = case.answers.keep(parsed, tokenizer, kept)
    assert case.split(text_of(tokenizer, ids)) == [entries[p] for p in kept]


@pytest.mark.req("FMT-01", "APPEND-01", "APPEND-02")
@each_format
@given(data=st.data(), truths=TRUTHS, order=ORDERS)
def test_any_prefix_is_continued_and_read_back(
    data: st.DataObject,
    truths: list[GroundTruthObject],
    order: FieldOrder,
    case: Case,
    tokenizer: Tokenizer,
) -> None:
    parsed = case.answers.parse(data.draw(case.rollouts(tokenizer)), tokenizer)
    text = text_of(tokenizer, parsed.prefix_token_ids)
    first = parsed.max_object_index + 1
    ids = [
        *parsed.prefix_token_ids,
        *encode_answer(tokenizer, case.answers.append(text, truths, first, order)),
        token_table(tokenizer).vocab.end_id,
    ]
    found = case.answers.read_back(ids, tokenizer)
    assert found is not None
    assert [(o.desc, o.shape) for o in found.parsed.objects] == [
        *((o.desc, o.shape) for o in parsed.objects),
        *((o.desc, o.shape) for o in truths),
    ]
    appended = found.parsed.objects[len(parsed.objects) :]
    assert [o.index for o in appended] == [first + i for i in range(len(truths))]
    assert not found.parsed.truncated
    assert len(found.spans) == len(found.parsed.entry_ends)
    closing = case.answers.append(text, [], first, order)
    assert text_of(tokenizer, [ids[p] for p in found.closure]).endswith(closing[-1] + IM_END)


@pytest.mark.req("FMT-01", "CHA-01", "REP-01", "RES-12")
@each_format
@given(truths=TRUTHS, order=ORDERS)
def test_the_ground_truth_is_written_and_its_entries_are_counted(
    truths: list[GroundTruthObject], order: FieldOrder, case: Case, tokenizer: Tokenizer
) -> None:
    """The guard counts as many entries as there are objects, whatever a description ends in."""
    target = build_ground_truth_target(truths, tokenizer, order, case.answers)
    ids, text = target.token_ids, case.answers.write(truths, order)
    assert text_of(tokenizer, ids) == text + IM_END
    assert [group.bins for group in target.coord_groups] == [o.shape.coords for o in truths]
    again = case.answers.parse(ids, tokenizer)
    assert [GroundTruthObject(o.desc, o.shape) for o in again.objects] == truths
    marker = entry_token_ids(partial(encode, tokenizer), case.name)
    windows = [ids[i : i + len(marker)] for i in range(len(ids))]
    assert windows.count(marker) == len(truths)
    if case.answers is OBJECTS_ARRAY:
        read = json.loads(text)["objects"]
        assert [each["desc"] for each in read] == [truth.desc for truth in truths]
        assert all((next(iter(each)) == "desc") == (order == "desc_first") for each in read)


@pytest.mark.req("FMT-01", "PARSE-07")
@each_format
def test_a_thousand_objects_are_all_read(case: Case, qwen_tokenizer: Tokenizer) -> None:
    ids = encode(qwen_tokenizer, case.answers.write([CAT, ROOF] * 500, "desc_first"))
    parsed = case.answers.parse(ids, qwen_tokenizer)
    assert [found.index for found in parsed.objects] == list(range(1, 1001))
    assert parsed.max_object_index == 1000


@pytest.mark.req("FMT-01", "CHB-01")
@each_format
def test_an_answer_is_corrected_continued_and_closed(case: Case, tokenizer: Tokenizer) -> None:
    found = assess(
        Sample("a:1", (), 64, 64, (CAT, DOG)),
        rollout([], encode(tokenizer, case.answer)),
        tokenizer,
        partial(match_objects, config=MatchingConfig()),
        allow_poly=False,
        answers=case.answers,
        duplicate_iou=0.9,
    )
    assert found.parsed.truncated
    assert [why for _, why in found.parsed.dropped] == ["wrong_arity", "key_invalid"]
    assert [d.found.key for d in found.duplicates or ()] == ["object_3"]
    config = parse_config(changed("custom.answer_format", case.name))
    target = with_target(found, tokenizer, config).target
    assert target is not None
    assert text_of(tokenizer, target.token_ids) == case.target + IM_END
    assert target.fn_keys == ["object_3"]
    ((position, token),) = target.departures
    assert text_of(tokenizer, target.token_ids[:position]).endswith(case.leads)
    assert "cat".startswith(text_of(tokenizer, [token]))

    in_role = partial(text_in_role, tokenizer, target)
    assert in_role(Role.MATCHED_DESC) == "cat"
    assert in_role(Role.APPENDED_DESC) == "red dog"
    assert case.hat[1:-1] in in_role(Role.FALSE_POSITIVE)
    assert in_role(Role.CLOSURE).endswith(case.target[-1] + IM_END)
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords, DOG.shape.coords]


@pytest.mark.req("FMT-01", "LOSS-02")
@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (COORD_JSON, ""),
        (COORD_JSON, "{" + entry(1)),
        (COORD_JSON, IM_END + "{}"),
        (COORD_JSON, '{"object_1": {"desc": "<|image_pad|>"}}'),
        (OBJECTS_ARRAY, HEAD + "]}<|image_pad|>"),
        (OBJECTS_ARRAY, HEAD + "]"),
        (COMPACT, CAT_LINE),
        (COMPACT, CAT_LINE + ".<|image_pad|>"),
    ],
)
def test_a_target_that_is_not_closed_is_not_read_back(
    tokenizer: PreTrainedTokenizerFast, answers: AnswerFormat, text: str
) -> None:
    known = with_placeholders(tokenizer)
    assert answers.read_back(encode(known, text + IM_END), known) is None
    whole = answers.write([CAT], "desc_first")
    assert answers.read_back(encode(known, whole), known) is None, "no EOS follows"


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("text", ["", HEAD + CAT_ITEM + "]", HEAD + "5", '{"objects":'])
def test_a_text_that_is_no_prefix_of_a_list_is_not_continued(text: str) -> None:
    with pytest.raises(ContractError, match="Cut it after"):
        OBJECTS_ARRAY.append(text, [CAT], 1, "desc_first")


@pytest.mark.req("FMT-01", "LOSS-02")
@pytest.mark.parametrize("desc", ["two\nlines", "a <|coord_5|> b", " ", "<|im_end|>"])
def test_a_description_that_cannot_be_written_in_a_line_is_not_taught(
    tokenizer: Tokenizer, desc: str
) -> None:
    with pytest.raises(TargetUnreadable):
        build_ground_truth_target(
            [GroundTruthObject(desc, CAT.shape)], tokenizer, "desc_first", COMPACT
        )


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("desc", ["stop!", 'the "old"'])
def test_a_newline_is_taught_as_a_token_of_its_own(qwen_tokenizer: Tokenizer, desc: str) -> None:
    """Qwen's BPE fuses it with punctuation; an answer that has it so is read as well."""
    truths = [GroundTruthObject(desc, CAT.shape)] * 2
    text = COMPACT.write(truths, "geometry_first")
    fused = encode(qwen_tokenizer, text)
    (newline,) = encode(qwen_tokenizer, "\n")
    assert newline not in fused
    taught = build_ground_truth_target(truths, qwen_tokenizer, "geometry_first", COMPACT)
    assert taught.token_ids.count(newline) == 2
    for ids in (fused, taught.token_ids):
        parsed = COMPACT.parse(ids, qwen_tokenizer)
        assert [found.desc for found in parsed.objects] == [desc] * 2
        assert text_of(qwen_tokenizer, parsed.prefix_token_ids) + "." == text
        assert parsed.prefix_token_ids == ids[: len(parsed.prefix_token_ids)]


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("desc", ["person", "traffic light"])
@pytest.mark.parametrize(("answers", "most"), [(OBJECTS_ARRAY, 26), (COMPACT, 10)])
def test_a_box_takes_few_of_qwen_s_tokens(
    qwen_tokenizer: Tokenizer, answers: AnswerFormat, most: int, desc: str
) -> None:
    box = GroundTruthObject(desc, CAT.shape)
    one, eleven = (
        len(encode(qwen_tokenizer, answers.write([box] * n, "desc_first"))) for n in (1, 11)
    )
    assert eleven - one <= 10 * most


OBJECT = entry(1).removeprefix('"object_1": ')
KEYS = f'{{"object_1": {OBJECT}}}'
ARRAY = f'{{"objects": [{OBJECT}]}}'
QWEN = f'[{{"bbox_2d": {coords(*CAT.shape.coords)}, "label": "cat"}}]'


@pytest.mark.req("RES-32", "IO-01")
@pytest.mark.parametrize(
    ("name", "text", "objects", "fault"),
    [
        ("object_keys", KEYS, 1, None),
        ("object_keys", "{}", 0, None),
        ("object_keys", KEYS + "x", 1, "text_behind"),
        ("object_keys", KEYS + KEYS, 1, "text_behind"),
        ("object_keys", "{" + KEYS[1:-1] + f'], "object_2": {OBJECT}}}', 1, "wrong_container"),
        ("object_keys", f'{{"object_1": [{OBJECT}]}}', 0, "wrong_container"),
        ("object_keys", OBJECT, 0, "wrong_container"),
        ("object_keys", f"{{{KEYS}", 0, "wrong_container"),
        ("object_keys", KEYS[:-1], 1, "wrong_container"),
        ("object_keys", ARRAY, 0, "other_format"),
        ("object_keys", QWEN, 0, "other_format"),
        ("object_keys", f"```json\n{KEYS}\n```", 0, "fenced"),
        ("object_keys", f"Here: {KEYS}", 0, "prose_before"),
        ("object_keys", "I see a cat.", 0, None),
        ("objects_array", ARRAY, 1, None),
        ("objects_array", '{"obj', 0, None),
        ("objects_array", "an { is missing", 0, "prose_before"),
        ("objects_array", ARRAY + ARRAY, 1, "text_behind"),
        ("objects_array", f'{{"objects": [[{OBJECT}]]}}', 0, "wrong_container"),
        ("objects_array", f'{{"objects": [{OBJECT}}}', 1, "wrong_container"),
        ("objects_array", f'{{"objects": {OBJECT}}}', 0, "wrong_container"),
        ("objects_array", f"[{OBJECT}]", 0, "wrong_container"),
        ("objects_array", OBJECT, 0, "wrong_container"),
        ("objects_array", ARRAY[:-1], 1, "wrong_container"),
        ("objects_array", KEYS, 0, "other_format"),
        ("compact", CAT_LINE + ".", 1, None),
        ("compact", f"[\n{CAT_LINE}].", 1, "wrong_container"),
        ("compact", f"[[\n{CAT_LINE}]\n]\n.", 1, "wrong_container"),
        ("compact", CAT_LINE, 1, "wrong_container"),
        ("compact", KEYS, 0, "other_format"),
        ("compact", QWEN.replace(", ", ",\n"), 0, "other_format"),
        ("compact", f" ```json\n{KEYS}\n```", 0, "fenced"),
        ("compact", "boxes [1, 2]", 0, "prose_before"),
    ],
)
def test_the_reason_of_each_unread_answer(
    tokenizer: Tokenizer, name: str, text: str, objects: int, fault: str | None
) -> None:
    parsed = assess(
        Sample("a:1", (), 64, 64, (CAT,)),
        replace(rollout([], encode(tokenizer, text)), finish_reason="stop"),
        tokenizer,
        partial(match_objects, config=MatchingConfig()),
        allow_poly=True,
        answers=load_registered(ANSWER_FORMATS, name),
    ).parsed
    assert (len(parsed.objects), parsed.fault) == (objects, fault)


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize(
    ("text", "taught"),
    [
        ("custom: {answer_format: objects_array}\n", "objects_array"),
        ("custom: {}\n", "object_keys"),  # of an older run
        ("custom: [", None),
        (None, None),
    ],
)
def test_a_checkpoint_of_a_run_with_another_format_is_refused(
    config_of: ConfigOf, toy_checkpoint: Path, tmp_path: Path, text: str | None, taught: str | None
) -> None:
    """text: of the run's config; None: there is no such file."""
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.symlink_to(toy_checkpoint)
    if text is not None:
        (tmp_path / RESOLVED).write_text(text)
    for name in ANSWER_FORMATS:
        config = config_of(model={"model": str(checkpoint)}, custom={"answer_format": name})
        if taught in (None, name):
            check_model(config)
            continue
        found = f"as {taught} ({tmp_path / RESOLVED}), and custom.answer_format is {name}"
        with refused("model.model", found, "learner export"):
            check_model(config)
        with refused("--checkpoint", found, "learner export"):
            check_taught_format(checkpoint, name, "--checkpoint")


@pytest.mark.req("FMT-01", "REP-01")
@pytest.mark.parametrize("name", [None, *ANSWER_FORMATS])
def test_the_guard_counts_the_entries_of_the_format(name: str | None) -> None:
    """It is written once, in `custom`; what a run writes down of it can be read again."""
    guard = {"enabled": True, "max_object_keys": 9}
    mapping = changed("rollout_matching.repeat_terminate", guard)
    if name is not None:
        mapping["custom"]["answer_format"] = name
    config = parse_config(mapping)
    read = config.rollout_matching.repeat_terminate
    assert read.answer_format == config.custom.answer_format == (name or "object_keys")
    mapping["rollout_matching"]["repeat_terminate"] = guard | {"answer_format": read.answer_format}
    assert parse_config(mapping) == config


CAT_ENTRY = f'"object_7": {{"desc": "cat", "bbox_2d": {coords(10, 20, 300, 400)}}}'


@pytest.mark.req("APPEND-01", "ARCH-02")
@pytest.mark.parametrize(
    ("prefix", "separator"),
    [
        ("{" + entry(1), ", "),
        ("{" + entry(1) + " \n\t", ", "),
        ("{", ""),
        ("{" + entry(1) + ",", ""),
    ],
)
def test_a_separator_is_written_only_after_an_entry(prefix: str, separator: str) -> None:
    assert serialize_append(prefix, [CAT], 7, "desc_first") == separator + CAT_ENTRY + "}"
    if not prefix.rstrip().endswith(","):
        assert serialize_append(prefix, [], 7, "desc_first") == "}"


@pytest.mark.req("APPEND-01")
@pytest.mark.parametrize("prefix", ["", " ", '{"object_1": 5', "[", '{"a', "cat", "{]", "{\u00a0"])
def test_a_prefix_that_ends_in_anything_else_is_an_error(prefix: str) -> None:
    with pytest.raises(ContractError) as error:
        serialize_append(prefix, [CAT], 1, "desc_first")
    assert error.value.where == "serialize_append.prefix_text"
    assert error.value.found == f"it ends in {prefix!r} and 1 objects are to follow"
    assert error.value.do == "Cut it after the `}` of an entry or after the opening `{`"


@pytest.mark.req("APPEND-01", "RES-12")
@pytest.mark.scenario(
    "desc-first remains baseline append layout",
    "geometry-first changes only per-object field order in FN append",
)
def test_an_append_by_hand() -> None:
    """Flat polygons, concrete geometry keys, non-ASCII text kept, quotes escaped."""
    item = GroundTruthObject('猫 "tom"\n🚀', CAT.shape)
    desc = '"desc": "猫 \\"tom\\"\\n🚀"'
    box, poly = (f'"{o.shape.kind}": {coords(*o.shape.coords)}' for o in (CAT, ROOF))
    assert serialize_append("{", [item, ROOF], 1, "desc_first") == (
        f'"object_1": {{{desc}, {box}}}, "object_2": {{"desc": "roof", {poly}}}}}'
    )
    assert serialize_append("{", [item, ROOF], 1, "geometry_first") == (
        f'"object_1": {{{box}, {desc}}}, "object_2": {{{poly}, "desc": "roof"}}}}'
    )
    assert serialize_objects([], "desc_first") == "{}"
