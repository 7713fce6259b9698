"""Objects to text (APPEND-01)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.stages.coords import coord_token
from learner.stages.formats.coord_json import serialize_append, serialize_objects
from learner.types import FieldOrder, GroundTruthObject, Shape
from shared_contracts.errors import ContractError
from tests.unit.answers import CAT, DOG, ROOF, coords, entry

BINS = st.integers(0, 999)
SHAPES = st.one_of(
    st.builds(Shape, st.just("bbox_2d"), st.tuples(BINS, BINS, BINS, BINS)),
    st.builds(Shape, st.just("poly"), st.tuples(BINS, BINS, BINS, BINS, BINS, BINS)),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
OBJECTS = st.lists(st.builds(GroundTruthObject, TEXT, SHAPES), max_size=3)

CAT_ENTRY = f'"object_7": {{"desc": "cat", "bbox_2d": {coords(10, 20, 300, 400)}}}'


@pytest.mark.req("APPEND-01", "ARCH-02")
@pytest.mark.parametrize(
    ("prefix", "separator"),
    [
        ("{" + entry(1), ", "),
        ("{" + entry(1) + " \n\t", ", "),
        ("{", ""),
        (" { ", ""),
        ("{" + entry(1) + ",", ""),
        ("{" + entry(1) + ", ", ""),
    ],
)
def test_a_separator_is_written_only_after_an_entry(prefix: str, separator: str) -> None:
    assert serialize_append(prefix, [CAT], 7, "desc_first") == separator + CAT_ENTRY + "}"


@pytest.mark.req("APPEND-01")
@pytest.mark.parametrize("prefix", ["", " ", '{"object_1": 5', "[", '{"a', "cat", "{]", "{\u00a0"])
def test_a_prefix_that_ends_in_anything_else_is_an_error(prefix: str) -> None:
    with pytest.raises(ContractError) as error:
        serialize_append(prefix, [CAT], 1, "desc_first")
    assert error.value.where == "serialize_append.prefix_text"
    assert error.value.found == f"it ends in {prefix!r} and 1 objects are to follow"
    assert error.value.do == "Cut it after the `}` of an entry or after the opening `{`"


@pytest.mark.req("APPEND-01")
def test_of_a_long_prefix_the_error_tells_the_end() -> None:
    with pytest.raises(ContractError, match="it ends in '6789abcdefghijklmnop' and"):
        serialize_append("{" + entry(1) + "0123456789abcdefghijklmnop", [CAT], 2, "desc_first")


@pytest.mark.req("APPEND-01")
def test_without_objects_only_the_closing_brace_is_written() -> None:
    assert serialize_append("{", [], 1, "desc_first") == "}"
    assert serialize_append("{" + entry(1), [], 2, "desc_first") == "}"


def test_a_comma_that_nothing_follows_is_an_error() -> None:
    with pytest.raises(ContractError, match="0 objects"):
        serialize_append("{" + entry(1) + ", ", [], 2, "desc_first")


@pytest.mark.req("APPEND-01")
def test_keys_count_up_from_the_start_index() -> None:
    text = "{" + serialize_append("{", [CAT, DOG, CAT], 5, "desc_first")
    assert list(json.loads(text)) == ["object_5", "object_6", "object_7"]


@pytest.mark.req("APPEND-01")
@pytest.mark.parametrize(
    ("order", "fields"),
    [("desc_first", ["desc", "poly"]), ("geometry_first", ["poly", "desc"])],
)
def test_the_field_order_only_moves_the_description(order: FieldOrder, fields: list[str]) -> None:
    answer = json.loads(serialize_objects([ROOF], order))
    assert list(answer["object_1"]) == fields
    assert answer["object_1"]["desc"] == "roof"


@pytest.mark.req("APPEND-01")
def test_geometry_first_puts_the_concrete_key_first_and_names_nothing_geometry() -> None:
    text = serialize_append("{" + entry(1), [CAT, ROOF], 2, "geometry_first")
    assert text.startswith(', "object_2": {"bbox_2d": ["<|coord_10|>", ')
    assert '"geometry"' not in text


@pytest.mark.req("APPEND-01")
def test_polygons_are_flat() -> None:
    answer = json.loads(serialize_objects([ROOF], "desc_first"))
    assert answer["object_1"]["poly"] == [f"<|coord_{k}|>" for k in (0, 0, 500, 0, 500, 500)]


@pytest.mark.req("APPEND-01", "RES-12")
def test_an_answer_is_one_json_object_with_non_ascii_kept_and_quotes_escaped() -> None:
    item = GroundTruthObject('猫 "tom"\n🚀', Shape("bbox_2d", (1, 2, 3, 4)))
    text = serialize_objects([item], "desc_first")
    assert text == (
        '{"object_1": {"desc": "猫 \\"tom\\"\\n🚀", "bbox_2d": ' + coords(1, 2, 3, 4) + "}}"
    )
    assert json.loads(text)["object_1"]["desc"] == item.desc


def test_no_objects_are_an_empty_answer() -> None:
    assert serialize_objects([], "desc_first") == "{}"


# ---- any objects ---------------------------------------------------------------------


@pytest.mark.req("APPEND-01", "RES-12")
@given(
    objects=OBJECTS,
    start=st.integers(1, 10**6),
    order=st.sampled_from(["desc_first", "geometry_first"]),
)
def test_json_reads_the_objects_back_under_their_keys(
    objects: list[GroundTruthObject], start: int, order: FieldOrder
) -> None:
    fields = slice(None) if order == "desc_first" else slice(None, None, -1)
    answer = json.loads("{" + serialize_append("{", objects, start, order), object_pairs_hook=list)
    assert answer == [
        (
            f"object_{start + i}",
            [
                ("desc", item.desc),
                (item.shape.kind, [coord_token(k) for k in item.shape.coords]),
            ][fields],
        )
        for i, item in enumerate(objects)
    ]


@pytest.mark.req("APPEND-01")
@given(objects=OBJECTS)
def test_an_answer_has_one_spelling_and_the_field_order_moves_nothing_else(
    objects: list[GroundTruthObject],
) -> None:
    straight, turned = (serialize_objects(objects, o) for o in ("desc_first", "geometry_first"))
    assert json.loads(straight) == json.loads(turned)
    assert straight == json.dumps(json.loads(straight), ensure_ascii=False)
    assert turned == json.dumps(json.loads(turned), ensure_ascii=False)
    assert sorted(straight) == sorted(turned)


@pytest.mark.req("APPEND-01")
@given(objects=OBJECTS, more=OBJECTS, order=st.sampled_from(["desc_first", "geometry_first"]))
def test_appending_continues_an_answer_as_if_it_had_been_written_whole(
    objects: list[GroundTruthObject], more: list[GroundTruthObject], order: FieldOrder
) -> None:
    prefix = serialize_objects(objects, order)[:-1]
    append = serialize_append(prefix, more, len(objects) + 1, order)
    assert prefix + append == serialize_objects([*objects, *more], order)
