"""The JSON Schema that editors hold a training YAML against (CFG-10)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_resolved, load_config, load_mapping, merge, parse_config
from learner.config.json_schema import json_schema, schema_text
from learner.config.load import dotted
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import Steps

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = CONFIGS / "schema.json"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
WARMUP = load_mapping(CONFIGS / "demo" / "warmup.yaml")
ENTRY = "stage2_ab.pipeline.objective[0]"
VALIDATOR = Draft202012Validator(json_schema())

pytestmark = pytest.mark.req("CFG-10")


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def complaints(mapping: dict[str, Any]) -> dict[str, str]:
    """What the schema says of a file, by path."""
    return {e.json_path.removeprefix("$."): e.message for e in VALIDATOR.iter_errors(mapping)}


def spots(value: Any, at: Steps = ()) -> Iterator[Steps]:
    """Every path of a config, but for the free section."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for step, item in items:
        yield (*at, step)
        if isinstance(item, dict | list | tuple) and step != "extra":
            yield from spots(item, (*at, step))


def placed(mapping: dict[str, Any], steps: Steps, value: Any) -> dict[str, Any]:
    """A copy of the mapping with another value at a path."""
    changed: dict[str, Any] = json.loads(json.dumps(mapping))
    here: Any = changed
    for step in steps[:-1]:
        here = here[step]
    here[steps[-1]] = value
    return changed


def resolved(path: Path, folder: Path) -> dict[str, Any]:
    file = folder / "resolved.yaml"
    file.write_text(dump_resolved(load_config(path)), encoding="utf-8")
    return read_mapping(file)


# --- The file ---------------------------------------------------------------------------


def test_the_schema_is_one_of_draft_2020_12() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == Draft202012Validator.META_SCHEMA["$id"]


def test_the_committed_schema_is_current() -> None:
    do = "run `learner config schema --out configs/schema.json`"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), do


def test_the_command_prints_or_writes_it(tmp_path: Path) -> None:
    out = tmp_path / "schema.json"
    done = CliRunner().invoke(app, ["config", "schema", "--out", str(out)])
    assert (done.exit_code, done.stdout) == (0, "")
    printed = CliRunner().invoke(app, ["config", "schema"]).stdout
    assert printed == out.read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("out", [".", "folder", "/proc/absent/schema.json", "file/schema.json"])
def test_a_place_that_cannot_be_written_is_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("kept")
    error = CliRunner().invoke(app, ["config", "schema", "--out", out]).exception
    assert isinstance(error, ContractError)
    assert (error.where, out in error.found) == ("--out", True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_the_file_that_is_there_is_replaced_at_once(tmp_path: Path) -> None:
    out = tmp_path / "schema.json"
    out.write_text("{}")
    before = out.open()
    assert CliRunner().invoke(app, ["config", "schema", "--out", str(out)]).exit_code == 0
    assert (before.read(), out.read_text(encoding="utf-8")) == ("{}", schema_text())


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_shipped_config_tells_editors_its_schema(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert found
    assert (path.parent / found[1]).resolve() == SCHEMA


# --- What it accepts --------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_shipped_config_is_valid_as_it_is_written(path: Path) -> None:
    assert complaints(read_mapping(path)) == {}


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_every_shipped_config_is_valid_resolved(path: Path, tmp_path: Path) -> None:
    assert complaints(resolved(path, tmp_path)) == {}


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_null_is_valid_wherever_the_loader_takes_it(path: Path, tmp_path: Path) -> None:
    mapping, taken = resolved(path, tmp_path), 0
    for steps in spots(mapping):
        changed = placed(mapping, steps, None)
        try:
            parse_config(changed)
        except ContractError:
            continue
        taken += 1
        assert complaints(changed) == {}, dotted(steps)
    assert taken > 15


@pytest.mark.parametrize(
    "overrides",
    [
        {"custom": {"extra": {"anything": [1, {"at": "all"}]}}},
        {"custom": {"coord_loss": {"ignored": True}}},
        {"stage2_ab": {"schedule": {"b_ratio": "0.1234567890123456789"}}},
        {"training": {"learning_rate": 1}},
        {"tuner": {"train_type": "lora", "lora_rank": 1, "lora_alpha": 2}},
        {"tuner": {"train_type": "lora", "lora_rank": 1, "lora_alpha": 2, "target_modules": ["q"]}},
        {"tuner": {}},
    ],
)
def test_what_the_loader_takes_is_valid(overrides: dict[str, Any]) -> None:
    mapping = merge(WARMUP, overrides)
    parse_config(mapping)
    assert complaints(mapping) == {}


@pytest.mark.parametrize(
    "leaf",
    [{}, {"training": {"seed": 1}}, {"tuner": {"lora_rank": 8}}, {"tuner": {"train_type": "lora"}}],
)
def test_a_file_that_extends_another_may_leave_everything_to_it(leaf: dict[str, Any]) -> None:
    assert complaints({"extends": "base.yaml", **leaf}) == {}


# --- What it refuses --------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_an_unknown_key_is_refused_in_every_mapping(path: Path, tmp_path: Path) -> None:
    mapping = resolved(path, tmp_path)
    for steps in spots(mapping):
        if isinstance(steps[-1], str) and steps[-2:] != ("custom", "extra"):
            told = complaints(placed(mapping, (*steps[:-1], "no_such_key"), 1))
            assert any("no_such_key" in message for message in told.values()), dotted(steps)
            assert set(told) == {dotted(steps[:-1]) or "$"}


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_a_value_of_the_wrong_type_is_refused_at_every_key(path: Path, tmp_path: Path) -> None:
    mapping = resolved(path, tmp_path)
    for steps in spots(mapping):
        told = complaints(placed(mapping, steps, [["neither", "this"], {"nor": "that"}]))
        assert any(where.startswith(dotted(steps)) for where in told), dotted(steps)


@pytest.mark.parametrize(
    ("steps", "value", "word"),
    [
        (("model", "torch_dtype"), "float16", "is not one of"),
        (("custom", "trainer_variant"), "stage2_ab_training", "is not one of"),
        (("tuner",), {"train_type": "half"}, "is not one of"),
        (("training", "learning_rate"), 0, "less than or equal to"),
        (("training", "learning_rate"), "fast", "is not of type 'number'"),
        (("training", "seed"), -1, "less than the minimum"),
        (("training", "packing"), "yes", "is not of type 'boolean'"),
        (("global_max_length",), 640.5, "is not of type 'integer'"),
        (("stage2_ab", "pipeline", "objective", 0, "name"), "token", "is not one of"),
        (("stage2_ab", "pipeline", "objective", 0, "channels"), ["C"], "is not one of"),
    ],
)
def test_a_wrong_value_is_refused_at_its_path(steps: Steps, value: Any, word: str) -> None:
    ((where, message),) = complaints(placed(WARMUP, steps, value)).items()
    assert where.startswith(dotted(steps))
    assert word in message


@pytest.mark.parametrize("value", ["", 0, ["base.yaml"], None])
def test_extends_is_one_file(value: Any) -> None:
    assert set(complaints(WARMUP | {"extends": value})) == {"extends"}


def test_without_a_base_every_required_key_is_required() -> None:
    steps = [steps for steps in spots(WARMUP) if isinstance(steps[-1], str)]
    refused = [at for at in steps if _refused_by_loader(at)]
    assert len(refused) > 30
    for at in refused:
        ((where, message),) = complaints(_without(at)).items()
        assert where == (dotted(at[:-1]) or "$"), dotted(at)
        assert message == f"'{at[-1]}' is a required property"


def _without(steps: Steps) -> dict[str, Any]:
    changed = placed(WARMUP, steps, None)
    here: Any = changed
    for step in steps[:-1]:
        here = here[step]
    del here[steps[-1]]
    return changed


def _refused_by_loader(steps: Steps) -> bool:
    """True where the key is one that a model requires, whatever the others say."""
    try:
        parse_config(_without(steps))
    except ContractError as error:
        return error.where == dotted(steps) and error.found == "this key is required and missing"
    return False


def test_an_entry_of_a_list_is_complete_with_a_base_too() -> None:
    told = complaints(_with_entry({"weight": 1}))
    assert told == {ENTRY: "'name' is a required property"}
    told = complaints(_with_entry({"name": "bbox_geo", "config": {}}))
    assert set(told) == {ENTRY, f"{ENTRY}.config"}


def _with_entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {"extends": "base.yaml", "stage2_ab": {"pipeline": {"objective": [entry]}}}


@pytest.mark.parametrize(
    ("tuner", "word"),
    [
        ({"train_type": "full", "lora_rank": 1}, "lora_rank"),
        ({"lora_rank": 1}, "lora_rank"),
        ({"train_type": "lora", "lora_rank": 1}, "'lora_alpha' is a required property"),
    ],
)
def test_each_tuner_has_its_own_keys(tuner: dict[str, Any], word: str) -> None:
    assert word in complaints(WARMUP | {"tuner": tuner})["tuner"]


def test_a_key_of_another_module_is_refused_where_it_stands() -> None:
    config = ("stage2_ab", "pipeline", "objective", 0, "config")
    told = complaints(placed(WARMUP, (*config, "ciou_weight"), 1.0))
    assert list(told) == [f"{ENTRY}.config"]
    assert "'ciou_weight' was unexpected" in told[f"{ENTRY}.config"]


# --- What an editor shows ---------------------------------------------------------------


def described(schema: Any) -> Iterator[tuple[str, Any]]:
    """(key, schema) of every property at any depth."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        for key, below in properties.items() if isinstance(properties, dict) else ():
            yield key, below
        for below in schema.values():
            yield from described(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from described(below)


def test_every_key_has_a_sentence_and_says_what_leaving_it_out_means() -> None:
    shape = {key: value for key, value in json_schema().items() if key not in ("if", "then")}
    keys = [(key, below) for key, below in described(shape) if set(below) != {"const"}]
    assert len(keys) > 150
    for key, below in keys:
        sentence = below["description"]
        assert sentence.startswith("`"), key
        assert sentence.endswith("."), key
        if "default" in below:
            assert "Default: " in sentence
