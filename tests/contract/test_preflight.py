"""Start-ups that are refused: GPUs in use, models that do not fit, media, open addresses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.models.toy import ToyFamily, make_model
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import check_settings, check_unused, fit_gpus
from shared_contracts.errors import ContractError
from shared_contracts.machine import (
    IDLE_MIB,
    GpuMemory,
    GpuProcess,
    GpuUse,
    parse_gpus,
    parse_processes,
    query_gpu_use,
)
from tests.unit.refusals import refused
from tests.unit.sparse_weights import write_sparse_weights

FIRST = "GPU-8f6d2c1e-0b5a-4a64-9f0e-3d1f6f8f1a11"
SECOND = "GPU-1c9e7b52-7d3f-4b8c-8a55-6c2f0e9d4b22"
GPUS = f"0, {FIRST}, 4, 81559\n1, {SECOND}, 41984, 81559\n"
PROCESSES = f"{SECOND}, 4242, /usr/bin/python3, 40960\n"


def in_use(gpus: list[int], use: GpuUse) -> ContractError:
    with pytest.raises(ContractError) as error:
        check_unused(gpus, use)
    assert error.value.where == "gpus"
    assert "--share-gpus" in error.value.do
    return error.value


# --- GPUs


@pytest.mark.req("SRV-04")
def test_a_gpu_in_use_is_refused_and_its_users_are_named() -> None:
    use = GpuUse(parse_gpus(GPUS), parse_processes(PROCESSES))
    assert in_use([0, 1], use).found == "GPU 1 is used by /usr/bin/python3 (pid 4242, 40.0 GiB)"
    check_unused([0], use)
    use = GpuUse(parse_gpus(GPUS), parse_processes(f"{PROCESSES}{SECOND}, 77, trainer, [N/A]\n"))
    assert in_use([1], use).found.endswith("40.0 GiB) and trainer (pid 77)")


@pytest.mark.req("SRV-04")
def test_a_gpu_with_memory_of_unknown_processes_is_refused() -> None:
    hidden = GpuUse(parse_gpus(GPUS), [])
    assert "(41.0 GiB of 79.6 GiB)" in in_use([1], hidden).found
    assert "cannot be seen" in in_use([1], hidden).found
    check_unused([0], hidden)
    check_unused([0], GpuUse([GpuMemory(0, FIRST, IDLE_MIB, 81559)], []))
    in_use([0], GpuUse([GpuMemory(0, FIRST, IDLE_MIB + 1, 81559)], []))


def fake_smi(folder: Path, script: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.req("SRV-04")
def test_nvidia_smi_is_called_for_plain_numbers(tmp_path: Path) -> None:
    odd = f"{FIRST}, 17, tool --ids=1,2, [N/A]\n"
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "apps").write_text(PROCESSES + odd)
    script = f"""test "$2" = --format=csv,noheader,nounits || exit 1
case "$1" in
    --query-gpu=index,uuid,memory.used,memory.total) cat {tmp_path}/gpus ;;
    --query-compute-apps=gpu_uuid,pid,process_name,used_memory) cat {tmp_path}/apps ;;
    *) exit 1 ;;
esac"""
    gpus = [GpuMemory(0, FIRST, 4, 81559), GpuMemory(1, SECOND, 41984, 81559)]
    python = GpuProcess(SECOND, 4242, "/usr/bin/python3", 40960)
    tool = GpuProcess(FIRST, 17, "tool --ids=1,2", None)
    assert query_gpu_use(fake_smi(tmp_path, script)) == GpuUse(gpus, [python, tool])


@pytest.mark.parametrize("script", ["exit 9", "echo 0, GPU-1, [N/A]"])
def test_an_nvidia_smi_without_an_answer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str
) -> None:
    assert query_gpu_use(fake_smi(tmp_path, script)) is None
    assert query_gpu_use(str(tmp_path / "missing")) is None
    assert len(caplog.messages) == 2
    assert "does not show which processes use the GPUs" in caplog.messages[0]


# --- sizes (FULL-06)


def gpus_of(first: float, second: float | None = None) -> GpuUse:
    sizes = [int(gib * 1024) for gib in (first, second or first)]
    return GpuUse([GpuMemory(i, f"GPU-{i}", 0, size) for i, size in enumerate(sizes)], [])


@pytest.fixture
def of_4b(tmp_path: Path) -> Path:
    """7.43 GiB of weights, the largest of which is an embedding of 0.73 GiB."""
    text = {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 2560}
    text |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}
    config = {"architectures": ["X"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = {f"layer.{index}": [100, 1000, 1000] for index in range(36)}
    write_sparse_weights(tmp_path / "model.safetensors", {"embed": [152936, 2560], **layers})
    return tmp_path


@pytest.mark.req("FULL-06")
def test_a_context_that_cannot_fit_is_refused_with_the_numbers(of_4b: Path) -> None:
    """36 GiB of KV cache for the checkpoint's own context are the whole share of the engine."""
    colocated = ServerSettings(model=of_4b, gpus=(0,), gpu_memory_utilization=0.45)
    with pytest.raises(ContractError) as caught:
        fit_gpus(colocated, gpus_of(80))
    error = caught.value
    assert error.where == "max_model_len"
    assert "0.45 of a GPU of 80 GiB, which is 36 GiB; the weights are 7.43 GiB" in error.found
    assert "one sequence of 262,144 tokens is 36 GiB (144 KiB a token)" in error.found
    most = int(error.do.split(" at most ")[1].split(" ")[0].replace(",", ""))
    fits = colocated.model_copy(update={"max_model_len": most})
    assert fit_gpus(fits, gpus_of(80)).max_model_len == most
    with pytest.raises(ContractError):
        fit_gpus(fits.model_copy(update={"max_model_len": most + 1}), gpus_of(80))
    split = colocated.model_copy(update={"gpus": (0, 1), "tensor_parallel_size": 2})
    assert fit_gpus(split, gpus_of(80)).gpu_memory_utilization == 0.45


@pytest.mark.req("FULL-06")
def test_weights_that_cannot_fit_are_refused_with_the_numbers(of_4b: Path) -> None:
    small = ServerSettings(model=of_4b, gpus=(0,), max_model_len=256, dtype="float32")
    with refused("gpu_memory_utilization", "weights are 14.9 GiB"):
        fit_gpus(small, gpus_of(15))
    two = small.model_copy(update={"gpus": (0, 1)})
    with refused("gpu_memory_utilization", "of a GPU of 15 GiB"):
        fit_gpus(two, gpus_of(80, 15))
    assert fit_gpus(two.model_copy(update={"tensor_parallel_size": 2}), gpus_of(15))
    assert fit_gpus(small.model_copy(update={"dtype": "bfloat16"}), gpus_of(15))


@pytest.mark.req("FULL-06")
def test_the_fraction_leaves_room_for_a_push_unless_it_is_stated(of_4b: Path) -> None:
    settings = ServerSettings(model=of_4b, gpus=(1,), max_model_len=4096)
    assert fit_gpus(settings, gpus_of(80)).gpu_memory_utilization == 0.9
    share = fit_gpus(settings, gpus_of(24)).gpu_memory_utilization
    assert share is not None
    left = (1 - share) * 24
    assert 3 * 0.73 + 1 <= left <= 3 * 0.73 + 1.5, "two buckets, the layer, the communicator"
    stated = settings.model_copy(update={"gpu_memory_utilization": 0.95})
    assert fit_gpus(stated, gpus_of(24)).gpu_memory_utilization == 0.95
    assert fit_gpus(settings, GpuUse([], [])) == settings, "nvidia-smi knows no such GPU"


# --- the rest


CPU = {"device": "cpu"}


@pytest.mark.req("SRV-04", "SRV-06", "FAM-01")
@pytest.mark.parametrize(
    ("family", "options", "where"),
    [
        ("qwen3_vl", {"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ("qwen3_5", CPU, "dtype"),
        ("qwen3_5", CPU | {"dtype": "bfloat16"}, "enable_prefix_caching"),
        ("qwen3_vl_moe", CPU | {"enable_lora": True}, "enable_lora"),
        ("qwen3_vl", CPU | {"allowed_media_dirs": (Path("/gone"),)}, "allowed_media_dirs"),
        ("qwen3_vl", CPU | {"host": "0.0.0.0"}, "--host"),
        ("qwen3_vl", CPU | {"kv_cache_gib": 1e6}, "kv_cache_gib"),
    ],
)
def test_what_the_machine_or_the_model_cannot_do_is_refused(
    family: ToyFamily,
    options: dict[str, Any],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray is not installed. test_auth.py has the faults of a token."""
    monkeypatch.setitem(sys.modules, "ray", None)
    make_model(tmp_path / "toy", seed=0, family=family)
    with refused(where):
        check_settings(ServerSettings(model=tmp_path / "toy", **options))
