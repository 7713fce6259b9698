"""Config files: YAML and `extends`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.config.load import show_config
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError
from tests.unit.config_faults import changed, only_error

ROOT = Path(__file__).parents[2]
WARMUP = ROOT / "configs/demo/warmup.yaml"


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


# --- paths, addresses and prompts


PATHS = ("model.model", "data.train_jsonl", "training.output_dir", "training.logging_dir")


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("key", PATHS)
def test_a_leading_tilde_is_the_home_folder_and_variables_are_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    section, name = key.split(".")
    config = parse_config(changed(key, "~/here/x"))
    assert getattr(getattr(config, section), name) == tmp_path / "here" / "x"
    price = parse_config(changed(key, "/data/a$b~"))
    assert getattr(getattr(price, section), name) == Path("/data/a$b~")
    for text, variable in (("${SCRATCH}/x", "${SCRATCH}"), ("/a/$USER/x", "$U")):
        error = only_error(changed(key, text))
        assert error.where == key
        assert error.found == f'"{text}" has {variable}, and variables are not expanded'
    error = only_error(changed(key, "~nobody-of-this-name/x"))
    assert error.found.endswith("there is no user nobody-of-this-name")


@pytest.mark.req("CFG-04")
def test_extends_takes_a_path_as_any_other_key_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(WARMUP.read_text())
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text("extends: ~/base.yaml\n")
    assert load_config(leaf) == load_config(tmp_path / "base.yaml")
    leaf.write_text("extends: ${HOME}/base.yaml\n")
    with pytest.raises(ContractError, match="variables are not expanded") as caught:
        load_config(leaf)
    assert caught.value.where == f"{leaf}: extends"


@pytest.mark.req("CFG-05")
def test_an_address_with_a_route_or_with_one_port_for_two_things_is_refused() -> None:
    served = json.loads((ROOT / "docs/openapi.json").read_text())["paths"]
    server = "rollout_matching.vllm.server.servers.0"
    for path in served:
        for url in (f"http://host:8000{path}", f"http://host:8000/a{path.rstrip('/')}"):
            error = only_error(changed(f"{server}.base_url", url))
            assert error.where == "rollout_matching.vllm.server.servers[0].base_url"
            assert error.do == f"Write {url.rstrip('/').removesuffix(path.rstrip('/'))}"
    parse_config(changed(f"{server}.base_url", "http://host:8000/infer-a/"))
    for url, port in (("http://host:8000", 8000), ("http://host", 80), ("https://host/a", 443)):
        address = [{"base_url": url, "group_port": port}]
        error = only_error(changed("rollout_matching.vllm.server.servers", address))
        assert error.where == "rollout_matching.vllm.server.servers[0].group_port"
        assert error.found == f"{port} is also the port of base_url {url}"


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("key", ["prompt", "system"])
@pytest.mark.parametrize("mark", ["<image>", "<|image_pad|>", "<video>", "<|im_end|>"])
def test_a_mark_of_the_chat_template_in_a_prompt_is_refused(key: str, mark: str) -> None:
    error = only_error(changed(f"template.{key}", f"{mark}Detect every object."))
    assert (error.where, error.found) == (f"template.{key}", f"it has {mark}")
    parse_config(changed(f"template.{key}", "Boxes such as <|coord_1|>, an image and a < b."))
