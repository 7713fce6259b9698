"""Objects to text (APPEND-01)."""

import pytest

from learner.stages.formats.coord_json import serialize_append, serialize_objects
from learner.types import GroundTruthObject
from shared_contracts.errors import ContractError
from tests.unit.answers import CAT, ROOF, coords, entry

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
