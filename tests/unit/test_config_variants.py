"""What each trainer variant states, refuses and means (RES-02), and what is run of it."""

import copy
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from learner.config import merge, parse_config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.training.start_checks import read_inputs
from shared_contracts.errors import ContractError
from tests.unit.config_faults import (
    ALIGNED,
    BY_PIPELINE,
    WARMUP,
    changed,
    errors_of,
    only_error,
    without,
)

SERVER = WARMUP["rollout_matching"]["vllm"]["server"]
ASYNC = "rollout_matching.async_rollout"
COORD_DIAG = {"name": "coord_diag", "enabled": True, "weight": 1, "channels": ["B"], "config": {}}


@pytest.mark.req("RES-02")
def test_two_channels_train_boxes_by_their_schedule() -> None:
    config = parse_config(changed("stage2_ab.schedule.b_ratio", 0.3))
    assert (config.b_ratio, config.allow_poly) == (Decimal("0.3"), False)


@pytest.mark.req("RES-02", "CFG-01")
@pytest.mark.scenario("Rollout-matching enabled via trainer_variant")
def test_rollout_aligned_runs_channel_b_alone_and_takes_polygons() -> None:
    config = parse_config(ALIGNED)
    assert config.custom.trainer_variant == "stage2_rollout_aligned"
    assert config.pipeline is config.rollout_matching.pipeline
    assert (config.b_ratio, config.allow_poly) == (Decimal(1), True)


@pytest.mark.req("RES-02")
def test_an_unknown_variant_names_both() -> None:
    error = only_error(changed("custom.trainer_variant", "stage3"))
    assert error.where == "custom.trainer_variant"
    assert "stage2_two_channel" in error.do
    assert "stage2_rollout_aligned" in error.do


@pytest.mark.req("CFG-08", "RES-02")
@pytest.mark.scenario("Missing pipeline fails fast", "Missing rollout pipeline fails fast")
@pytest.mark.parametrize("path", list(BY_PIPELINE))
@pytest.mark.parametrize("null", [False, True])
def test_a_missing_pipeline_is_named(path: str, null: bool) -> None:
    base = BY_PIPELINE[path]
    error = only_error(changed(path, None, base) if null else without(path, base))
    assert error.where == path


@pytest.mark.req("CFG-08", "RES-02")
def test_two_channels_need_their_section() -> None:
    for mapping in (without("stage2_ab"), changed("stage2_ab", None)):
        error = only_error(mapping)
        assert error.where == "stage2_ab"
        assert "stage2_ab.pipeline" in error.do
        assert "b_ratio" in error.do


@pytest.mark.req("CFG-08", "RES-02")
def test_each_variant_refuses_the_section_of_the_other() -> None:
    pipeline = ALIGNED["rollout_matching"]["pipeline"]
    error = only_error(changed("rollout_matching.pipeline", pipeline))
    assert error.where == "rollout_matching.pipeline"
    assert "stage2_ab.pipeline" in error.do
    error = only_error(changed("stage2_ab", WARMUP["stage2_ab"], ALIGNED))
    assert error.where == "stage2_ab"
    assert "rollout_matching.pipeline" in error.do


@pytest.mark.req("CFG-02", "CFG-08")
def test_a_missing_pipeline_is_told_beside_other_faults() -> None:
    mapping = changed("training.lerning_rate", 1, without("stage2_ab.pipeline"))
    assert set(errors_of(mapping)) == {"stage2_ab.pipeline", "training.lerning_rate"}
    mapping = changed("training.lerning_rate", 1, without("rollout_matching.pipeline", ALIGNED))
    assert set(errors_of(mapping)) == {"rollout_matching.pipeline", "training.lerning_rate"}


@pytest.mark.req("CFG-08", "RES-02")
def test_a_module_that_channel_b_would_never_run_is_refused_where_it_runs_alone() -> None:
    where = "rollout_matching.pipeline.objective"
    mapping = changed(f"{where}.0.channels", ["A"], ALIGNED)
    assert only_error(mapping).where == f"{where}[0].channels"
    parse_config(changed(f"{where}.0.enabled", False, mapping))
    parse_config(changed(f"{where}.0.channels", ["A", "B"], ALIGNED))


# --- Channel A's iterations -------------------------------------------------------------


@pytest.mark.req("CHA-01", "CFG-02")
def test_channel_a_is_one_forward_unless_more_are_asked_for() -> None:
    section = parse_config(WARMUP).stage2_ab
    assert section is not None
    assert section.n_softctx_iter == 1
    assert (section.softctx_grad_mode, section.coord_ctx_embed_mode) == ("unroll", "st")


@pytest.mark.req("CHA-01", "CFG-02")
@pytest.mark.parametrize("grad_mode", ["unroll", "em_detach"])
@pytest.mark.parametrize("embed_mode", ["st", "soft", "hard"])
def test_every_way_of_feeding_coordinates_back_is_accepted(grad_mode: str, embed_mode: str) -> None:
    written = {
        "n_softctx_iter": 3,
        "softctx_grad_mode": grad_mode,
        "coord_ctx_embed_mode": embed_mode,
    }
    section = parse_config(merge(WARMUP, {"stage2_ab": written})).stage2_ab
    assert section is not None
    assert section.model_dump(include=set(written)) == written


@pytest.mark.req("CHA-01", "CFG-02")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_softctx_iter", 0),
        ("n_softctx_iter", 1.5),
        ("n_softctx_iter", None),
        ("softctx_grad_mode", "detach"),
        ("coord_ctx_embed_mode", "straight"),
    ],
)
def test_a_wrong_iteration_is_refused(key: str, value: Any) -> None:
    assert only_error(changed(f"stage2_ab.{key}", value)).where == f"stage2_ab.{key}"


# --- Asynchronous rollouts --------------------------------------------------------------


@pytest.mark.req("RES-07", "CFG-05", "ASYNC-01")
@pytest.mark.parametrize("base", BY_PIPELINE.values(), ids=list(BY_PIPELINE))
def test_asynchronous_rollouts_are_off_by_default(base: dict[str, Any]) -> None:
    bare = without(ASYNC, changed(ASYNC, {}, base))
    assert parse_config(bare).rollout_matching.async_rollout.model_dump() == {
        "enabled": False,
        "queue_limit": 8,
        "prefetch_target_packs": 2,
        "version_window": 2,
        "sync_every_steps": 1,
    }


def asynchronous(rollout: dict[str, Any], b_ratio: float = 0.5) -> dict[str, Any]:
    """The warm-up with asynchronous rollouts and these keys in place of its own."""
    bare = changed("stage2_ab.schedule.b_ratio", b_ratio, without("rollout_matching"))
    section = {"max_new_tokens": 64, "async_rollout": {"enabled": True}}
    return merge(bare, {"rollout_matching": {**section, **rollout}})


@pytest.mark.req("ASYNC-01", "RES-07")
def test_asynchronous_rollouts_come_from_servers_with_full_weights() -> None:
    server: dict[str, Any] = {"mode": "server", "server": SERVER}
    config = parse_config(asynchronous({"vllm": server}))
    assert config.rollout_matching.async_rollout.enabled
    for rollout in ({}, {"rollout_backend": "hf"}, {"rollout_backend": "hf", "vllm": server}):
        assert only_error(asynchronous(rollout)).where == f"{ASYNC}.enabled"
    for mode in ("auto", "adapter"):
        vllm = server | {"enable_lora": True, "sync": {"mode": mode}}
        mapping = asynchronous({"vllm": vllm})
        assert only_error(mapping).where == "rollout_matching.vllm.sync.mode"


@pytest.mark.req("ASYNC-01", "RES-07")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("queue_limit", 0),
        ("prefetch_target_packs", 0),
        ("prefetch_target_packs", 9),
        ("version_window", -1),
        ("sync_every_steps", 0),
        ("sync_every_step", 1),
    ],
)
def test_a_queue_that_cannot_work_is_refused(key: str, value: int) -> None:
    assert only_error(changed(f"{ASYNC}.{key}", value)).where == f"{ASYNC}.{key}"


@pytest.mark.req("ASYNC-01", "RES-07")
def test_what_would_never_train_on_an_asynchronous_rollout_is_refused() -> None:
    vllm = {"mode": "server", "server": SERVER}
    error = only_error(asynchronous({"vllm": vllm}, b_ratio=0))
    assert (error.where, "b_ratio is 0" in error.found) == (f"{ASYNC}.enabled", True)
    keys: dict[str, Any] = {"enabled": True, "version_window": 0}
    error = only_error(asynchronous({"vllm": vllm, "async_rollout": keys}))
    assert (error.where, error.found[:2]) == (f"{ASYNC}.version_window", "0,")
    parse_config(asynchronous({"vllm": vllm, "async_rollout": {**keys, "sync_every_steps": 2}}))


@pytest.mark.req("ASYNC-01")
def test_where_rollouts_may_be_late_channel_a_has_to_learn() -> None:
    error = only_error(changed(f"{ASYNC}.enabled", True, ALIGNED))
    assert error.where == f"{ASYNC}.enabled"
    assert "channel A" in error.found
    mapping = asynchronous({"vllm": {"mode": "server", "server": SERVER}}, b_ratio=1)
    parse_config(mapping)
    for index in range(len(WARMUP["stage2_ab"]["pipeline"]["objective"])):
        mapping = changed(f"stage2_ab.pipeline.objective.{index}.channels", ["B"], mapping)
    assert "channel A runs" in only_error(mapping).found


# --- What is valid ----------------------------------------------------------------------


@pytest.mark.req("RES-02", "CHA-01", "LOSS-06")
@pytest.mark.parametrize("path", list(BY_PIPELINE))
def test_both_variants_are_run_with_monitors_and_channel_a_with_iterations(path: str) -> None:
    mapping = changed(f"{path}.diagnostics", [COORD_DIAG], BY_PIPELINE[path])
    parse_config(mapping)
    if "stage2_ab" in mapping:
        mapping = changed("stage2_ab.n_softctx_iter", 2, mapping)
        parse_config(mapping)


@pytest.mark.req("RES-02", "DATA-01")
def test_polygons_are_samples_of_the_rollout_aligned_variant_alone(
    tmp_path: Path, toy_checkpoint: Path, toy_data: ToyData
) -> None:
    image = read_samples(toy_data.train_jsonl, allow_poly=False)[0].images[0]
    poly = {"desc": "roof", "poly": [0, 0, 9, 0, 9, 9]}
    record = {"images": [str(image)], "width": 64, "height": 64, "objects": [poly]}
    file = tmp_path / "poly.jsonl"
    file.write_text(json.dumps(record))
    places = {
        "model": {"model": str(toy_checkpoint)},
        "data": {"train_jsonl": str(file), "val_jsonl": None},
        "training": {"eval_strategy": "no"},
    }
    (sample,) = read_inputs(parse_config(merge(ALIGNED, places))).train
    assert sample.objects[0].shape.kind == "poly"
    with pytest.raises(ContractError) as caught:
        read_inputs(parse_config(merge(WARMUP, places)))
    assert str(file) in caught.value.where


def test_two_channels_with_every_key_of_matching_are_run() -> None:
    matching = ALIGNED["rollout_matching"]["matching"]
    assert {"ot_cost", "ot_epsilon", "ot_iters"} <= set(matching)
    parse_config(changed("rollout_matching.matching", matching))


# --- Unknown keys -----------------------------------------------------------------------


def everything(base: dict[str, Any]) -> dict[str, Any]:
    """Every key of a config, with entries in each of its lists."""
    mapping = parse_config(base).model_dump(mode="json")
    if mapping["stage2_ab"] is None:
        del mapping["stage2_ab"]
    else:
        del mapping["rollout_matching"]["pipeline"]
    lora = {"train_type": "lora", "lora_rank": 8, "lora_alpha": 16}
    pipeline = "stage2_ab" if "stage2_ab" in mapping else "rollout_matching"
    diagnostics = {"pipeline": {"diagnostics": [COORD_DIAG]}}
    return copy.deepcopy(merge(mapping, {"tuner": lora, pipeline: diagnostics}))


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
@pytest.mark.parametrize("base", BY_PIPELINE.values(), ids=list(BY_PIPELINE))
def test_every_unknown_key_of_every_section_is_told_at_once(base: dict[str, Any]) -> None:
    mapping = everything(base)
    parse_config(mapping)
    expected = dict(misspelt(mapping))
    assert len(expected) > 120
    assert "rollout_matching.vllm.server.servers[0].group_portx" in expected
    errors = errors_of(mapping)
    assert set(errors) == set(expected)
    for where, key in expected.items():
        assert errors[where].found == "unknown key"
        assert key in errors[where].do
