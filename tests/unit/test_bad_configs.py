"""Every refusal of a training config: the rows of bad_configs.yaml, and rules over all keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from learner.config import Config, merge, parse_config
from learner.config.load import RETIRED_KEYS
from learner.config.rollout_matching import RolloutMatchingConfig
from learner.config.yaml12 import read_mapping
from shared_contracts.strict_model import bare_type, is_model
from tests.unit.config_faults import (
    ALIGNED,
    BY_PIPELINE,
    WARMUP,
    changed,
    errors_of,
    only_error,
    without,
)
from tests.unit.grouped import GROUPED

TABLE = read_mapping(Path(__file__).with_name("bad_configs.yaml"))
OLD_ROLLOUT = "custom.extra.rollout_matching"
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
PLAIN = changed("rollout_matching", {"max_new_tokens": 64})
HF = changed("rollout_matching.rollout_backend", "hf", PLAIN)
BEAM = {"rollout_matching": {"decode_mode": "beam", "num_beams": 4, "decode_batch_size": 4}}
DUPLICATE_UL = {"name": "duplicate_ul", "enabled": True, "weight": 1.0, "channels": ["B"]}
CLEAN = changed(
    "stage2_ab.pipeline.objective.3",
    DUPLICATE_UL | {"config": {"radius": 16}},
    merge(WARMUP, {"stage2_ab": {"schedule": {"b_ratio": 0.5}, "channel_b": {"prefix": "clean"}}}),
)
BASES = {
    "warmup": WARMUP,
    "aligned": ALIGNED,
    "plain": PLAIN,
    "hf": HF,
    "beam": merge(HF, BEAM),
    "both": changed("stage2_ab.schedule.b_ratio", 0.5),
    "lora": changed("tuner", LORA),
    "clean": CLEAN,
    "group": merge(WARMUP, GROUPED),
}
# Both variants, each with one enabled entry of every loss module.
MODULES: list[dict[str, Any]] = WARMUP["stage2_ab"]["pipeline"]["objective"]
PIPELINES = {path: changed(f"{path}.objective", MODULES, BY_PIPELINE[path]) for path in BY_PIPELINE}

# Families of rows, and the section at which their paths start.
ROLLOUT_ROWS = ("rollouts", "repeat_guard", "adapters", "async_rollouts")
AT = dict.fromkeys(ROLLOUT_ROWS, "rollout_matching") | {"servers": "rollout_matching.vllm.server"}


def rows(family: str) -> list[Any]:
    return [pytest.param(row, id=f"{family}: {name}") for name, row in TABLE[family].items()]


def is_refused(row: dict[str, Any], base: dict[str, Any] | None = None, at: str = "") -> None:
    """Change a valid config as the row says, and compare its errors with the row.

    at: the section at which the paths of the row start.
    """
    prefix = f"{at}." if at else ""
    mapping = BASES[row.get("base", "warmup")] if base is None else base
    for dotted in row.get("unset", []):
        mapping = without(prefix + dotted, mapping)
    for dotted, value in row.get("set", {}).items():
        mapping = changed(prefix + dotted, value, mapping)
    errors = errors_of(merge(mapping, row.get("merge", {})))
    where = row.get("where", [*row.get("unset", []), *row.get("set", {})][:1])
    expected = [where] if isinstance(where, str) else where
    paths = [re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", prefix + path) for path in expected]
    assert set(errors) == set(paths)
    for part in ("found", "do"):
        words = row.get(part, [])
        for word in [words] if isinstance(words, str) else words:
            assert word in getattr(errors[paths[0]], part)


@pytest.mark.req("CFG-02", "CFG-03", "CFG-05", "CFG-07", "CFG-08", "RES-01", "RES-02", "RES-03")
@pytest.mark.req(
    "RES-05", "RES-06", "RES-07", "CHA-01", "STEP-01", "CLEAN-01", "CLEAN-02", "FMT-01"
)
@pytest.mark.req("HUB-01", "GROUP-01", "GROUP-02", "GROUP-04", "ROLL-02", "ROLL-03", "LOGP-01")
@pytest.mark.req("REP-01", "SYNC-01", "ASYNC-01")
@pytest.mark.scenario(
    "Unknown stage2_ab keys fail fast",
    "Unknown top-level section key fails fast",
    "Unknown key inside covered section fails fast",
    "Unknown nested rollout key fails at schema load",
    "Unknown rollout key fails before rollout trainer execution",
    "Unknown nested decoding key fails before execution",
    "Missing b_ratio fails fast",
    "Missing pipeline fails fast",
    "Missing rollout pipeline fails fast",
    "Missing top-level rollout_matching still fails for stage2_two_channel",
    "Multi-server pairing is strict and deterministic",
    "Legacy rollout server paired-list shape fails fast",
    "Invalid server configuration fails fast",
    "Top-level extra presence fails fast",
    "Legacy decoding keys fail fast",
    "Legacy stop-neutral config keys fail fast",
    "stage2_ab.schedule.pattern fails fast",
    "Legacy rollout_buffer config fails fast",
    "Removed Channel-B semantic-desc gate key fails fast",
    "Removed Channel-B reordered-gt key fails fast",
    "Removed Channel-B desc-ce-weight key fails fast",
    "rollout_generate_batch_size fails fast when present",
    "rollout_infer_batch_size fails fast when present",
    "post_rollout_pack_scope fails fast when present",
    "rollout_buffer fails fast when present",
)
@pytest.mark.parametrize(
    ("row", "at"),
    [
        pytest.param(*row.values, AT.get(family, ""), id=row.id)
        for family in TABLE
        if family != "pipelines"
        for row in rows(family)
    ],
)
def test_a_fault_of_a_config_is_refused_at_its_path(row: dict[str, Any], at: str) -> None:
    is_refused(row, at=at)


# --- Pipelines of both variants ---------------------------------------------------------

paths = pytest.mark.parametrize("path", list(PIPELINES))


@pytest.mark.req("CFG-08", "CFG-03", "LOSS-03", "LOSS-04", "LOSS-06", "RES-09", "RES-15")
@pytest.mark.scenario("Out-of-range struct CE multiplier is handled safely")
@paths
@pytest.mark.parametrize("row", rows("pipelines"))
def test_a_bad_pipeline_is_refused(path: str, row: dict[str, Any]) -> None:
    is_refused(row, PIPELINES[path], path)


@pytest.mark.req("CFG-08", "RES-09")
@paths
def test_a_module_config_needs_all_its_keys(path: str) -> None:
    for n, module in enumerate(MODULES):
        errors = errors_of(changed(f"{path}.objective.{n}.config", {}, PIPELINES[path]))
        assert set(errors) == {f"{path}.objective[{n}].config.{key}" for key in module["config"]}


@pytest.mark.req("CFG-08")
@paths
@pytest.mark.parametrize("idling", [{"channels": None}, {"weight": 0}, {"enabled": False}])
def test_a_running_channel_without_a_loss_is_refused(path: str, idling: dict[str, Any]) -> None:
    """The warm-up runs channel A alone, the rollout-aligned variant channel B alone."""
    running, idle = ("A", "B") if path == "stage2_ab.pipeline" else ("B", "A")
    off = {"channels": [idle]} if "channels" in idling else idling
    modules = [module | off for module in MODULES]
    error = errors_of(changed(f"{path}.objective", modules, PIPELINES[path]))[f"{path}.objective"]
    assert f"channel {running} runs" in error.found
    assert f"Add {running} " in error.do


# --- Rules over all keys ----------------------------------------------------------------


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted keys of a section; a list counts as one key."""
    for name, field in model.model_fields.items():
        below = bare_type(field.annotation)
        if is_model(below):
            yield from leaves(below, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("value", [None, 1, {"any": "thing"}], ids=["null", "scalar", "mapping"])
def test_every_retired_key_is_the_one_error_of_a_config(value: Any) -> None:
    for key in (key for key in RETIRED_KEYS if "[]" not in key):
        error = only_error(changed(key, value))
        assert (error.where, error.do) == (key, RETIRED_KEYS[key])


@pytest.mark.req("CFG-03")
def test_the_replacement_of_every_retired_key_is_served_and_no_retired_key_is() -> None:
    config = parse_config(changed("rollout_matching.vllm.server.timeout_s", 9.0)).model_dump()
    served = set(leaves(Config))
    sections = "|".join(Config.model_fields)
    for key, do in RETIRED_KEYS.items():
        assert not any(f"{leaf}.".startswith(f"{key}.") for leaf in served), key
        for path in re.findall(rf"\b(?:{sections})(?:\.\w+(?:\[[^\]]*\])?)+", do):
            if not path.startswith("rollout_matching.pipeline"):  # the key of the other variant
                value_at(config, path)


def value_at(document: Any, path: str) -> Any:
    """The value of a path: `[]` is the first item of a list, `[name=x]` the item of that name.

    KeyError where there is none.
    """
    for key, index in re.findall(r"(\w+)(\[[^\]]*\])?", path):
        document = document[key]
        if index:
            name = index.strip("[]").removeprefix("name=")
            document = next(item for item in document if not name or item["name"] == name)
    return document


@pytest.mark.req("RES-01")
@pytest.mark.scenario(
    "Any legacy rollout key path fails fast",
    "Legacy decode key path fails fast",
    "Legacy rollout backend key path fails fast",
)
def test_every_key_of_the_old_rollout_section_is_refused_with_its_path() -> None:
    for key in leaves(RolloutMatchingConfig):
        error = only_error(changed(f"{OLD_ROLLOUT}.{key}", 3))
        assert (error.where, error.do) == (f"{OLD_ROLLOUT}.{key}", f"Use rollout_matching.{key}")


@pytest.mark.req("RES-13")
@pytest.mark.scenario("custom.coord_loss does not hard error")
@pytest.mark.parametrize("value", [None, 1, {"weight": 1.0}])
def test_custom_coord_loss_is_ignored_in_silence(value: Any) -> None:
    assert parse_config(changed("custom.coord_loss", value)) == parse_config(WARMUP)


def misspelt(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Add a key with one letter too many beside every key, in place: (its path, the key)."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from misspelt(item, f"{where}[{index}]")
    elif isinstance(value, dict) and where != "custom.extra":
        for key in list(value):
            path = f"{where}.{key}" if where else key
            yield f"{path}x", key
            yield from misspelt(value[key], path)
            value[f"{key}x"] = value[key]
        if not value:
            value["anything"] = 1
            yield f"{where}.anything", "no keys here"


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("path", BY_PIPELINE)
def test_every_unknown_key_of_every_section_is_refused_at_once(path: str) -> None:
    mapping = parse_config(changed("tuner", LORA, BY_PIPELINE[path])).model_dump(mode="json")
    for section, other in (("stage2_ab", ALIGNED), ("rollout_matching.pipeline", WARMUP)):
        if BY_PIPELINE[path] is other:
            mapping = without(section, mapping)
    parse_config(mapping)
    expected = dict(misspelt(mapping))
    assert len(expected) > 120
    assert "rollout_matching.vllm.server.servers[0].group_portx" in expected
    errors = errors_of(mapping)
    assert set(errors) == set(expected)
    assert {error.found for error in errors.values()} == {"unknown key"}
    assert all(key in errors[where].do for where, key in expected.items())
