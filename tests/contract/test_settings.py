"""Settings of the server: options and YAML, and start-ups that are refused."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from rollout_server.cli import app
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings, load_settings
from rollout_server.settings.preflight import bind, check_checkpoint, check_gpus, check_memory
from shared_contracts.errors import ContractError, ContractErrors
from tests.contract.running_server import (
    RunningServer,
    children,
    is_alive,
    start_server,
    stop_server,
    wait_until_gone,
)
from tests.contract.test_adapter import adapted
from tests.unit.fleets import wait_until
from tests.unit.refusals import refused


@pytest.mark.req("SRV-01", "SRV-04")
def test_options_win_over_the_file_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: /m\ndevice: cpu\nport: 9000\nallowed_media_dirs: [/a, /b]\n")
    settings = load_settings(file, {"port": 9001, "seed": None})
    assert (settings.model, settings.device, settings.port) == (Path("/m"), "cpu", 9001)
    assert settings.allowed_media_dirs == (Path("/a"), Path("/b"))
    assert (settings.host, settings.seed, settings.transport) == ("127.0.0.1", 0, "gloo")
    file.write_text("[1, 2]")
    with refused("--config"):
        load_settings(file, {})


def parsed(*words: str) -> dict[str, Any]:
    """The options of `rollout-server serve WORDS`, by parameter."""
    command: Any = get_command(app)
    params: dict[str, Any] = command.commands["serve"].make_context("serve", list(words)).params
    return params


@pytest.mark.req("SRV-01")
def test_every_setting_is_an_option_of_its_type() -> None:
    # A YAML file, or the environment (REP-04), has the guard.
    options = ServerSettings.model_fields.keys() - {"repeat_terminate"}
    assert parsed().keys() - {"config", "run_config", "help"} == options
    assert set(parsed().values()) == {None, ()}
    words = (
        "--model /m --gpus 3,1 --max-lora-rank 32 --kv-cache-gib .5 --max-model-len 9 "
        "--allowed-media-dir /a --allowed-media-dir /b --no-lora --openai --log-format json "
        "--tensor-parallel-size 2"
    )
    settings = load_settings(None, parsed(*words.split()), environ={})
    assert (settings.model, settings.gpus, settings.max_lora_rank) == (Path("/m"), (3, 1), 32)
    assert (settings.kv_cache_gib, settings.max_model_len) == (0.5, 9)
    assert (settings.num_replicas, settings.transport) == (1, "nccl")
    assert settings.allowed_media_dirs == (Path("/a"), Path("/b"))
    assert (settings.enable_lora, settings.openai, settings.log_format) == (False, True, "json")


@pytest.mark.req("SRV-04")
def test_every_bad_option_is_reported() -> None:
    words = "--model /m --device tpu --gpus 0,x --port eighty --kv-cache-gib 0 --max-lora-rank 24"
    with pytest.raises(ContractErrors) as caught:
        load_settings(None, parsed(*words.split()), environ={})
    assert {(error.where, error.do) for error in caught.value.errors} == {
        ("device", "Use 'cpu' or 'gpu'"),
        ("gpus[1]", "Write a whole number"),
        ("port", "Write a whole number"),
        ("kv_cache_gib", "It should be greater than 0"),
        ("max_lora_rank", "Use 1, 8, 16, 32, 64, 128, 256, 320 or 512"),
    }


CPU = {"device": "cpu"}


@pytest.mark.req("SRV-04", "SYNC-01", "CFG-09")
@pytest.mark.parametrize(
    ("options", "where", "found"),
    [
        ({}, "gpus", "none given"),
        ({"gpus": [1, 1]}, "gpus", "[1, 1] names one twice"),
        ({"gpus": [0, 1, 2], "tensor_parallel_size": 2}, "gpus", ""),
        ({"gpus": [0], "replicas": 1}, "replicas", ""),
        (CPU | {"gpus": [0]}, "gpus", ""),
        (CPU | {"distributed_executor_backend": "ray"}, "distributed_executor_backend", ""),
        ({"distributed_executor_backend": "ray", "gpus": [0]}, "gpus", "Ray places"),
        (CPU | {"weight_transport": "nccl"}, "weight_transport", ""),
        (CPU | {"max_image_megapixels": 178.5}, "max_image_megapixels", ""),
        (CPU | {"max_decoded_mib": 1220}, "max_decoded_mib", "too few for one image"),
        (
            CPU | {"allowed_media_dirs": ["/a", "${DATA}/b"]},
            "allowed_media_dirs[1]",
            '"${DATA}/b" has ${DATA}, and variables are not expanded',
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], where: str, found: str
) -> None:
    with refused(where, found):
        load_settings(None, {"model": "/m"} | options)


@pytest.mark.req("SRV-06")
def test_the_environment_of_the_engine_allows_no_network_no_pickles_and_few_threads() -> None:
    cpu = engine_environment(ServerSettings(model=Path("/m"), device="cpu"))
    assert cpu["HF_HUB_OFFLINE"] == cpu["VLLM_NO_USAGE_STATS"] == cpu["OMP_NUM_THREADS"] == "1"
    gpu = engine_environment(ServerSettings(model=Path("/m"), gpus=(0,)))
    assert cpu["TORCH_COMPILE_DISABLE"] == "1"
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"} & gpu.keys()
    for variables in (cpu, gpu):
        assert variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert cpu["VLLM_HOST_IP"] == gpu["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.req("SRV-04")
def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    with refused("model", "no directory"):
        check_checkpoint(model)
    model.mkdir()
    with refused("model", "cannot be read"):
        check_checkpoint(model)
    (model / "config.json").write_text("{}")
    with refused("model", "architecture"):
        check_checkpoint(model)
    (model / "config.json").write_text('{"architectures": ["X"]}')
    with refused("model", "safetensors"):
        check_checkpoint(model)
    (model / "model.safetensors").symlink_to("blobs/gone")
    with refused("model", "is a broken link"):
        check_checkpoint(model)


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("visible", ["", "1,0", "GPU-8f6a"])
def test_gpus_are_numbers_of_the_machine_and_not_of_the_visible_ones(
    tmp_path: Path, visible: str
) -> None:
    for gpu in range(4):
        (tmp_path / str(gpu)).mkdir()
    with refused("CUDA_VISIBLE_DEVICES", "names GPUs of the machine"):
        check_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": visible}, tmp_path)
    check_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    check_gpus([2, 3], {}, tmp_path)
    for gpu in (99, -1):
        with pytest.raises(ContractError, match=f"GPU {gpu}"):
            check_gpus([gpu], {}, tmp_path)


@pytest.mark.req("SRV-04")
def test_weights_and_caches_must_fit_into_memory(tmp_path: Path) -> None:
    settings = partial(ServerSettings, model=tmp_path, device="cpu")
    check_memory(settings(kv_cache_gib=0.001, replicas=2))
    for kv_cache_gib, replicas in ((10**6, 1), (1.0, 10**6)):
        with refused("kv_cache_gib"):
            check_memory(settings(kv_cache_gib=kv_cache_gib, replicas=replicas))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2**43)  # a sparse file
    with pytest.raises(ContractError, match="weights and KV caches of 1 replica"):
        check_memory(settings(kv_cache_gib=0.001, replicas=1))


@pytest.mark.req("SRV-04")
def test_a_busy_port_is_an_error_and_never_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ContractError) as error:
            bind("127.0.0.1", port)
    assert "in use" in error.value.found
    assert str(port) in error.value.where
    with pytest.raises(ContractError, match="cannot be bound"):
        bind("ä..b", port)
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def command(*options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-X", "importtime", "-m", "rollout_server", "serve", *options]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.req("SRV-04")
def test_bad_start_up_is_three_lines_and_exit_code_2_before_anything_heavy(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert [line.split(":")[0].strip() for line in lines] == ["error", "found", "do"]
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "vllm", "fastapi", "transformers"})


@pytest.mark.req("SRV-04", "SRV-05")
def test_a_parent_pid_of_another_process_is_refused(tied: Path) -> None:
    done = command("--device", "cpu", "--model", str(tied), "--parent-pid", "1")
    assert done.returncode == 2
    assert "1 is not the parent of this process" in done.stderr


@pytest.mark.slow
@pytest.mark.req("SRV-05")
def test_sigterm_during_start_up_ends_everything(tied: Path, tmp_path: Path) -> None:
    server = start_server(tied, tmp_path / "server", "--grace-seconds", "1")
    while not has_child(server, b"spawn_main"):  # of `multiprocessing`, as those of vLLM
        assert is_alive(server.process.pid), "the server ended"
        time.sleep(0.1)
    everything = [server.process.pid, *children(server.process.pid)]
    try:
        os.kill(server.process.pid, signal.SIGTERM)
        assert wait_until_gone(everything, timeout_s=60) == []
    finally:
        stop_server(server)


@pytest.mark.slow
@pytest.mark.req("SRV-05", "WIRE-06")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_a_merge_ends_everything_and_no_port_is_open(
    tied: Path, tmp_path: Path, number: signal.Signals
) -> None:
    adapted(tied, seed=1).save_pretrained(str(tmp_path / "adapter"))
    server = start_server(tmp_path / "adapter", tmp_path / "server")
    try:
        wait_until(lambda: has_child(server, b"rollout_server.engines.merge"))
        with pytest.raises(httpx.ConnectError):
            server.http.get("/live/")
        everything = [server.process.pid, *children(server.process.pid)]
        os.kill(server.process.pid, number)
        assert wait_until_gone(everything, timeout_s=60) == []
    finally:
        stop_server(server)


def has_child(server: RunningServer, word: bytes) -> bool:
    """Whether the command of a child of the server has the word."""
    for pid in children(server.process.pid):
        with suppress(OSError):  # it may end meanwhile
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
    return False
