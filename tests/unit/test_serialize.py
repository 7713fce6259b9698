"""Objects to text (APPEND-01)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.stages.coords import coord_token
from learner.stages.formats.coord_json import serialize_append, serialize_objects
from learner.types import FieldOrder, GroundTruthObject, Shape
from shared_contracts.errors import ContractError
from tests.unit.answers import CAT, ROOF, coords, entry

BINS = st.integers(0, 999)
SHAPES = st.one_of(
    st.builds(Shape, st.just("bbox_2d"), st.tuples(BINS, BINS, BINS, BINS)),
    st.builds(Shape, st.just("poly"), st.tuples(BINS, BINS, BINS, BINS, BINS, BINS)),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
OBJECTS = st.lists(st.builds(GroundTruthObject, TEXT, SHAPES), max_size=3)
ORDERS = st.sampled_from(["desc_first", "geometry_first"])

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


@pytest.mark.req("APPEND-01", "RES-12")
@given(objects=OBJECTS, more=OBJECTS, start=st.integers(1, 10**6), order=ORDERS)
def test_json_reads_the_objects_back_under_their_keys_in_one_spelling(
    objects: list[GroundTruthObject],
    more: list[GroundTruthObject],
    start: int,
    order: FieldOrder,
) -> None:
    """Appending continues an answer as if it had been written whole."""
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
    whole = serialize_objects([*objects, *more], order)
    assert whole == json.dumps(json.loads(whole), ensure_ascii=False)
    prefix = serialize_objects(objects, order)[:-1]
    assert prefix + serialize_append(prefix, more, len(objects) + 1, order) == whole
