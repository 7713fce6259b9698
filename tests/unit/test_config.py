"""The training config: what is accepted, what is derived, and the defaults (CFG-05, CFG-07)."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.config import Config, merge, parse_config
from learner.config.load import EMPTY_SECTIONS
from learner.config.schema import resolved_sync_mode
from learner.training.input_checks import read_inputs
from learner.types import Sample
from tests.unit.config_faults import ALIGNED, WARMUP, changed
from tests.unit.refusals import refused

SERVER = WARMUP["rollout_matching"]["vllm"]["server"]
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
COORD_DIAG = {"name": "coord_diag", "enabled": True, "weight": 1, "channels": ["B"], "config": {}}


def with_training(**keys: Any) -> Config:
    return parse_config(merge(WARMUP, {"training": keys}))


def test_learning_rates_and_logging_dir_are_derived_when_null_or_left_out() -> None:
    null = {"vit_lr": None, "aligner_lr": None, "logging_dir": None}
    training = with_training(**null, learning_rate=3e-4).training
    assert (training.vit_lr, training.aligner_lr) == (3e-4, 3e-4)
    assert training.logging_dir == training.output_dir / "tensorboard"
    training = with_training(vit_lr=1e-5, aligner_lr=2e-5, logging_dir="/logs").training
    assert (training.vit_lr, training.aligner_lr) == (1e-5, 2e-5)
    assert training.logging_dir == Path("/logs")


# --- What is accepted -------------------------------------------------------------------

IN_SERVERS = {"mode": "server", "server": SERVER}
GUARD = {"enabled": True, "max_object_keys": 9, "min_new_tokens": 63}
BEAM = {"rollout_backend": "hf", "decode_mode": "beam", "num_beams": 4, "decode_batch_size": 4}
BOTH = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
LATE = {"enabled": True, "version_window": 0, "sync_every_steps": 2}


@pytest.mark.req("CFG-02", "CFG-05", "CFG-07", "CFG-08", "CHA-01", "LOSS-06", "REP-01", "ROLL-02")
@pytest.mark.req("ROLL-03", "LOGP-01", "ASYNC-01", "RES-07", "RES-15")
@pytest.mark.scenario("Extension bucket accepts minor residual keys")
@pytest.mark.parametrize(
    "keys",
    [
        {"rollout_matching": BEAM},
        {"rollout_matching": {"decode_mode": "sampling", "decoding": {"temperature": 1.0}}},
        {"rollout_matching": {"logprobs": True, "max_logprob_mismatch": 0.5}},
        {"rollout_matching": {"vllm": {"max_model_len": 65}}},
        {"rollout_matching": {"repeat_terminate": GUARD}},
        {"rollout_matching": {"repeat_terminate": {"ngram_size": 2, "ngram_repeats": 3}}},
        {"rollout_matching": {"offload": {"enabled": True, "offload_model": True}}},
        {"rollout_matching": {"offload": {"enabled": True}, "vllm": IN_SERVERS}},
        {"rollout_matching": {"vllm": IN_SERVERS, "async_rollout": LATE}} | BOTH,
        {"rollout_matching": {"matching": ALIGNED["rollout_matching"]["matching"]}},
        {"training": {"packing": False, "packing_drop_last": False}},
        {"training": {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}},
        {"training": {"eval_strategy": "steps", "eval_steps": 6, "max_steps": 6}},
        {"training": {"eval_strategy": "no", "eval_steps": 6, "max_steps": 5}},
        {"stage2_ab": {"n_softctx_iter": 3, "softctx_grad_mode": "em_detach"}},
        {"stage2_ab": {"n_softctx_iter": 3, "coord_ctx_embed_mode": "soft"}},
        {"stage2_ab": {"pipeline": {"diagnostics": [COORD_DIAG]}}},
        {"template": {"prompt": "Boxes such as <|coord_1|>, an image and a < b."}},
        {"custom": {"extra": {"some_minor_toggle": [1, {"a": None}]}}},
    ],
)
def test_a_combination_of_keys_is_accepted_as_written(keys: dict[str, Any]) -> None:
    base = changed("rollout_matching", {"max_new_tokens": 64})
    resolved = parse_config(merge(base, keys)).model_dump(mode="json")
    assert merge(resolved, keys) == resolved


# --- The backend and the weights that it gets -------------------------------------------


@pytest.mark.req("CFG-05", "ARCH-03")
@pytest.mark.parametrize(
    ("rollout", "backend"),
    [
        ({}, "colocate"),
        ({"vllm": IN_SERVERS}, "server"),
        ({"rollout_backend": "hf"}, "hf"),
        ({"rollout_backend": "hf", "vllm": IN_SERVERS}, "hf"),
    ],
)
@pytest.mark.scenario("Default behavior preserved (colocate)")
def test_the_backend_follows_from_the_config(rollout: dict[str, Any], backend: str) -> None:
    config = parse_config(changed("rollout_matching", {"max_new_tokens": 64, **rollout}))
    assert config.rollout_matching.backend == backend


@pytest.mark.req("SYNC-01", "RES-04")
@pytest.mark.scenario("Non-full sync mode fails fast under multi-process learner")
@pytest.mark.parametrize(
    ("mode", "enable_lora", "tuner", "resolved"),
    [
        ("full", True, LORA, "full"),
        ("auto", False, LORA, "full"),
        ("auto", True, LORA, "adapter"),
        ("adapter", True, LORA, "adapter"),
    ],
)
def test_adapters_are_pushed_where_they_are_served_and_trained_by_one_process(
    mode: str, enable_lora: bool, tuner: dict[str, Any], resolved: str
) -> None:
    vllm = {"enable_lora": enable_lora, "sync": {"mode": mode}}
    config = parse_config(merge(WARMUP, {"rollout_matching": {"vllm": vllm}, "tuner": tuner}))
    assert resolved_sync_mode(config, learner_world_size=1) == resolved
    if resolved == "full":
        assert resolved_sync_mode(config, learner_world_size=2) == "full"
    else:
        with refused("rollout_matching.vllm.sync.mode", "2 learner processes"):
            resolved_sync_mode(config, learner_world_size=2)


@pytest.mark.req("CFG-06")
@pytest.mark.parametrize(("written", "timeout"), [(30, 30.0), (0, None), (-1, None), (None, None)])
def test_an_infer_timeout_that_is_not_positive_is_none(
    written: float | None, timeout: float | None
) -> None:
    config = parse_config(changed("rollout_matching.vllm.server.infer_timeout_s", written))
    server = config.rollout_matching.vllm.server
    assert server is not None
    assert server.infer_timeout_s == timeout


# --- Batches ----------------------------------------------------------------------------


@pytest.mark.req("CFG-07")
def test_accumulation_follows_from_the_batch_and_the_number_of_processes() -> None:
    batch = {"effective_batch_size": 12, "per_device_train_batch_size": 2}
    training = with_training(**batch).training
    assert [training.resolve_accumulation(world_size) for world_size in (1, 2, 3)] == [6, 3, 2]
    with refused("training.effective_batch_size", do="8 or 16"):
        training.resolve_accumulation(4)
    given = with_training(**batch, gradient_accumulation_steps=3).training
    assert given.resolve_accumulation(2) == 3
    with refused("training.gradient_accumulation_steps", do="6"):
        given.resolve_accumulation(1)


@pytest.mark.req("CFG-07", "CFG-05")
@pytest.mark.scenario(
    "Rollout batching ignores eval per-device mismatch",
    "Eval per-device knobs do not override rollout decode batching",
)
def test_the_eval_batch_size_leaves_rollout_batching_alone() -> None:
    one, other = (with_training(per_device_eval_batch_size=size) for size in (1, 16))
    assert one.rollout_matching == other.rollout_matching


# --- The schedule -----------------------------------------------------------------------


@pytest.mark.req("CFG-02", "STEP-01")
@given(st.integers(0, 10**15).map(lambda digits: digits / 10**15) | st.floats(0, 1))
@example(0.3333333333333333)
@example(5e-324)
@example(2.2250738585072014e-308)
def test_b_ratio_is_the_decimal_that_was_written(share: float) -> None:
    for value in (share, repr(share)):
        config = parse_config(changed("stage2_ab.schedule.b_ratio", value))
        assert config.b_ratio == Decimal(repr(share))
        assert parse_config(config.model_dump(mode="json")).b_ratio == config.b_ratio


@pytest.mark.req("RES-30", "CFG-02")
@pytest.mark.parametrize("value", [None, {}])
def test_sections_without_keys_may_be_null_or_empty(value: dict[str, Any] | None) -> None:
    assert not EMPTY_SECTIONS.keys() & WARMUP.keys()
    assert parse_config(WARMUP | dict.fromkeys(EMPTY_SECTIONS, value)) == parse_config(WARMUP)


# --- Variants ---------------------------------------------------------------------------


@pytest.mark.req("RES-02", "RES-10", "CFG-01", "CFG-08")
@pytest.mark.scenario("Rollout-matching enabled via trainer_variant")
def test_a_variant_has_its_pipeline_its_channels_and_its_shapes() -> None:
    two = parse_config(changed("stage2_ab.schedule.b_ratio", 0.3))
    assert (two.pipeline_path, two.b_ratio, two.allow_poly) == (
        "stage2_ab.pipeline",
        Decimal("0.3"),
        False,
    )
    aligned = parse_config(ALIGNED)
    assert aligned.custom.trainer_variant == "stage2_rollout_aligned"
    assert aligned.pipeline is aligned.rollout_matching.pipeline
    assert (aligned.b_ratio, aligned.allow_poly) == (Decimal(1), True)


@pytest.mark.req("RES-02", "DATA-01")
@pytest.mark.scenario("GT poly fails fast")
def test_polygons_are_samples_of_the_rollout_aligned_variant_alone(
    tmp_path: Path, toy_checkpoint: Path, scenes: list[Sample]
) -> None:
    image = scenes[0].images[0]
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
    with refused(f"{file}:1"):
        read_inputs(parse_config(merge(WARMUP, places)))


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(
    ("text", "path"),
    [("~/here/x", "HOME/here/x"), ("here/x", "CWD/here/x"), ("/data/a$b~", "/data/a$b~")],
)
def test_a_path_starts_at_the_working_or_the_home_folder(
    text: str, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "HOME"))
    (tmp_path / "CWD").mkdir()
    monkeypatch.chdir(tmp_path / "CWD")
    assert parse_config(changed("data.train_jsonl", text)).data.train_jsonl == tmp_path / path
