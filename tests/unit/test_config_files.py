"""Config files: YAML, `extends`, the canonical profiles, what is shipped, and the JSON Schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping, dump_resolved, load_config, load_mapping, parse_config
from learner.config.load import LEAF_FIELDS, canonical_variant, dotted, schema_text
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import Steps
from tests.unit.config_faults import CONFIGS, SHIPPED, changed, config_name, written


def error_of(path: Path) -> ContractError:
    with pytest.raises(ContractError) as caught:
        load_mapping(path)
    return caught.value


# --- YAML -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("1e-4", 1e-4),
        ("010", 10),
        ("12:30", "12:30"),
        ("2026-11-20", "2026-11-20"),
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
        (f"custom: {'{a: ' * 101}1{'}' * 101}\n", "", "more than 100 levels"),
        ("a: &a {b: *a}\n", "", "more than 100 levels"),
        (f"custom: {'[' * 3000}1{']' * 3000}\n", "", "is not YAML"),
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


@pytest.mark.parametrize("text", ["? a", "?a", ":a", "a?", "-?"])
def test_text_is_quoted_where_pyyaml_reads_it_differently(tmp_path: Path, text: str) -> None:
    mapping = {"key": text, "names": [text]}
    path = tmp_path / "text.yaml"
    path.write_text(dump_mapping(mapping))
    assert read_mapping(path) == mapping
    assert yaml.safe_load(path.read_text()) == mapping


# --- extends ----------------------------------------------------------------------------


@pytest.mark.req("CFG-04")
def test_extends_merges_mappings_and_replaces_lists_whole(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", "a: {b: 1, c: {d: 2, e: 3}}\nlist: [1, 2, 3]\nkept: 1\n")
    written(tmp_path / "mid.yaml", "extends: base.yaml\na: {c: {e: 4}}\n")
    leaf = written(tmp_path / "sub" / "leaf.yaml", "extends: ../mid.yaml\na: {b: x}\nlist: [9]\n")
    assert load_mapping(leaf) == {"a": {"b": "x", "c": {"d": 2, "e": 4}}, "list": [9], "kept": 1}


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize(
    ("extends", "found"),
    [
        ("", ""),
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


# --- canonical profiles and shipped files -----------------------------------------------


TWO_CHANNEL = CONFIGS / "stage2_two_channel"


def faults_of(path: Path) -> list[ContractError]:
    with pytest.raises(ContractError) as caught:
        load_config(path)
    return caught.value.errors


@pytest.fixture(params=list(LEAF_FIELDS))
def profiles(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the shipped profiles of one variant, to break."""
    for path in (CONFIGS / request.param).rglob("*.yaml"):
        written(tmp_path / path.relative_to(CONFIGS), path.read_text(encoding="utf-8"))
    copy: Path = tmp_path / request.param
    return copy


@pytest.mark.req("CFG-04")
@pytest.mark.scenario(
    "Missing explicit run identity fails fast", "Missing explicit model path fails fast"
)
def test_a_leaf_states_each_high_signal_field_itself(profiles: Path) -> None:
    path = written(profiles / "prod" / "bare.yaml", "extends: ../base.yaml\n")
    errors = faults_of(path)
    fields = LEAF_FIELDS[profiles.name]
    assert tuple(error.where for error in errors) == fields
    assert len(fields) == (12 if profiles.name == "stage2_rollout_aligned" else 14)
    assert all("base.yaml" in error.found and str(path) in error.do for error in errors)


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Multi-hop profile inheritance fails fast")
def test_a_second_hop_is_refused_with_the_chain_and_the_base(profiles: Path) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    written(profiles / "smoke" / "mid.yaml", dump_mapping(leaf))
    path = written(profiles / "smoke" / "leaf.yaml", dump_mapping(leaf | {"extends": "mid.yaml"}))
    (error,) = faults_of(path)
    assert error.where == f"{path}: extends"
    assert "leaf.yaml -> " in error.found
    assert "mid.yaml -> " in error.found
    assert "../base.yaml" in error.do
    base = profiles / "base.yaml"
    written(profiles / "root.yaml", "data: {shuffle: true}\n")
    written(base, f"extends: root.yaml\n{base.read_text(encoding='utf-8')}")
    (error,) = faults_of(profiles / "prod" / "default.yaml")
    assert "root.yaml" in error.found


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Dual-parent smoke inheritance fails fast")
@pytest.mark.parametrize("extends", [None, ["../base.yaml", "../prod/default.yaml"]])
def test_a_leaf_has_exactly_one_parent(profiles: Path, extends: Any) -> None:
    leaf = read_mapping(profiles / "smoke" / "default.yaml")
    del leaf["extends"]
    path = profiles / "smoke" / "odd.yaml"
    written(path, dump_mapping(leaf if extends is None else leaf | {"extends": extends}))
    assert f"{path}: extends" in [error.where for error in faults_of(path)]


@pytest.mark.req("CFG-04")
@pytest.mark.scenario("Canonical profile discovery is scoped to prod/smoke")
def test_only_prod_and_smoke_hold_canonical_leaves(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert canonical_variant(profiles / "prod" / "x.yaml")
    assert canonical_variant(profiles / "smoke" / ".." / "prod" / "x.yaml")
    assert not canonical_variant(profiles / "base.yaml")
    assert not canonical_variant(profiles / "other" / "x.yaml")
    assert not canonical_variant(profiles / "prod" / "old" / "x.yaml")
    assert not canonical_variant(profiles.parent / "demo" / "prod" / "x.yaml")
    run = profiles.parent / "runs" / profiles.name / "prod" / "resolved_config.yaml"
    assert not canonical_variant(run), "there is no base beside it"
    monkeypatch.chdir(profiles / "smoke")
    assert canonical_variant(Path("../prod/x.yaml"))


# --- Shipped files ----------------------------------------------------------------------


@pytest.mark.req("CFG-04", "CFG-02", "CFG-09", "CFG-10", "RES-02")
@pytest.mark.scenario(
    "sft injection contract remains stable",
    "Runtime rollout injection path stays stable",
    "One-hop profile inheritance passes validation",
    "Downstream profile with explicit high-signal fields is accepted",
)
@pytest.mark.parametrize("path", SHIPPED, ids=config_name)
def test_every_shipped_config_and_its_resolved_form_load_equal_and_are_valid(
    path: Path, tmp_path: Path
) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == SCHEMA
    config = load_config(path)
    resolved = written(tmp_path / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved) == config
    assert "extends" not in read_mapping(resolved)
    for file in (path, resolved):
        assert complaints(read_mapping(file)) == {}


@pytest.mark.req("CFG-04")
@pytest.mark.parametrize("path", sorted(TWO_CHANNEL.glob("gpu/*.yaml")), ids=config_name)
def test_a_gpu_profile_is_a_canonical_leaf_but_for_its_folder(path: Path, tmp_path: Path) -> None:
    """Profiles beside prod and smoke are bound to one hop and the explicit fields, too."""
    folder = tmp_path / TWO_CHANNEL.name
    written(folder / "base.yaml", (TWO_CHANNEL / "base.yaml").read_text(encoding="utf-8"))
    leaf = written(folder / "prod" / path.name, path.read_text(encoding="utf-8"))
    assert canonical_variant(leaf)
    assert load_config(leaf) == load_config(path)


BASE_WEIGHTS = {"ciou_weight": 0.5, "soft_ce_weight": 0.02, "w1_weight": 0.02}
PROD_WEIGHTS = {"ciou_weight": 0.2, "soft_ce_weight": 0.1, "w1_weight": 0.1}


@pytest.mark.req("CFG-04")
@pytest.mark.scenario(
    "Canonical smoke leaves inherit base CIoU/soft-CE/W1 defaults",
    "Canonical prod leaves pin explicit CIoU/soft-CE/W1 overrides",
)
@pytest.mark.parametrize(
    ("path", "own", "expected"),
    [
        ("base.yaml", True, BASE_WEIGHTS),
        ("smoke/default.yaml", False, BASE_WEIGHTS),
        ("prod/default.yaml", True, PROD_WEIGHTS),
    ],
)
def test_the_weights_of_the_two_channel_profiles(
    path: str, own: bool, expected: dict[str, float]
) -> None:
    assert ("pipeline" in read_mapping(TWO_CHANNEL / path)["stage2_ab"]) == own
    modules = load_config(TWO_CHANNEL / path).pipeline.objective
    weights = [module.config.model_dump() for module in modules]
    assert {key: each[key] for each in weights for key in expected if key in each} == expected


# --- the JSON Schema for editors --------------------------------------------------------


SCHEMA = CONFIGS / "schema.json"
WHOLE_SCHEMA = json.loads(schema_text())
VALIDATOR = Draft202012Validator(WHOLE_SCHEMA)


def complaints(mapping: dict[str, Any]) -> dict[str, str]:
    return {e.json_path.removeprefix("$."): e.message for e in VALIDATOR.iter_errors(mapping)}


def spots(value: Any, at: Steps = ()) -> Iterator[Steps]:
    """Every path of a config, but for the free section."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for step, item in items:
        yield (*at, step)
        if isinstance(item, dict | list | tuple) and step != "extra":
            yield from spots(item, (*at, step))


def placed(mapping: dict[str, Any], steps: Steps, value: Any) -> dict[str, Any]:
    return changed(".".join(map(str, steps)), value, mapping)


@pytest.mark.req("CFG-10")
def test_the_committed_schema_is_current_and_of_draft_2020_12() -> None:
    Draft202012Validator.check_schema(WHOLE_SCHEMA)
    assert WHOLE_SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    do = "run `learner config schema --out configs/schema.json`"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), do


@pytest.mark.req("CFG-10")
def test_the_command_prints_the_schema_or_replaces_a_file_at_once(tmp_path: Path) -> None:
    out = written(tmp_path / "schema.json", "{}")
    with out.open() as before:
        done = CliRunner().invoke(app, ["config", "schema", "--out", str(out)])
        assert (done.exit_code, done.stdout, before.read()) == (0, "", "{}")
    printed = CliRunner().invoke(app, ["config", "schema"]).stdout
    assert printed == out.read_text(encoding="utf-8") == schema_text()


# One config of each variant: what holds for its keys holds for those of the others.
variants = pytest.mark.parametrize(
    "path", [CONFIGS / "demo/warmup.yaml", CONFIGS / "stage2_rollout_aligned/base.yaml"]
)


@pytest.mark.req("CFG-10")
@variants
def test_schema_and_loader_agree_on_every_key(path: Path, tmp_path: Path) -> None:
    """On null, on an unknown key beside it, and on a value of a wrong type."""
    file = written(tmp_path / "resolved.yaml", dump_resolved(load_config(path)))
    mapping, taken = read_mapping(file), 0
    for steps in spots(mapping):
        null = placed(mapping, steps, None)
        try:
            parse_config(null)
        except ContractError:
            pass
        else:
            taken += 1
            assert complaints(null) == {}, dotted(steps)
        wrong = placed(mapping, steps, [["neither", "this"], {"nor": "that"}])
        assert complaints(wrong), dotted(steps)
        if isinstance(steps[-1], str) and steps[-2:] != ("custom", "extra"):
            assert complaints(placed(mapping, (*steps[:-1], "no_such_key"), 1)), dotted(steps)
    assert taken > 15


@pytest.mark.req("CFG-10")
def test_a_file_that_extends_another_may_leave_everything_to_it() -> None:
    assert complaints({"extends": "base.yaml", "tuner": {"lora_rank": 8}}) == {}
