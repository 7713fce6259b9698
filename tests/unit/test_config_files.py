"""Config files: YAML and `extends`."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import dump_mapping, load_config, load_mapping, merge
from learner.config.show import show_config
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError

WARMUP = Path(__file__).parents[2] / "configs/demo/warmup.yaml"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path) -> ContractError:
    with pytest.raises(ContractError) as caught:
        load_mapping(path)
    return caught.value


# --- YAML -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1e-4", 1e-4),
        ("2.0E+3", 2000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2026-11-20", "2026-11-20"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("-.inf", -math.inf),
        ("1" * 1000, int("1" * 1000)),
        ("!!str 12", "12"),
        ("!!float 12", 12.0),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    read = read_mapping(written(tmp_path / "a.yaml", f"key: {text}\n"))["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, ""),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", 4, "twice"),
        ("a: 1\n2: 3\n", 2, "not a string"),
        ("a: 1\na: !!python/object:os.system x\n", 2, ""),
        ("a: &x {b: *x}\n", 1, ""),
        ("a: 1\n---\nb: 2\n", 2, "document"),
        ("a: 1\n\tb: 2\n", 2, ""),
        (f"a: 1\nb: {'1' * 4301}\n", 2, "an integer of 4301 digits"),
        (f"b: 0x{'f' * 4000}\n", 1, "an integer of 4002 digits"),
        ("a: 1\nb: !!int abc\n", 2, "'abc' is not of the type int"),
        ("b: !!bool perhaps\n", 1, "'perhaps' is not of the type bool"),
        ("b: !!float 12:30\n", 1, "'12:30' is not of the type float"),
        ("b: !!timestamp yesterday\n", 1, "timestamp"),
        ('b: "\\ud83d\\ude00"\n', 1, "\\ud83d is half a character"),
    ],
)
def test_bad_yaml_names_the_file_and_the_line(
    tmp_path: Path, text: str, line: int, word: str
) -> None:
    path = written(tmp_path / "bad.yaml", text)
    error = error_of(path)
    assert error.where.startswith(f"{path}:{line}:")
    assert word in error.found


def test_an_escape_beyond_unicode_is_a_plain_error(tmp_path: Path) -> None:
    for escape in ("\\UFFFFFFFF", "\\U00110000"):
        path = written(tmp_path / "bad.yaml", f'a: "{escape}"\n')
        assert error_of(path).where == str(path)


@pytest.mark.parametrize("depth", [101, 300, 3000])
@pytest.mark.parametrize(("opening", "closing"), [("{a: ", "}"), ("[", "]")])
def test_yaml_that_is_nested_too_deep_is_a_plain_error(
    tmp_path: Path, opening: str, closing: str, depth: int
) -> None:
    text = f"custom: {opening * depth}1{closing * depth}\n"
    path = written(tmp_path / "deep.yaml", text)
    error = error_of(path)
    assert (error.where, error.found) == (str(path), "is nested too deep")
    assert error.do == "Write it with at most 100 levels"


def test_a_hundred_levels_are_read_and_shown(tmp_path: Path) -> None:
    extra = "{a: " * 98 + "1" + "}" * 98
    path = written(tmp_path / "run.yaml", f"extends: {WARMUP}\ncustom:\n  extra: {extra}\n")
    again = written(tmp_path / "shown.yaml", show_config(path))
    assert load_config(again) == load_config(path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "word\n"])
def test_a_file_without_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "odd.yaml", text)
    assert error_of(path).where == str(path)


def test_a_file_that_cannot_be_read_is_a_plain_error(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "missing.yaml").found
    assert error_of(tmp_path).where == str(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error_of(binary).found
    assert error_of(written(tmp_path / "nul.yaml", "a: \x00\n")).where.endswith("nul.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=9), values, min_size=1, max_size=3))
def test_what_is_dumped_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_bytes(dump_mapping(mapping).encode())
    assert read_mapping(path) == mapping


@given(
    st.sampled_from(["no", "1e-4", "0o17", "12:30", "null", "~", "true", "=", "<<", "2026-01-01"])
)
def test_text_that_looks_like_another_scalar_is_quoted(text: str) -> None:
    assert dump_mapping({"key": text}) == f"key: '{text}'\n"


# --- extends ----------------------------------------------------------------------------


@pytest.mark.req("CFG-04")
def test_extends_merges_mappings_and_replaces_lists_whole(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", "a: {b: 1, c: {d: 2, e: 3}}\nlist: [1, 2, 3]\nkept: 1\n")
    written(tmp_path / "mid.yaml", "extends: base.yaml\na: {c: {e: 4}}\n")
    leaf = written(tmp_path / "sub" / "leaf.yaml", "extends: ../mid.yaml\na: {b: x}\nlist: [9]\n")
    assert load_mapping(leaf) == {
        "a": {"b": "x", "c": {"d": 2, "e": 4}},
        "list": [9],
        "kept": 1,
    }


@pytest.mark.req("CFG-04")
def test_a_circle_of_extends_names_the_chain(tmp_path: Path) -> None:
    first = written(tmp_path / "a.yaml", "extends: b.yaml\n")
    second = written(tmp_path / "b.yaml", "extends: a.yaml\n")
    error = error_of(first)
    assert error.where == f"{second}: extends"
    assert "a.yaml -> " in error.found


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("extends", ["[a.yaml, b.yaml]", "[]", "3", "", "{a: 1}"])
def test_extends_names_one_file(tmp_path: Path, extends: str) -> None:
    path = written(tmp_path / "leaf.yaml", f"extends: {extends}\n")
    assert error_of(path).where == f"{path}: extends"


@pytest.mark.req("CFG-04")
def test_a_missing_base_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    for gone in ("gone.yaml", "long" * 100, '"a\\0b"'):
        path = written(tmp_path / "leaf.yaml", f"extends: {gone}\n")
        error = error_of(path)
        assert error.where == f"{path}: extends"
        assert "there is no file" in error.found


def test_merging_changes_neither_mapping() -> None:
    low, high = {"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]}
    assert merge(low, high) == {"a": {"b": 1, "d": 2}, "c": [2]}
    assert (low, high) == ({"a": {"b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [2]})
    assert merge({"a": {"b": 1}}, {"a": None}) == {"a": None}
