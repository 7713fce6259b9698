"""Engine arguments and sampling parameters for vLLM, and the rendering of a dead replica."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from learner.config.rollout_matching import DecodingConfig
from rollout_server.engines.engine_protocol import EngineDead, PromptMessage
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import LORA_RANKS, ServerSettings
from rollout_server.settings.repeat_config import PROCESSOR
from shared_contracts.errors import ProblemError
from shared_contracts.infer import RequestConfig
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract.update_bench import asynchronous


@pytest.fixture(scope="module")
def engine_args() -> Any:
    """The module, imported late: it imports vLLM."""
    from rollout_server.engines.vllm import engine as engine_args

    return engine_args


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return tmp_path


@pytest.mark.req("SRV-01", "SRV-03")
def test_settings_of_the_engine_reach_vllm(engine_args: Any, model: Path) -> None:
    settings = ServerSettings(
        model=model,
        gpus=(3, 4, 5, 6),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        max_images_per_request=3,
        gpu_memory_utilization=0.5,
        max_num_seqs=5,
    )
    args, other = (engine_args.engine_args(settings, index) for index in range(2))
    assert (args.device_ids, other.device_ids) == ([3, 4], [5, 6])
    assert (args.tensor_parallel_size, args.distributed_executor_backend) == (2, "mp")
    assert args.weight_transfer_config.backend == "rollmatch"
    assert (args.enable_prefix_caching, args.max_num_seqs) == (False, 5)
    assert args.limit_mm_per_prompt == {"image": 3, "video": 0}
    assert args.gpu_memory_utilization == 0.5


@pytest.mark.req("SRV-01")
def test_ray_places_replicas_that_span_nodes(engine_args: Any, model: Path) -> None:
    settings = ServerSettings(
        model=model, distributed_executor_backend="ray", replicas=2, tensor_parallel_size=16
    )
    args = [engine_args.engine_args(settings, index) for index in range(settings.num_replicas)]
    assert [a.distributed_executor_backend for a in args] == ["ray", "ray"]
    assert [a.device_ids for a in args] == [None, None]
    assert settings.num_workers == 32
    assert "VLLM_HOST_IP" not in engine_environment(settings)


@pytest.mark.req("FULL-06")
def test_gpu_engine_prefills_thousands_of_tokens_at_once(engine_args: Any, model: Path) -> None:
    settings = ServerSettings(model=model, gpus=(0,))
    args = engine_args.engine_args(settings, 0)
    assert (args.max_num_batched_tokens, args.gpu_memory_utilization) == (8192, 0.9)
    many = settings.model_copy(update={"max_num_seqs": 10_000})
    assert engine_args.engine_args(many, 0).max_num_batched_tokens == 10_000
    stated = settings.model_copy(update={"max_num_batched_tokens": 4096})
    assert engine_args.engine_args(stated, 0).max_num_batched_tokens == 4096


@pytest.mark.req("REP-04", "SYNC-01")
def test_repeat_guard_and_adapter_reach_vllm_where_they_are_enabled(
    engine_args: Any, model: Path
) -> None:
    off = ServerSettings(model=model, device="cpu")
    guard = RepeatTerminateConfig(enabled=True, max_object_keys=9)
    options = {"repeat_terminate": guard, "enable_lora": True, "max_lora_rank": 64}
    plain = engine_args.engine_args(off, 0)
    assert (plain.logits_processors, plain.enable_lora) == (None, False)
    args = engine_args.engine_args(off.model_copy(update=options), 0)
    assert args.logits_processors == [PROCESSOR]
    assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (True, 1, 64)
    assert engine_args.sampling_params(RequestConfig(), None, 8).stop_token_ids == []
    assert engine_args.sampling_params(RequestConfig(), None, 8, sentinel=5).stop_token_ids == [5]


@pytest.mark.req("SYNC-01")
def test_lora_ranks_are_those_of_vllm() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def params(engine_args: Any, **config: Any) -> Any:
    return engine_args.sampling_params(RequestConfig.model_validate(config), config.get("seed"), 8)


@pytest.mark.req("WIRE-01")
def test_every_parameter_reaches_vllm(engine_args: Any) -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "stop": ["}"],
        "seed": 12,
        "n": 2,
    }
    made = params(engine_args, **given)
    assert {name: getattr(made, name) for name in given} == given
    assert (made.max_tokens, made.skip_special_tokens) == (8, False)
    assert params(engine_args, temperature=1.0, top_k=-1).top_k == 0


@pytest.mark.req("WIRE-05", "CFG-05")
@pytest.mark.parametrize(
    ("name", "inside", "beyond"),
    [("temperature", 2.0, 2.01), ("top_p", 1.0, 1.01), ("top_k", -1, -2)],
)
def test_bounds_are_those_of_vllm(
    engine_args: Any, name: str, inside: float, beyond: float
) -> None:
    assert params(engine_args, **{name: inside})
    with pytest.raises(engine_args.VLLMClientError):
        engine_args.SamplingParams(**{name: beyond})
    for side in (RequestConfig, DecodingConfig):
        with pytest.raises(ValidationError, match=name):
            side.model_validate({name: beyond})


@pytest.mark.req("WIRE-05")
def test_combination_that_vllm_refuses_is_refused(engine_args: Any) -> None:
    with pytest.raises(ProblemError, match="greedy"):
        params(engine_args, n=2, temperature=0.0)


@pytest.mark.req("FULL-08", "SRV-05")
@asynchronous
async def test_rendering_of_a_dead_replica_ends(tied: Path) -> None:
    from rollout_server.engines.vllm.engine import VllmEngine

    begun, tokenizer = asyncio.Event(), AutoTokenizer.from_pretrained(tied)

    async def stuck(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    front_end: Any = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer, render_chat_async=stuck),
        model_config=SimpleNamespace(dtype="float32", max_model_len=1024),
        get_tokenizer=lambda: tokenizer,
    )
    engine = VllmEngine(front_end, 0, RepeatTerminateConfig())
    messages = [PromptMessage("user", ["Detect every object."])]
    rendering = asyncio.ensure_future(engine.render(messages, []))
    await begun.wait()
    engine.declare_dead()
    for each in (rendering, engine.render(messages, [])):
        with pytest.raises(EngineDead, match="replica 0 is dead"):
            await each
