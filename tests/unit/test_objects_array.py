"""The list of objects, held against a second reading of its words."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config import parse_config
from learner.config.rollout_matching import MatchingConfig
from learner.stages.coords import coord_token
from learner.stages.formats import answer_format
from learner.stages.formats.objects_array import CLOSING, HEAD, OBJECTS_ARRAY
from learner.stages.matching import match_objects
from learner.stages.targets import assess, build_ground_truth_target, with_target
from learner.stages.tokens import IM_END, Tokenizer
from learner.types import FieldOrder, GroundTruthObject, Role, Sample, Shape
from shared_contracts.errors import ContractError
from tests.unit.answers import (
    BIRD,
    CAT,
    DOG,
    FRAGMENTS,
    ROOF,
    encode,
    text_in_role,
    text_of,
    with_placeholders,
)
from tests.unit.config_faults import changed
from tests.unit.list_reference import check_list
from tests.unit.small_run import rollout


def item(desc: str, *bins: int, kind: str = "bbox_2d") -> str:
    listed = ",".join(f'"{coord_token(k)}"' for k in bins)
    return f'{{"desc":"{desc}","{kind}":[{listed}]}}'


CAT_ITEM = item("cat", *CAT.shape.coords)
DOG_ITEM = item("red dog", *DOG.shape.coords)
LIST_FRAGMENTS = [
    CAT_ITEM,
    CAT_ITEM.replace(":", ": ").replace(",", ", "),
    item("toy 🚀", 5, 6, 7, 8),
    item("wrong", 5, 6, 7),
    item("turned", 9, 9, 1, 1),
    item("roof", *ROOF.shape.coords, kind="poly"),
    f'{{"bbox_2d":[{", ".join(map(coord_token, (1, 2, 3, 4)))}],"desc":"bare"}}',
    '{"objects":[',
    "]}",
    "]",
    "}",
    "5",
    '"a"',
    "[",
    '{"desc":"',
    '{"a": 5}',
    "word",
    "\n",
    IM_END,
]


@st.composite
def answers(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    heads = [HEAD, HEAD, ' {"objects" :\n[ ', "{", "", '{"objects":', '{"object_1":[']
    if draw(st.booleans()):
        text = "".join(draw(st.lists(st.sampled_from([*LIST_FRAGMENTS, *FRAGMENTS]), max_size=10)))
    else:
        text = ",".join(draw(st.lists(st.sampled_from(LIST_FRAGMENTS), max_size=6)))
    ending = draw(st.sampled_from(["", CLOSING, "]", "] }\n", "}", '],"more":1}']))
    ids = encode(tokenizer, draw(st.sampled_from(heads)) + text + ending)
    for _ in range(draw(st.integers(0, 2))):
        if ids:
            del ids[draw(st.integers(0, len(ids) - 1))]
    return ids[: draw(st.sampled_from([len(ids), len(ids), len(ids) // 2]))]


@pytest.mark.req("FMT-01", "PARSE-04", "PARSE-05", "PARSE-07")
@given(data=st.data(), allow_poly=st.booleans())
def test_any_ids_are_read_as_the_words_of_the_format_say(
    data: st.DataObject, allow_poly: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = data.draw(answers(tokenizer))
    parsed = OBJECTS_ARRAY.parse(ids, tokenizer, allow_poly=allow_poly)
    check_list(ids, parsed, tokenizer, allow_poly)


@pytest.mark.req("FMT-01", "CLEAN-01")
@given(data=st.data())
def test_any_items_are_kept(data: st.DataObject, tokenizer: PreTrainedTokenizerFast) -> None:
    text = ",".join(data.draw(st.lists(st.sampled_from(LIST_FRAGMENTS[:7]), min_size=1)))
    parsed = OBJECTS_ARRAY.parse(encode(tokenizer, HEAD + text), tokenizer)
    items = json.loads(quoted(text_of(tokenizer, parsed.prefix_token_ids) + CLOSING))["objects"]
    kept = [p for p in range(len(items)) if p == 0 or data.draw(st.booleans())]
    ids = OBJECTS_ARRAY.keep(parsed, tokenizer, kept)
    left = json.loads(quoted(text_of(tokenizer, ids) + CLOSING))["objects"]
    assert left == [items[p] for p in kept]


def quoted(text: str) -> str:
    """The text with the bare coordinate tokens in quotes."""
    text = text.replace('"<|', "<|").replace('|>"', "|>")
    return text.replace("<|", '"<|').replace("|>", '|>"')


@pytest.mark.req("FMT-01", "CHB-01")
def test_an_answer_is_corrected_continued_and_closed(tokenizer: PreTrainedTokenizerFast) -> None:
    chosen = answer_format(parse_config(changed("custom.answer_format", "objects_array")))
    assert chosen is OBJECTS_ARRAY
    hat = item("hat", 1, 2)
    ids = encode(tokenizer, HEAD + ",".join([CAT_ITEM, hat, CAT_ITEM]) + ',{"desc":"bir')
    found = assess(
        Sample("a:1", (), 64, 64, (CAT, DOG)),
        rollout([], ids),
        tokenizer,
        partial(match_objects, config=MatchingConfig()),
        allow_poly=False,
        answers=chosen,
        duplicate_iou=0.9,
    )
    assert found.parsed.truncated
    assert [why for _, why in found.parsed.dropped] == ["wrong_arity", "key_invalid"]
    assert [d.found.key for d in found.duplicates or ()] == ["object_3"]
    target = with_target(found, tokenizer, "desc_first", MatchingConfig(), chosen).target
    assert target is not None
    text = text_of(tokenizer, target.token_ids)
    assert text == HEAD + ",".join([CAT_ITEM, hat, DOG_ITEM]) + CLOSING + IM_END
    assert target.fn_keys == ["object_3"]
    ((position, token),) = target.departures
    assert text_of(tokenizer, target.token_ids[:position]).endswith('"desc":"')
    assert "cat".startswith(text_of(tokenizer, [token]))

    in_role = partial(text_in_role, tokenizer, target)
    assert in_role(Role.MATCHED_DESC) == "cat"
    assert in_role(Role.APPENDED_DESC) == "red dog"
    assert in_role(Role.CLOSURE).endswith("}" + IM_END)
    assert hat[1:-1] in in_role(Role.FALSE_POSITIVE)
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords, DOG.shape.coords]


@pytest.mark.req("FMT-01", "CHA-01", "RES-12")
@pytest.mark.parametrize("truths", [[], [CAT], [CAT, DOG, BIRD, ROOF]])
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_the_ground_truth_is_written_as_json_and_read(
    tokenizer: PreTrainedTokenizerFast, truths: list[GroundTruthObject], order: FieldOrder
) -> None:
    target = build_ground_truth_target(truths, tokenizer, order, OBJECTS_ARRAY)
    text = OBJECTS_ARRAY.write(truths, order)
    assert text_of(tokenizer, target.token_ids) == text + IM_END
    assert len(target.coord_groups) == len(truths)
    read = json.loads(text)["objects"]
    assert [each["desc"] for each in read] == [truth.desc for truth in truths]
    assert all((next(iter(each)) == "desc") == (order == "desc_first") for each in read)


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("text", ["", HEAD + CAT_ITEM + "]", HEAD + "5", '{"objects":'])
def test_a_text_that_is_no_prefix_is_not_continued(text: str) -> None:
    with pytest.raises(ContractError, match="Cut it after"):
        OBJECTS_ARRAY.append(text, [CAT], 1, "desc_first")


@pytest.mark.req("FMT-01", "LOSS-02")
@pytest.mark.parametrize("text", [HEAD + "]}<|image_pad|>", HEAD + "]", HEAD + "]]}", HEAD + "}"])
def test_a_target_that_is_not_closed_is_not_read_back(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    known = with_placeholders(tokenizer)
    assert OBJECTS_ARRAY.read_back(encode(known, text + IM_END), known) is None


@pytest.mark.req("FMT-01", "PARSE-07")
def test_a_thousand_items_are_all_read(qwen_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(qwen_tokenizer, OBJECTS_ARRAY.write([CAT, ROOF] * 500, "desc_first"))
    parsed = OBJECTS_ARRAY.parse(ids, qwen_tokenizer)
    assert [found.index for found in parsed.objects] == list(range(1, 1001))


@pytest.mark.req("FMT-01")
@pytest.mark.parametrize("desc", ["person", "traffic light", "dining table", "teddy bear"])
def test_a_box_takes_at_most_26_of_qwen_s_tokens(
    qwen_tokenizer: PreTrainedTokenizerFast, desc: str
) -> None:
    one = GroundTruthObject(desc, Shape("bbox_2d", (10, 20, 300, 400)))
    lengths = [
        len(encode(qwen_tokenizer, OBJECTS_ARRAY.write([one] * n, "desc_first"))) for n in (1, 11)
    ]
    assert lengths[1] - lengths[0] <= 10 * 26
