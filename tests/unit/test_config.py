"""The training config: what is accepted, how faults are told, what comes out."""

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import Config, merge, parse_config
from learner.config.schema import ScheduleConfig
from learner.rollout.distribution import rank_caps, rank_chunk_size
from shared_contracts import rollout_config
from shared_contracts.errors import ContractError
from tests.unit.config_faults import WARMUP, changed, errors_of, only_error, without

ROOT = Path(__file__).parents[2]
BARE = {key: section for key, section in WARMUP.items() if key != "rollout_matching"}
ENTRY = "stage2_ab.pipeline.objective"


# --- Unknown keys -----------------------------------------------------------------------


@pytest.mark.req("CFG-02")
@pytest.mark.scenario(
    "Unknown stage2_ab keys fail fast",
    "Unknown top-level section key fails fast",
    "Unknown key inside covered section fails fast",
    "Unknown nested rollout key fails at schema load",
    "Unknown rollout key fails before rollout trainer execution",
    "Unknown nested decoding key fails before execution",
)
@pytest.mark.parametrize(
    ("dotted", "where", "nearest"),
    [
        ("modle", "modle", "model"),
        ("custom.unknown_knob", "custom.unknown_knob", None),
        ("training.lerning_rate", "training.lerning_rate", "learning_rate"),
        ("rollouts", "rollouts", None),
        ("stage2_ab.n_softctx_iters", "stage2_ab.n_softctx_iters", "n_softctx_iter"),
        ("stage2_ab.schedule.b_ratoi", "stage2_ab.schedule.b_ratoi", "b_ratio"),
        ("rollout_matching.unknown_rollout_key", "rollout_matching.unknown_rollout_key", None),
        ("rollout_matching.decoding.temprature", "rollout_matching.decoding.temprature",
         "temperature"),
        ("rollout_matching.vllm.server.servers.0.unknown_flag",
         "rollout_matching.vllm.server.servers[0].unknown_flag", None),
        (f"{ENTRY}.1.config.ciou_wieght", f"{ENTRY}[1].config.ciou_wieght", "ciou_weight"),
        (f"{ENTRY}.2.chanels", f"{ENTRY}[2].chanels", "channels"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_full_path_and_the_nearest_known_name(
    dotted: str, where: str, nearest: str | None
) -> None:
    error = only_error(changed(dotted, 1))
    assert error.where == where
    assert error.found == "unknown key"
    assert nearest is None or f"'{nearest}'" in error.do


@pytest.mark.req("CFG-02")
def test_all_faults_of_all_sections_are_told_at_once() -> None:
    mapping = merge(
        WARMUP,
        {
            "modle": {},
            "model": {"modle": 1, "torch_dtype": "float16"},
            "training": {"learning_rate": "fast", "max_step": 3},
            "rollout_matching": {"vllm": {"mode": "colocated", "sync": {"bucket_mib": 0}}},
        },
    )
    assert set(errors_of(mapping)) == {
        "modle",
        "model.modle",
        "model.torch_dtype",
        "training.learning_rate",
        "training.max_step",
        "rollout_matching.vllm.mode",
        "rollout_matching.vllm.sync.bucket_mib",
    }


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("section", ["quantization", "rlhf", "debug", "experiment", "deepspeed"])
def test_a_section_without_keys_may_be_empty_or_null_and_refuses_any_key(section: str) -> None:
    assert parse_config(changed(section, None)) == parse_config(changed(section, {}))
    assert only_error(changed(f"{section}.anything", 1)).where == f"{section}.anything"


@pytest.mark.req("CFG-02", "CFG-03")
@pytest.mark.scenario("Top-level extra presence fails fast")
@pytest.mark.parametrize("value", [{}, None, {"some_key": 1}])
def test_top_level_extra_is_refused_even_when_empty(value: Any) -> None:
    error = only_error(changed("extra", value))
    assert error.where == "extra"
    assert "custom.extra" in error.do


@pytest.mark.req("CFG-02")
@pytest.mark.scenario("Extension bucket accepts minor residual keys")
def test_custom_extra_is_free() -> None:
    config = parse_config(changed("custom.extra.some_minor_toggle", [1, {"a": None}]))
    assert config.custom.extra == {"some_minor_toggle": [1, {"a": None}]}


@pytest.mark.req("CFG-02", "STEP-01", "CFG-05")
@pytest.mark.scenario(
    "Missing b_ratio fails fast",
    "Missing top-level rollout_matching still fails for stage2_two_channel",
)
@pytest.mark.parametrize(
    "dotted",
    [
        "model.model",
        "template.prompt",
        "data.train_jsonl",
        "training.run_name",
        "training.output_dir",
        "training.learning_rate",
        "training.effective_batch_size",
        "custom.trainer_variant",
        "global_max_length",
        "stage2_ab",
        "stage2_ab.schedule.b_ratio",
        "stage2_ab.pipeline",
        "rollout_matching",
        "rollout_matching.max_new_tokens",
        "rollout_matching.vllm.server.servers",
    ],
)
def test_a_required_key_has_no_default(dotted: str) -> None:
    error = only_error(without(dotted))
    assert error.where == dotted
    assert "missing" in error.found


# --- Types ------------------------------------------------------------------------------


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("training.learning_rate", "0.1"),
        ("training.learning_rate", float("nan")),
        ("training.learning_rate", float("inf")),
        ("training.max_steps", True),
        ("training.max_steps", 1.0),
        ("training.max_steps", -1),
        ("training.run_name", " "),
        ("training.seed", 2**32),
        ("training.lr_scheduler_type", "cosine_with_min_lr"),
        ("training.eval_strategy", False),
        ("training.packing", 1),
        ("data.train_jsonl", ""),
        ("data.val_jsonl", 3),
        ("model", "runs/model"),
        ("training", None),
        ("global_max_length", "2048"),
        ("rollout_matching.vllm.server.servers", []),
        ("rollout_matching.vllm.server.servers", {"base_url": "http://a", "group_port": 1}),
        ("rollout_matching.vllm.server.timeout_s", 0),
        ("rollout_matching.decoding.top_k", 0),
        ("rollout_matching.decoding.top_p", 0),
        ("rollout_matching.matching.maskiou_gate", 1.1),
        ("rollout_matching.matching.ot_cost", "linf"),
        ("rollout_matching.matching.ot_epsilon", 0),
        ("rollout_matching.matching.ot_iters", 0),
        ("stage2_ab.pipeline.objective", []),
    ],
)
def test_a_wrong_value_is_one_error_at_its_path(dotted: str, value: Any) -> None:
    assert only_error(changed(dotted, value)).where == dotted


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("key", ["base_url", "group_port"])
def test_a_server_states_its_address_and_its_group_port(key: str) -> None:
    where = f"rollout_matching.vllm.server.servers.0.{key}"
    assert only_error(without(where)).where == where.replace(".0.", "[0].")


@pytest.mark.req("CFG-02", "RES-03")
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h/?a=1"])
def test_a_base_url_is_an_http_address(url: str) -> None:
    error = only_error(changed("rollout_matching.vllm.server.servers.0.base_url", url))
    assert error.where == "rollout_matching.vllm.server.servers[0].base_url"
    assert url in error.found


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("url", ["http://[::1]:8000", "http://[fe80::1%25eth0]"])
def test_a_base_url_is_no_ipv6_address(url: str) -> None:
    error = only_error(changed("rollout_matching.vllm.server.servers.0.base_url", url))
    assert error.where == "rollout_matching.vllm.server.servers[0].base_url"
    assert url in error.found
    assert "over IPv4" in error.found


def test_a_base_url_loses_its_trailing_slash() -> None:
    config = parse_config(
        changed("rollout_matching.vllm.server.servers.0.base_url", "http://host:8000/prefix/")
    )
    assert server_of(config).servers[0].base_url == "http://host:8000/prefix"


@pytest.mark.parametrize(
    "second",
    [
        {"base_url": "http://127.0.0.1:8000/", "group_port": 6000},
        {"base_url": "http://127.0.0.1:8001", "group_port": 51216},
    ],
)
def test_two_servers_share_neither_an_address_nor_a_port(second: dict[str, Any]) -> None:
    servers = [*WARMUP["rollout_matching"]["vllm"]["server"]["servers"], second]
    error = only_error(changed("rollout_matching.vllm.server.servers", servers))
    assert error.where == "rollout_matching.vllm.server.servers"


@pytest.mark.req("REP-01", "CFG-05")
def test_the_repeat_guard_is_off_until_it_is_configured() -> None:
    guard = parse_config(WARMUP).rollout_matching.repeat_terminate
    assert guard.model_dump() == {
        "enabled": False,
        "min_new_tokens": 0,
        "max_consecutive_token_repeats": 0,
        "ngram_size": 0,
        "ngram_repeats": 0,
        "max_object_keys": None,
        "answer_format": "object_keys",
    }


@pytest.mark.req("REP-01", "CFG-02")
@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"max_object_key": 3}, "max_object_key"),
        ({"enabled": True, "ngram_size": 2, "ngram_repeats": 1}, "ngram_repeats"),
        ({"enabled": "yes"}, "enabled"),
        ({"enabled": True}, "enabled"),
        ({"enabled": True, "min_new_tokens": 64, "ngram_repeats": 2}, "enabled"),
        ({"enabled": True, "max_consecutive_token_repeats": 0}, "enabled"),
    ],
)
def test_a_wrong_or_idle_repeat_guard_is_refused(written: dict[str, Any], key: str) -> None:
    error = only_error(changed("rollout_matching.repeat_terminate", written))
    assert error.where == f"rollout_matching.repeat_terminate.{key}"


@pytest.mark.req("REP-01")
@pytest.mark.parametrize(
    "switched_on",
    [
        {"max_consecutive_token_repeats": 4},
        {"ngram_size": 2, "ngram_repeats": 3},
        {"max_object_keys": 1},
    ],
)
def test_any_one_trigger_is_enough_for_a_repeat_guard(switched_on: dict[str, int]) -> None:
    written = {"enabled": True, **switched_on}
    config = parse_config(changed("rollout_matching.repeat_terminate", written))
    guard = config.rollout_matching.repeat_terminate
    assert guard.model_dump(include=set(written)) == written


@pytest.mark.req("CFG-05", "RES-07")
@pytest.mark.scenario("Default behavior preserved (colocate)")
def test_rollout_defaults_are_those_of_the_contract() -> None:
    rollout = parse_config(
        merge(BARE, {"rollout_matching": {"max_new_tokens": 64}})
    ).rollout_matching
    assert (rollout.rollout_backend, rollout.vllm.mode) == ("vllm", "colocate")
    assert (rollout.decode_batch_size, rollout.repetition_penalty) == (1, 1.0)
    assert (rollout.decode_mode, rollout.num_beams) == ("greedy", None)
    decoding, matching, vllm = rollout.decoding, rollout.matching, rollout.vllm
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (0.0, 1.0, -1)
    assert (vllm.max_model_len, vllm.enable_lora, vllm.enable_prefix_caching) == (None, False, True)
    assert (vllm.sync.mode, vllm.sync.fallback_to_full) == ("full", True)
    assert (vllm.sync.transport, vllm.sync.verify, vllm.sync.bucket_mib) == ("auto", "sample", None)
    assert not any(rollout.offload.model_dump().values())
    assert (matching.candidate_top_k, matching.maskiou_gate) == (10, 0.3)
    assert (matching.maskiou_resolution, matching.fp_cost, matching.fn_cost) == (256, 1.0, 1.0)
    assert (matching.ot_cost, matching.ot_epsilon, matching.ot_iters) == ("l2", 0.5, 30)
    assert rollout.pipeline is None


@pytest.mark.req("CFG-05")
def test_server_defaults_are_those_of_the_contract() -> None:
    servers = [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]
    section = {"max_new_tokens": 64, "vllm": {"mode": "server", "server": {"servers": servers}}}
    server = server_of(parse_config(merge(BARE, {"rollout_matching": section})))
    assert (server.timeout_s, server.infer_timeout_s) == (240.0, None)


def server_of(config: Config) -> rollout_config.ServerConfig:
    server = config.rollout_matching.vllm.server
    assert server is not None
    return server


@pytest.mark.req("CFG-06")
@pytest.mark.parametrize(
    ("written", "timeout"), [(12.5, 12.5), (30, 30.0), (0, None), (-1, None), (None, None)]
)
def test_an_infer_timeout_that_is_not_positive_is_none(
    written: float | None, timeout: float | None
) -> None:
    config = parse_config(changed("rollout_matching.vllm.server.infer_timeout_s", written))
    assert server_of(config).infer_timeout_s == timeout


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(("mode", "temperature"), [("greedy", 0.7), ("sampling", 0.0)])
def test_decode_mode_and_temperature_agree(mode: str, temperature: float) -> None:
    mapping = merge(
        WARMUP,
        {"rollout_matching": {"decode_mode": mode, "decoding": {"temperature": temperature}}},
    )
    assert only_error(mapping).where == "rollout_matching.decoding.temperature"


@pytest.mark.req("CFG-05")
def test_sampling_with_a_temperature_is_accepted() -> None:
    mapping = merge(
        WARMUP, {"rollout_matching": {"decode_mode": "sampling", "decoding": {"temperature": 1}}}
    )
    assert parse_config(mapping).rollout_matching.decoding.temperature == 1.0


def test_a_relative_path_starts_at_the_current_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(changed("model.model", "toy/model"))
    assert config.model.model == tmp_path / "toy/model"
    assert parse_config(changed("model.model", "/abs/model")).model.model == Path("/abs/model")


def test_lora_keys_belong_to_lora() -> None:
    full = changed("tuner", {"lora_rank": 8})
    assert only_error(full).where == "tuner.lora_rank"
    assert "lora" in only_error(full).found
    errors = errors_of(changed("tuner", {"train_type": "lora", "lora_rank": 8}))
    assert set(errors) == {"tuner.lora_alpha"}
    lora = {"train_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    tuner = parse_config(changed("tuner", lora)).tuner
    assert tuner.train_type == "lora"
    assert tuner.target_modules == ["q_proj"]


def test_bad_target_modules_are_one_error() -> None:
    lora = {"train_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": "all"}
    assert only_error(changed("tuner", lora)).where == "tuner.target_modules"


def test_an_unknown_tuner_names_the_known_ones() -> None:
    error = only_error(changed("tuner.train_type", "qlora"))
    assert error.where == "tuner.train_type"
    assert "full" in error.do
    assert "lora" in error.do


@pytest.mark.parametrize("value", [[], "x"])
def test_a_section_that_is_no_mapping_is_one_error(value: Any) -> None:
    assert only_error(changed("tuner", value)).where == "tuner"
    assert "mapping" in only_error(changed("stage2_ab", value)).found


# --- training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [{"max_steps": None}, {"max_steps": 5, "num_train_epochs": 1}], ids=["none", "both"]
)
def test_exactly_one_of_steps_and_epochs_is_given(steps: dict[str, Any]) -> None:
    assert only_error(merge(WARMUP, {"training": steps})).where == "training.max_steps"


def test_learning_rates_and_logging_dir_are_derived_when_null_or_left_out() -> None:
    derived = {"vit_lr": None, "aligner_lr": None, "logging_dir": None, "learning_rate": 3e-4}
    training = parse_config(merge(WARMUP, {"training": derived})).training
    assert (training.vit_lr, training.aligner_lr) == (3e-4, 3e-4)
    assert training.logging_dir == training.output_dir / "tensorboard"
    given = {"vit_lr": 1e-5, "aligner_lr": 2e-5, "logging_dir": "/logs"}
    training = parse_config(merge(WARMUP, {"training": given})).training
    assert (training.vit_lr, training.aligner_lr) == (1e-5, 2e-5)
    assert training.logging_dir == Path("/logs")


@pytest.mark.req("CFG-07")
def test_effective_batch_size_is_divisible_by_the_micro_batch_of_all_processes() -> None:
    batch = {"effective_batch_size": 12, "per_device_train_batch_size": 2}
    training = parse_config(merge(WARMUP, {"training": batch})).training
    assert [training.resolve_accumulation(world_size) for world_size in (1, 2, 3)] == [6, 3, 2]
    with pytest.raises(ContractError) as caught:
        training.resolve_accumulation(4)
    assert caught.value.where == "training.effective_batch_size"
    assert "8 or 16" in caught.value.do


@pytest.mark.req("CFG-07")
def test_an_indivisible_micro_batch_fails_at_load() -> None:
    batch = {"effective_batch_size": 3, "per_device_train_batch_size": 2}
    error = only_error(merge(WARMUP, {"training": batch}))
    assert error.where == "training.effective_batch_size"


@pytest.mark.req("CFG-07")
def test_given_accumulation_steps_must_equal_the_derived_ones() -> None:
    batch = {"effective_batch_size": 8, "gradient_accumulation_steps": 4}
    training = parse_config(merge(WARMUP, {"training": batch})).training
    assert training.resolve_accumulation(2) == 4
    with pytest.raises(ContractError) as caught:
        training.resolve_accumulation(1)
    assert caught.value.where == "training.gradient_accumulation_steps"
    assert "8" in caught.value.do


@pytest.mark.req("CFG-07")
def test_accumulation_steps_that_fit_no_number_of_processes_fail_at_load() -> None:
    batch = {"effective_batch_size": 12, "per_device_train_batch_size": 2}
    for steps in (1, 2, 3, 6):
        parse_config(merge(WARMUP, {"training": {**batch, "gradient_accumulation_steps": steps}}))
    for steps in (4, 5, 12):
        training = {**batch, "gradient_accumulation_steps": steps}
        error = only_error(merge(WARMUP, {"training": training}))
        assert error.where == "training.gradient_accumulation_steps"


@pytest.mark.req("CFG-07")
def test_packing_drops_the_last() -> None:
    error = only_error(changed("training.packing_drop_last", False))
    assert error.where == "training.packing_drop_last"
    unpacked = {"packing": False, "packing_drop_last": False}
    assert not parse_config(merge(WARMUP, {"training": unpacked})).training.packing


@pytest.mark.req("CFG-07", "CFG-05")
@pytest.mark.scenario(
    "Rollout batching ignores eval per-device mismatch",
    "Eval per-device knobs do not override rollout decode batching",
)
def test_the_eval_batch_size_leaves_rollout_batching_alone() -> None:
    rollouts = [
        parse_config(
            merge(
                WARMUP,
                {
                    "training": {"per_device_eval_batch_size": per_device},
                    "rollout_matching": {"decode_batch_size": 4},
                },
            )
        ).rollout_matching
        for per_device in (1, 16)
    ]
    assert rollouts[0] == rollouts[1]
    assert rank_chunk_size(rollouts[0].decode_batch_size, [1], 1) == 4
    assert rank_caps(rollouts[0].decode_batch_size, [1], 1, rank=0) == [4]


def test_a_warm_up_needs_a_schedule_that_has_one() -> None:
    constant = {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}
    error = only_error(merge(WARMUP, {"training": constant}))
    assert error.where == "training.warmup_ratio"
    assert "constant_with_warmup" in error.do
    for allowed in ({"warmup_ratio": 0.0}, {"lr_scheduler_type": "constant_with_warmup"}):
        parse_config(merge(WARMUP, {"training": constant | allowed}))


def test_an_evaluation_comes_before_the_run_ends() -> None:
    steps = {"eval_strategy": "steps", "eval_steps": 6, "max_steps": 5}
    assert only_error(merge(WARMUP, {"training": steps})).where == "training.eval_steps"
    parse_config(merge(WARMUP, {"training": steps | {"max_steps": 6}}))
    parse_config(merge(WARMUP, {"training": steps | {"eval_strategy": "no"}}))


def test_faults_of_training_that_depend_on_each_other_are_told_at_once() -> None:
    training = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 3,
        "packing_drop_last": False,
        "eval_strategy": "steps",
    }
    assert list(errors_of(merge(WARMUP, {"training": training}))) == [
        "training.max_steps",
        "training.eval_steps",
        "training.effective_batch_size",
        "training.packing_drop_last",
    ]


def test_an_evaluation_needs_steps_and_data() -> None:
    assert only_error(changed("training.eval_strategy", "steps")).where == "training.eval_steps"
    steps = {"training": {"eval_strategy": "steps", "eval_steps": 5}, "data": {"val_jsonl": None}}
    assert only_error(merge(WARMUP, steps)).where == "data.val_jsonl"


def test_an_answer_leaves_room_for_its_prompt() -> None:
    error = only_error(changed("rollout_matching.max_new_tokens", WARMUP["global_max_length"]))
    assert error.where == "rollout_matching.max_new_tokens"


# --- stage2_ab --------------------------------------------------------------------------


@pytest.mark.req("CFG-02")
@given(st.integers(0, 10**15))
def test_b_ratio_is_the_decimal_that_was_written(digits: int) -> None:
    written = Decimal(digits).scaleb(-15)
    for value in (float(written), str(written)):
        config = parse_config(changed("stage2_ab.schedule.b_ratio", value))
        assert config.b_ratio == written


def test_a_b_ratio_a_float_cannot_hold_is_written_in_quotes() -> None:
    where = "stage2_ab.schedule.b_ratio"
    assert only_error(changed(where, 1 / 3)).where == where
    config = parse_config(changed(where, "0.3333333333333333333333"))
    assert config.b_ratio == Decimal("0.3333333333333333333333")


@pytest.mark.parametrize("value", ["1e-99999999", "0e-99999999", "1e-31", 1e-300, "1e99999999"])
def test_a_b_ratio_is_written_in_few_places(value: str | float) -> None:
    where = "stage2_ab.schedule.b_ratio"
    error = only_error(changed(where, value))
    assert (error.where, "30 places" in error.found) == (where, True)


@given(st.integers(0, 10**30), st.integers(0, 30), st.integers(0, 5))
def test_a_b_ratio_is_dumped_as_it_was_written(digits: int, places: int, zeros: int) -> None:
    share = Decimal(f"{min(digits, 10**places)}E-{places}")
    text = f"{share:f}{'0' * min(zeros, 30 - places) if places else ''}"
    dumped = ScheduleConfig.model_validate({"b_ratio": text}).model_dump()
    assert ScheduleConfig.model_validate(dumped).b_ratio == share


@pytest.mark.parametrize("value", [-0.1, 1.1, "half", True, None, float("nan"), [0.5]])
def test_b_ratio_is_a_number_from_0_to_1(value: Any) -> None:
    assert only_error(changed("stage2_ab.schedule.b_ratio", value)).where.endswith("b_ratio")


# --- What the config is to others -------------------------------------------------------


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(WARMUP)
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 1


@pytest.mark.req("CFG-09")
def test_the_server_reads_the_same_types_as_the_learner() -> None:
    config = parse_config(WARMUP)
    assert type(config.rollout_matching.vllm) is rollout_config.VllmConfig
    assert isinstance(config.rollout_matching, rollout_config.SharedRolloutConfig)


def test_loading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, learner.config\n"
        f"learner.config.load_config({str(ROOT / 'configs/demo/warmup.yaml')!r})\n"
        "print({'torch', 'transformers', 'fastapi', 'vllm', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_reference_page_is_up_to_date() -> None:
    script = ROOT / "scripts/config_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--chekc", 2), ("more", 2)])
def test_the_reference_page_is_written_on_request_alone(word: str, code: int) -> None:
    script, page = ROOT / "scripts/config_reference.py", ROOT / "docs/config.md"
    before = page.stat().st_mtime_ns
    done = subprocess.run([sys.executable, script, word], capture_output=True, text=True)
    assert (done.returncode, page.stat().st_mtime_ns) == (code, before)
    assert "usage:" in done.stdout + done.stderr
