"""The JSON Schema that editors hold a training YAML against (CFG-10)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_resolved, load_config, parse_config
from learner.config.json_schema import json_schema, schema_text
from learner.config.load import dotted
from learner.config.yaml12 import read_mapping
from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import Steps
from tests.unit.config_faults import (
    CONFIGS,
    SHIPPED,
    changed,
    config_name,
    written,
)

SCHEMA = CONFIGS / "schema.json"
VALIDATOR = Draft202012Validator(json_schema())

pytestmark = pytest.mark.req("CFG-10")
shipped = pytest.mark.parametrize("path", SHIPPED, ids=config_name)


def complaints(mapping: dict[str, Any]) -> dict[str, str]:
    """The messages of the schema, by path."""
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
    return changed(".".join(map(str, steps)), value, mapping)


def resolved(path: Path, folder: Path) -> dict[str, Any]:
    return read_mapping(written(folder / "resolved.yaml", dump_resolved(load_config(path))))


def test_the_committed_schema_is_current_and_of_draft_2020_12() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    do = "run `learner config schema --out configs/schema.json`"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), do


def test_the_command_prints_the_schema_or_replaces_a_file_at_once(tmp_path: Path) -> None:
    out = written(tmp_path / "schema.json", "{}")
    with out.open() as before:
        done = CliRunner().invoke(app, ["config", "schema", "--out", str(out)])
        assert (done.exit_code, done.stdout, before.read()) == (0, "", "{}")
    printed = CliRunner().invoke(app, ["config", "schema"]).stdout
    assert printed == out.read_text(encoding="utf-8") == schema_text()


@shipped
def test_every_shipped_config_names_its_schema_and_is_valid(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert found
    assert (path.parent / found[1]).resolve() == SCHEMA
    assert complaints(read_mapping(path)) == {}
    assert complaints(resolved(path, tmp_path)) == {}


# One config of each variant: what holds for its keys holds for those of the others.
variants = pytest.mark.parametrize(
    "path", [CONFIGS / "demo/warmup.yaml", CONFIGS / "stage2_rollout_aligned/base.yaml"]
)


@variants
def test_schema_and_loader_agree_on_every_key(path: Path, tmp_path: Path) -> None:
    """On null, on an unknown key beside it, and on a value of a wrong type."""
    mapping, taken = resolved(path, tmp_path), 0
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


def test_a_complaint_is_about_the_key_that_is_wrong() -> None:
    wrong = {"training": {"max_steps": "many", "learning_rat": 1}, "tuner": {"lora_rank": 0}}
    assert set(complaints(wrong)) == {"training", "training.max_steps", "tuner"}


def test_a_file_that_extends_another_may_leave_everything_to_it() -> None:
    assert complaints({"extends": "base.yaml", "tuner": {"lora_rank": 8}}) == {}
