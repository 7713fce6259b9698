"""The data file: what is read, and what is refused with file and line."""

import json
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.files import MAX_SHOWN_ERRORS
from learner.data.jsonl import read_samples
from learner.stages.tokens import coord_token
from learner.types import GroundTruthObject, Shape
from shared_contracts.errors import ContractError, ContractErrors

pytestmark = pytest.mark.req("DATA-01")

BOX = {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}


def record(**changes: Any) -> dict[str, Any]:
    return {"images": ["a.png"], "width": 64, "height": 48, "objects": [BOX], **changes}


def write(folder: Path, *lines: str | dict[str, Any]) -> Path:
    """A data file with these lines beside an image `a.png`."""
    (folder / "a.png").touch()
    path = folder / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def problems(path: Path, *, allow_poly: bool = False) -> list[ContractError]:
    with pytest.raises(ContractErrors) as caught:
        read_samples(path, allow_poly=allow_poly)
    return caught.value.errors


def the_problem(folder: Path, line: str | dict[str, Any]) -> ContractError:
    """The one problem of a file whose second line is `line`."""
    path = write(folder, record(), line)
    (problem,) = problems(path)
    assert problem.where == f"{path}:2"
    return problem


def test_a_sample_has_absolute_image_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "b.png"
    folder.mkdir()
    write(folder, record(images=["a.png", str(elsewhere)], metadata={"split": "day"}))
    monkeypatch.chdir(folder)
    (sample,) = read_samples(Path("data.jsonl"), allow_poly=False)
    assert sample.sample_id == "data.jsonl:1"
    assert sample.images == (folder / "a.png", elsewhere)
    assert (sample.width, sample.height) == (64, 48)
    assert sample.objects == (GroundTruthObject("cat", Shape("bbox_2d", (1, 2, 3, 4))),)
    assert sample.metadata == {"split": "day"}


@pytest.mark.req("RES-20")
def test_descriptions_are_read_in_nfc(tmp_path: Path) -> None:
    """Names of files on a Mac are in NFD; tokenizers change them to NFC."""
    boxes = [{**BOX, "desc": unicodedata.normalize(form, "café")} for form in ("NFD", "NFC")]
    (sample,) = read_samples(write(tmp_path, record(objects=boxes)), allow_poly=False)
    assert [item.desc for item in sample.objects] == ["caf\u00e9"] * 2


@pytest.mark.req("RES-24")
@pytest.mark.parametrize(
    ("kind", "values", "bins"),
    [
        ("bbox_2d", [0.6, coord_token(7), 998.7, coord_token(999)], (1, 7, 999, 999)),
        ("bbox_2d", ["1", "2.5", 3.5, "+4"], (1, 2, 4, 4)),
        ("poly", ["0.6", "-0.4", " 7 ", "9.98e2", "2.4", 999.4], (1, 0, 7, 998, 2, 999)),
    ],
)
def test_numbers_numeric_strings_and_coordinate_tokens_are_read(
    tmp_path: Path, kind: str, values: list[str | float], bins: tuple[int, ...]
) -> None:
    path = write(tmp_path, record(objects=[{"desc": "leaf", kind: values}]))
    (sample,) = read_samples(path, allow_poly=True)
    assert sample.objects[0].shape == Shape(kind, bins)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "box",
    [
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 1000, 4],
        [-1, 2, 3, 4],
        [3, 2, 1, 4],
        [1, 4, 3, 2],
        *([1, 2, 3, text] for text in ("four", "", "nan", "1e400", "999.6")),
        *([1, 2, 3, token] for token in ("<|coord_1000|>", "<|coord_007|>")),
        *([1, 2, 3, last] for last in (float("nan"), 10**400, None, True, 999.5)),
        [[1, 2], [3, 4]],
        "1 2 3 4",
    ],
)
def test_a_box_that_is_not_one_is_refused(tmp_path: Path, box: Any) -> None:
    problem = the_problem(tmp_path, record(objects=[BOX, {"desc": "cat", "bbox_2d": box}]))
    assert problem.found.startswith("objects[1].bbox_2d is ")
    assert "x1 <= x2" in problem.do


@pytest.mark.parametrize("poly", [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 1000]])
def test_a_polygon_needs_three_points_within_the_image(tmp_path: Path, poly: list[int]) -> None:
    path = write(tmp_path, record(objects=[{"desc": "leaf", "poly": poly}]))
    (problem,) = problems(path, allow_poly=True)
    assert problem.found.startswith("objects[0].poly is ")


# Objects that have not one description and one geometry.
OBJECTS: list[tuple[Any, str]] = [
    ({"desc": "cat"}, "objects[0] has nothing beside its desc"),
    ({"desc": "leaf", "poly": [5, 5, 1, 9, 9, 9]}, 'objects[0] has "poly" beside its desc'),
    ({**BOX, "score": 1}, 'objects[0] has "bbox_2d", "score" beside its desc'),
    ({**BOX, "desc": "  "}, 'objects[0].desc is "  "'),
    ({**BOX, "desc": "a \ud800 half"}, 'objects[0].desc is "a \ud800 half"'),
    ({**BOX, "desc": "<|image_pad|>"}, 'objects[0].desc is "<|image_pad|>"'),
    ({"bbox_2d": [1, 2, 3, 4]}, "objects[0].desc is missing"),
    ("cat", 'objects[0] is "cat"'),
]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        *(({"objects": [item]}, found) for item, found in OBJECTS),
        ({"width": 0}, "width is 0"),
        ({"height": 4.5}, "height is 4.5"),
        ({"width": True}, "width is true"),
        ({"images": []}, "images is []"),
        ({"images": [""]}, 'images is [""]'),
        ({"objects": None}, "objects is null"),
        ({"metadata": 3}, "metadata is 3"),
        ({"metadata": {"neg_categories": "cat"}}, 'metadata is {"neg_categories": "cat"}'),
        ({"metadata": {"neg_categories": [" "]}}, 'metadata is {"neg_categories": [" "]}'),
        ({"width": 10**400}, "width is 1" + "0" * 76 + "..."),
        ({"height": 1_000_001}, "height is 1000001"),
        ({"object": [], "note": ""}, 'unknown keys "note", "object"'),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    assert the_problem(tmp_path, record(**changes)).found == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"images": [', "not JSON (Expecting value: line 1 column 13 (char 12)): {"),
        ("", "the line is empty"),
        ("[1]", "[1] is no JSON object"),
        ("[" * 100_000, "not JSON (maximum recursion depth exceeded"),
        ("9" * 5_000, "not JSON (Exceeds the limit (4300 digits)"),
        ('{"width": 1, "width": 1}', 'not JSON (the key "width" is given 2 times in one object)'),
        ('{"metadata": {"a": [{"b": 1, "b": 2}]}}', 'not JSON (the key "b" is given 2 times'),
    ],
)
def test_a_line_that_is_no_json_object_is_refused(tmp_path: Path, line: str, found: str) -> None:
    assert the_problem(tmp_path, line).found.startswith(found)


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, record(width=0, objects=[{"desc": ""}]), record(), "{", record(height=0))
    assert [p.where.rpartition(":")[2] for p in problems(path)] == ["1", "1", "1", "3", "4"]


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path: Path) -> None:
    found = problems(write(tmp_path, *[record(width=0)] * (MAX_SHOWN_ERRORS + 5)))
    assert len(found) == MAX_SHOWN_ERRORS + 1
    assert found[-1].found == f"5 more problems ({MAX_SHOWN_ERRORS + 5} in all)"


@pytest.mark.parametrize(
    ("name", "found"),
    [("none", "there is no such file"), (".", "not a file"), ("empty", "no samples")],
)
def test_what_is_no_data_file_is_refused(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ContractError, match=found):
        read_samples(tmp_path / name, allow_poly=False)


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, record())
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError("denied")))
    with pytest.raises(ContractError, match="denied"):
        read_samples(path, allow_poly=False)


def test_the_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, record(), record())
    path.write_bytes(path.read_bytes() + b'{"images": ["\xff"]}\n')
    (problem,) = problems(path)
    assert problem.where == f"{path}:3"
    assert problem.found == "byte 14 of the line is not UTF-8"


@pytest.mark.parametrize("last", [b"", b"\n", b"\r\n"])
def test_what_programs_on_windows_write_is_taken_as_nothing(tmp_path: Path, last: bytes) -> None:
    path = write(tmp_path, record(), record())
    text = b"\r\n".join(path.read_bytes().removesuffix(b"\n").split(b"\n"))
    path.write_bytes(b"\xef\xbb\xbf" + text + last)
    assert len(read_samples(path, allow_poly=False)) == 2


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(key=st.sampled_from(["images", "width", "height", "objects", "metadata"]), value=JSON_VALUES)
def test_any_json_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    path = write(tmp_path_factory.getbasetemp(), record(**{key: value}))
    with suppress(ContractErrors):
        (sample,) = read_samples(path, allow_poly=True)
        assert sample.width > 0
        assert sample.images


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    box = {"desc": "a\u2028b\u0085c", "bbox_2d": [1, 2, 3, 4]}
    line = json.dumps(record(objects=[box]), ensure_ascii=False)
    (sample,) = read_samples(write(tmp_path, line), allow_poly=False)
    assert sample.objects[0].desc == "a\u2028b\u0085c"
