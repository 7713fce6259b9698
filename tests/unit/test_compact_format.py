"""The compact format, held against a second reading of its words."""

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config import parse_config
from learner.config.rollout_matching import MatchingConfig
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import answer_format
from learner.stages.formats.compact import COMPACT
from learner.stages.matching import match_objects
from learner.stages.targets import (
    TargetUnreadable,
    assess,
    build_ground_truth_target,
    with_target,
)
from learner.stages.tokens import IM_END, Tokenizer, token_table
from learner.types import GroundTruthObject, ParsedRollout, Role, Sample, Shape
from tests.unit.answers import CAT, DOG, ROOF, encode, text_in_role, text_of
from tests.unit.config_faults import changed
from tests.unit.small_run import rollout

CAT_LINE = "cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n"
DOG_LINE = "red dog<|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n"

# ---- the reference -------------------------------------------------------------------

# A coordinate token is one character here, so that its text can be nothing else.
FIRST = 0xE000
COORDS = f"[{chr(FIRST)}-{chr(FIRST + COORD_BINS - 1)}]"
OTHERS = COORDS.replace("[", "[^")
LINE = re.compile(rf"(?P<before>{OTHERS}*)(?P<coords>{COORDS}+)(?P<behind>{OTHERS}*)")

Said = tuple[str, str, list[int]]


def plain(ids: list[int], tokenizer: Tokenizer) -> str:
    """The answer up to its end, with a character for each coordinate token."""
    vocab = token_table(tokenizer).vocab
    text, run = "", list[int]()
    for token in [*ids, vocab.end_id]:
        ends = token in vocab.end_ids
        if ends or token in vocab.bins:
            text += text_of(tokenizer, run)
            run = []
            if ends:
                return text
            text += chr(FIRST + vocab.bins[token])
        else:
            run.append(token)
    raise AssertionError("an answer ends")


def judge(line: str, allow_poly: bool) -> Said | str:
    if not re.search(COORDS, line):
        return "missing_geom"
    found = LINE.fullmatch(line)
    if not found or (found["before"] and found["behind"]):
        return "non_coord_token"
    desc = found["before"] + found["behind"]
    if not desc.strip():
        return "missing_desc"
    bins = [ord(char) - FIRST for char in found["coords"]]
    if len(bins) != 4 and (len(bins) < 6 or len(bins) % 2 == 1):
        return "wrong_arity"
    if len(bins) > 4:
        return (desc, "poly", bins) if allow_poly else "poly_unsupported"
    return "bbox_invalid" if bins[2] < bins[0] or bins[3] < bins[1] else (desc, "bbox_2d", bins)


def check(ids: list[int], parsed: ParsedRollout, tokenizer: Tokenizer, allow_poly: bool) -> None:
    text = plain(ids, tokenizer)
    *lines, rest = text.split("\n")
    judged = [judge(line, allow_poly) for line in lines]
    said = [(o.desc, str(o.kind), o.coords) for o in parsed.objects]
    assert said == [each for each in judged if isinstance(each, tuple)]
    refused = [(n, each) for n, each in enumerate(judged, 1) if isinstance(each, str)]
    refused += [(len(lines) + 1, "key_invalid")] if rest not in ("", ".") else []
    assert parsed.dropped == [(f"object_{n}", why) for n, why in refused]
    assert parsed.invalid_rollout == (not lines and rest not in ("", "."))
    assert parsed.truncated == (rest != "." and not parsed.invalid_rollout)
    kept = max((n for n, line in enumerate(lines, 1) if re.search(COORDS, line)), default=0)
    assert plain(parsed.prefix_token_ids, tokenizer) == "".join(f"{x}\n" for x in lines[:kept])
    assert parsed.max_object_index == kept == len(parsed.entry_ends)
    bins = token_table(tokenizer).vocab.bins
    for found in parsed.objects:
        assert [bins[ids[p]] for p in found.coord_token_indices] == found.coords
        held = text_of(tokenizer, [ids[p] for p in found.desc_token_indices])
        assert found.desc in held


# ---- any ids -------------------------------------------------------------------------

FRAGMENTS = [
    CAT_LINE,
    DOG_LINE,
    "<|coord_5|><|coord_6|><|coord_7|><|coord_8|>stop!\n",
    "roof" + "".join(map(coord_token, ROOF.shape.coords)) + "\n",
    "turned<|coord_9|><|coord_9|><|coord_1|><|coord_1|>\n",
    "<|coord_7|>",
    "<|coord_8|>",
    "\n",
    "\n\n",
    ".",
    ".\n",
    " ",
    "cat",
    "猫",
    "toy 🚀",
    "🧿",
    '{"object_1": ',
    IM_END,
]


@st.composite
def answers(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    ids = encode(tokenizer, "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=10))))
    for _ in range(draw(st.integers(0, 2))):
        if ids:
            del ids[draw(st.integers(0, len(ids) - 1))]
    return ids


@pytest.mark.req("FMT-01", "PARSE-04", "PARSE-05", "PARSE-07")
@given(data=st.data(), allow_poly=st.booleans())
def test_any_ids_are_read_as_the_words_of_the_format_say(
    data: st.DataObject, allow_poly: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = data.draw(answers(tokenizer))
    check(ids, COMPACT.parse(ids, tokenizer, allow_poly=allow_poly), tokenizer, allow_poly)


@pytest.mark.req("FMT-01", "CLEAN-01")
@given(data=st.data())
def test_any_entries_are_kept(data: st.DataObject, tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = COMPACT.parse(data.draw(answers(tokenizer)), tokenizer)
    places = range(len(parsed.entry_ends))
    kept = [p for p in places if p == 0 or data.draw(st.booleans())]
    ids = COMPACT.keep(parsed, tokenizer, kept)
    lines = text_of(tokenizer, parsed.prefix_token_ids).splitlines(keepends=True)
    assert text_of(tokenizer, ids) == "".join(lines[p] for p in kept)


# ---- through the stages --------------------------------------------------------------


@pytest.mark.req("FMT-01", "CHB-01")
def test_an_answer_is_corrected_continued_and_closed(tokenizer: PreTrainedTokenizerFast) -> None:
    answers = answer_format(parse_config(changed("custom.answer_format", "compact")))
    assert answers is COMPACT
    ids = encode(tokenizer, CAT_LINE + "hat<|coord_1|><|coord_2|>\n" + CAT_LINE + "bir")
    sample = Sample("a:1", (), 64, 64, (CAT, DOG))
    match = partial(match_objects, config=MatchingConfig())
    found = assess(
        sample,
        rollout([], ids),
        tokenizer,
        match,
        allow_poly=False,
        answers=answers,
        duplicate_iou=0.9,
    )
    assert found.parsed.truncated
    assert [why for _, why in found.parsed.dropped] == ["wrong_arity", "key_invalid"]
    assert [d.found.key for d in found.duplicates or ()] == ["object_3"]
    target = with_target(found, tokenizer, "desc_first", MatchingConfig(), answers).target
    assert target is not None
    text = text_of(tokenizer, target.token_ids)
    assert text == CAT_LINE + "hat<|coord_1|><|coord_2|>\n" + DOG_LINE + "." + IM_END
    assert target.fn_keys == ["object_3"]
    ((position, token),) = target.departures
    assert text_of(tokenizer, target.token_ids[:position]).endswith("<|coord_2|>\n")
    assert "cat".startswith(text_of(tokenizer, [token]))

    in_role = partial(text_in_role, tokenizer, target)
    assert in_role(Role.MATCHED_DESC) == "cat"
    assert in_role(Role.APPENDED_DESC) == "red dog"
    assert in_role(Role.MATCHED_STRUCTURE) == "\n"
    assert in_role(Role.FALSE_POSITIVE) == "hat<|coord_1|><|coord_2|>\n"
    assert in_role(Role.CLOSURE) == "." + IM_END
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords, DOG.shape.coords]


@pytest.mark.req("FMT-01", "LOSS-02")
@pytest.mark.parametrize("desc", ["two\nlines", "a <|coord_5|> b", " ", "<|im_end|>"])
def test_a_description_that_cannot_be_written_is_not_taught(
    tokenizer: PreTrainedTokenizerFast, desc: str
) -> None:
    with pytest.raises(TargetUnreadable):
        build_ground_truth_target(
            [GroundTruthObject(desc, CAT.shape)], tokenizer, "desc_first", COMPACT
        )


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("desc", ["stop!", "(car)", 'the "old"'])
def test_a_newline_is_taught_as_a_token_of_its_own(
    qwen_tokenizer: PreTrainedTokenizerFast, desc: str
) -> None:
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
@pytest.mark.parametrize("desc", ["person", "traffic light", "dining table", "teddy bear"])
def test_a_box_takes_at_most_ten_of_qwen_s_tokens(
    qwen_tokenizer: PreTrainedTokenizerFast, desc: str
) -> None:
    one = GroundTruthObject(desc, Shape("bbox_2d", (10, 20, 300, 400)))
    closing = len(encode(qwen_tokenizer, "."))
    lengths = [
        len(encode(qwen_tokenizer, COMPACT.write([one] * n, "desc_first"))) - closing
        for n in (1, 5)
    ]
    assert lengths[1] == 5 * lengths[0]
    assert lengths[0] <= 10
