"""Which backend a config asks for, and the combinations that cannot work (CFG-05, SYNC-01)."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import resolved_sync_mode
from shared_contracts.errors import ContractError, ContractErrors

WARMUP = load_mapping(Path(__file__).parents[2] / "configs/demo/warmup.yaml")
SERVER = WARMUP["rollout_matching"]["vllm"]["server"]
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
VLLM = "rollout_matching.vllm"


def mapping(rollout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The warm-up with another `rollout_matching`."""
    bare = {key: section for key, section in WARMUP.items() if key != "rollout_matching"}
    return merge(bare, {"rollout_matching": {"max_new_tokens": 64, **rollout}, **sections})


def only_error(rollout: dict[str, Any], **sections: Any) -> ContractError:
    with pytest.raises(ContractErrors) as caught:
        parse_config(mapping(rollout, **sections))
    (error,) = caught.value.errors
    return error


@pytest.mark.req("CFG-05", "ARCH-03")
@pytest.mark.parametrize(
    ("rollout", "backend"),
    [
        ({}, "colocate"),
        ({"vllm": {"mode": "colocate", "tensor_parallel_size": 2}}, "colocate"),
        ({"vllm": {"mode": "server", "server": SERVER}}, "server"),
        ({"rollout_backend": "hf"}, "hf"),
        ({"rollout_backend": "hf", "vllm": {"mode": "server", "server": SERVER}}, "hf"),
    ],
)
def test_a_config_says_who_generates(rollout: dict[str, Any], backend: str) -> None:
    assert parse_config(mapping(rollout)).rollout_matching.backend == backend


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("rollout", "where", "do"),
    [
        ({"vllm": {"mode": "server"}}, f"{VLLM}.server", "Name the rollout servers"),
        ({"vllm": {"server": SERVER}}, f"{VLLM}.server", "vllm.mode to server"),
        (
            {"vllm": {"mode": "server", "server": SERVER, "gpu_memory_utilization": 0.5}},
            f"{VLLM}.gpu_memory_utilization",
            "--gpu-memory-utilization",
        ),
        (
            {"vllm": {"mode": "server", "server": SERVER, "tensor_parallel_size": 2}},
            f"{VLLM}.tensor_parallel_size",
            "--tensor-parallel-size",
        ),
        ({"vllm": {"gpu_memory_utilization": 1.1}}, f"{VLLM}.gpu_memory_utilization", "less"),
        ({"vllm": {"tensor_parallel_size": 0}}, f"{VLLM}.tensor_parallel_size", "greater"),
        ({"vllm": {"sync": {"verify": "some"}}}, f"{VLLM}.sync.verify", "sample"),
        ({"vllm": {"sync": {"transport": "nccl"}}}, f"{VLLM}.sync.transport", "ipc or gloo"),
        (
            {"vllm": {"mode": "server", "server": SERVER, "sync": {"transport": "ipc"}}},
            f"{VLLM}.sync.transport",
            "gloo or nccl",
        ),
    ],
)
def test_keys_that_do_not_fit_the_mode_are_refused(
    rollout: dict[str, Any], where: str, do: str
) -> None:
    error = only_error(rollout)
    assert error.where == where
    assert do in error.do


@pytest.mark.req("CFG-05", "LOGP-01")
def test_a_backend_without_log_probabilities_is_refused_by_name() -> None:
    error = only_error({"rollout_backend": "hf", "logprobs": True})
    assert error.where == "rollout_matching.logprobs"
    assert "hf gives none" in error.found


@pytest.mark.req("CFG-05", "LOGP-01")
def test_a_bound_of_what_nobody_compares_is_refused() -> None:
    error = only_error({"max_logprob_mismatch": 0.5})
    assert error.where == "rollout_matching.max_logprob_mismatch"
    assert error.found == "0.5, and logprobs is false: nothing is compared"
    assert "rollout_matching.logprobs to true" in error.do
    bounded = parse_config(mapping({"logprobs": True, "max_logprob_mismatch": 0.5}))
    assert bounded.rollout_matching.max_logprob_mismatch == 0.5
    assert parse_config(mapping({})).rollout_matching.max_logprob_mismatch is None


@pytest.mark.req("CFG-05", "LOGP-01")
@pytest.mark.parametrize("bound", [0.0, -1.0])
def test_a_bound_that_every_step_exceeds_is_refused(bound: float) -> None:
    error = only_error({"logprobs": True, "max_logprob_mismatch": bound})
    assert error.where == "rollout_matching.max_logprob_mismatch"


@pytest.mark.req("CFG-05", "ROLL-02")
@pytest.mark.parametrize(
    ("rollout", "where"),
    [
        ({"decode_mode": "beam", "num_beams": 4, "decode_batch_size": 4}, "decode_mode"),
        ({"rollout_backend": "hf", "decode_mode": "beam"}, "num_beams"),
        ({"rollout_backend": "hf", "num_beams": 4}, "num_beams"),
        ({"rollout_backend": "hf", "decode_mode": "beam", "num_beams": 1}, "num_beams"),
        (
            {
                "rollout_backend": "hf",
                "decode_mode": "beam",
                "num_beams": 4,
                "decode_batch_size": 4,
                "decoding": {"temperature": 0.5},
            },
            "decoding.temperature",
        ),
        (
            {
                "rollout_backend": "hf",
                "decode_mode": "beam",
                "num_beams": 4,
                "decode_batch_size": 4,
                "eval_detection": {"greedy": True},
            },
            "eval_detection.greedy",
        ),
    ],
)
def test_a_beam_search_states_its_beams_and_needs_hf(rollout: dict[str, Any], where: str) -> None:
    assert only_error(rollout).where == f"rollout_matching.{where}"


@pytest.mark.req("CFG-05", "ROLL-02")
def test_hf_searches_beams() -> None:
    asked = {
        "rollout_backend": "hf",
        "decode_mode": "beam",
        "num_beams": 4,
        "decode_batch_size": 4,
    }
    assert parse_config(mapping(asked)).rollout_matching.num_beams == 4


@pytest.mark.req("CFG-05", "ROLL-02")
def test_the_beams_of_one_answer_fit_into_a_batch() -> None:
    beam = {"rollout_backend": "hf", "decode_mode": "beam", "num_beams": 4}
    error = only_error({**beam, "decode_batch_size": 3})
    assert error.where == "rollout_matching.num_beams"
    assert "4 beams" in error.found
    assert "decode_batch_size is 3" in error.found
    assert "rollout_matching.decode_batch_size" in error.do


@pytest.mark.req("CFG-05")
def test_faults_of_the_section_that_depend_on_each_other_are_told_at_once() -> None:
    with pytest.raises(ContractErrors) as caught:
        parse_config(
            mapping(
                {
                    "decode_mode": "beam",
                    "num_beams": 4,
                    "decoding": {"temperature": 0.5},
                    "vllm": {"max_model_len": 64},
                }
            )
        )
    assert [error.where.removeprefix("rollout_matching.") for error in caught.value.errors] == [
        "decoding.temperature",
        "decode_mode",
        "num_beams",
        "vllm.max_model_len",
    ]


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_there_is_room_for_a_prompt_before_the_longest_answer(backend: str) -> None:
    error = only_error({"rollout_backend": backend, "vllm": {"max_model_len": 64}})
    assert error.where == f"{VLLM}.max_model_len"
    assert "max_new_tokens 64" in error.found
    parse_config(mapping({"rollout_backend": backend, "vllm": {"max_model_len": 65}}))


@pytest.mark.req("REP-01", "CFG-05")
def test_a_repeat_guard_that_starts_after_the_longest_answer_is_refused() -> None:
    guard = {"enabled": True, "max_object_keys": 9, "min_new_tokens": 64}
    error = only_error({"repeat_terminate": guard})
    assert error.where == "rollout_matching.repeat_terminate.min_new_tokens"
    assert "max_new_tokens 64" in error.found
    parse_config(mapping({"repeat_terminate": guard | {"min_new_tokens": 63}}))
    parse_config(mapping({"repeat_terminate": guard | {"enabled": False}}))


@pytest.mark.req("CFG-05", "ROLL-03")
def test_an_offload_that_moves_nothing_is_refused() -> None:
    error = only_error({"offload": {"enabled": True}})
    assert error.where == "rollout_matching.offload.enabled"
    assert "offload_model" in error.found


@pytest.mark.req("CFG-05", "ROLL-03")
@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"rollout_backend": "hf"},
        {"vllm": {"mode": "server", "server": SERVER}},
    ],
)
def test_offload_is_accepted_everywhere(rollout: dict[str, Any]) -> None:
    offload = {"enabled": True, "offload_model": True, "offload_optimizer": True}
    config = parse_config(mapping({**rollout, "offload": offload}))
    assert config.rollout_matching.offload.model_dump() == offload


@pytest.mark.req("SYNC-01")
def test_adapters_are_pushed_only_where_they_are_served_and_trained() -> None:
    adapter = {"sync": {"mode": "adapter"}}
    error = only_error({"vllm": adapter}, tuner=LORA)
    assert error.where == f"{VLLM}.sync.mode"
    assert "enable_lora" in error.do
    error = only_error({"vllm": {**adapter, "enable_lora": True}})
    assert error.where == f"{VLLM}.sync.mode"
    assert "train_type: lora" in error.do


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize(
    ("mode", "enable_lora", "tuner", "resolved"),
    [
        ("full", False, {}, "full"),
        ("full", True, LORA, "full"),
        ("auto", False, {}, "full"),
        ("auto", False, LORA, "full"),
        ("auto", True, {}, "full"),
        ("auto", True, LORA, "adapter"),
        ("adapter", True, LORA, "adapter"),
    ],
)
def test_auto_pushes_adapters_where_they_are_served_and_trained(
    mode: str, enable_lora: bool, tuner: dict[str, Any], resolved: str
) -> None:
    vllm = {"enable_lora": enable_lora, "sync": {"mode": mode}}
    config = parse_config(mapping({"vllm": vllm}, tuner=tuner))
    assert resolved_sync_mode(config, learner_world_size=1) == resolved


@pytest.mark.req("SYNC-01", "RES-04")
@pytest.mark.scenario("Non-full sync mode fails fast under multi-process learner")
@pytest.mark.parametrize("mode", ["auto", "adapter"])
def test_several_learner_processes_push_full_weights_only(mode: str) -> None:
    vllm = {"enable_lora": True, "sync": {"mode": mode}}
    config = parse_config(mapping({"vllm": vllm}, tuner=LORA))
    with pytest.raises(ContractError, match="2 learner processes") as caught:
        resolved_sync_mode(config, learner_world_size=2)
    assert caught.value.where == f"{VLLM}.sync.mode"
    full = parse_config(mapping({"vllm": {"enable_lora": True}}, tuner=LORA))
    assert resolved_sync_mode(full, learner_world_size=2) == "full"
