"""Config files: YAML and `extends`."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import dump_mapping, load_mapping
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError
from tests.unit.config_faults import written


def error_of(path: Path) -> ContractError:
    with pytest.raises(ContractError) as caught:
        load_mapping(path)
    return caught.value


# --- YAML -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("true", True),
        ("1e-4", 1e-4),
        ("010", 10),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2026-11-20", "2026-11-20"),
        ("~", None),
        ("-.inf", -math.inf),
        ("1" * 1000, int("1" * 1000)),
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
        ("a: 1\nb: [1, 2\nc: 3\n", ":3:", ""),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ":4:", "duplicate key"),
        ("a: 1\n2: 3\n", ":2:", "not a string"),
        ("a: 1\na: !!python/object:os.system x\n", ":2:", ""),
        ("a: 1\n---\nb: 2\n", ":2:", "document"),
        (f"a: 1\nb: {'1' * 4301}\n", "", "4300 digits"),
        ("a: 1\nb: !!int abc\n", "", "'abc'"),
        ('b: "\\ud83d\\ude00"\n', "", "surrogates not allowed"),
        ('a: "\\UFFFFFFFF"\n', "", ""),
        (f"custom: {'{a: ' * 101}1{'}' * 101}\n", "", "is nested too deep"),
        ("a: &a {b: *a}\n", "", "is nested too deep"),
        (f"custom: {'[' * 3000}1{']' * 3000}\n", "", "is nested too deep"),
        ("# nothing\n", "", ""),
        ("word\n", "", ""),
    ],
)
def test_bad_yaml_is_refused_with_its_file_and_line(
    tmp_path: Path, text: str, line: str, word: str
) -> None:
    path = written(tmp_path / "bad.yaml", text)
    error = error_of(path)
    assert error.where.startswith(f"{path}{line}")
    assert word in error.found


def test_a_file_that_cannot_be_read_is_a_plain_error(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "missing.yaml").found
    assert error_of(tmp_path).where == str(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error_of(binary).found


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["no", "1e-4", "0o17", "12:30", "null", "~", "true", "=", "<<", "2026-01-01"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.text(max_size=9), values, min_size=1, max_size=3))
def test_what_is_dumped_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_bytes(dump_mapping(mapping).encode())
    assert read_mapping(path) == mapping


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
@pytest.mark.parametrize(
    ("extends", "found"),
    [
        ("[a.yaml, b.yaml]", ""),
        ("", ""),
        ("gone.yaml", "there is no file"),
        ("long" * 100, "there is no file"),
        ('"a\\0b"', "there is no file"),
        ("leaf.yaml", "leaf.yaml -> "),
        ("${HOME}/base.yaml", "variables are not expanded"),
    ],
)
def test_a_bad_extends_is_refused(tmp_path: Path, extends: str, found: str) -> None:
    path = written(tmp_path / "leaf.yaml", f"extends: {extends}\n")
    error = error_of(path)
    assert error.where == f"{path}: extends"
    assert found in error.found
