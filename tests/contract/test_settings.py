"""Settings of the server: options and YAML, and what is refused before anything starts."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from learner.rollout.server_process import free_ports
from rollout_server.cli import app
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings, load_settings
from rollout_server.settings.preflight import bind, check_checkpoint, check_gpus, check_memory
from shared_contracts.errors import ContractError, ContractErrors


def faults(**options: Any) -> list[tuple[str, str]]:
    """(where, found) of each refusal."""
    with pytest.raises(ContractErrors) as error:
        load_settings(None, options)
    return [(e.where, e.found) for e in error.value.errors]


@pytest.mark.req("SRV-01")
def test_options_win_over_the_file_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: /m\ndevice: cpu\nport: 9000\nallowed_media_dirs: [/a, /b]\n")
    settings = load_settings(file, {"port": 9001, "seed": None})
    assert (settings.model, settings.device, settings.port) == (Path("/m"), "cpu", 9001)
    assert settings.allowed_media_dirs == (Path("/a"), Path("/b"))
    assert (settings.host, settings.seed, settings.transport) == ("127.0.0.1", 0, "gloo")


@pytest.mark.req("SRV-01", "CFG-09")
def test_paths_are_read_as_in_a_training_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "server.yaml"
    file.write_text("model: ~/m\ndevice: cpu\nallowed_media_dirs: [~/a]\ntoken_file: ~/token\n")
    settings = load_settings(file, {})
    assert (settings.model, settings.token_file) == (Path("/home/me/m"), Path("/home/me/token"))
    assert settings.allowed_media_dirs == (Path("/home/me/a"),)
    where = "allowed_media_dirs[1]"
    found = '"${DATA}/b" has ${DATA}, and variables are not expanded'
    assert faults(model="/m", device="cpu", allowed_media_dirs=["/a", "${DATA}/b"]) == [
        (where, found)
    ]


def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"model: {'[' * 3000}{']' * 3000}\n")
    with pytest.raises(ContractError, match="nested too deep"):
        load_settings(file, {})


@pytest.mark.req("SRV-01")
def test_every_setting_is_an_option() -> None:
    from typer.main import get_command

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {parameter.name for parameter in serve.params}
    fields = {name.removesuffix("s") for name in ServerSettings.model_fields}
    files = {"config", "run_config", "help"}
    # The guard comes from a file, or from the environment (REP-04).
    assert {name.removesuffix("s") for name in options} - files == fields - {"repeat_terminate"}


@pytest.mark.req("SRV-01")
def test_gpus_are_split_into_groups_of_their_own() -> None:
    settings = load_settings(
        None, {"model": Path("/m"), "gpus": [4, 5, 6, 7], "tensor_parallel_size": 2}
    )
    assert settings.num_replicas == 2
    assert settings.num_workers == 4
    assert [settings.gpus_of(i) for i in range(2)] == [[4, 5], [6, 7]]
    assert settings.transport == "nccl"


def test_what_does_not_fit_together_is_refused() -> None:
    model = Path("/m")
    assert faults(model=model) == [("gpus", "none given")]
    assert faults(model=model, gpus=[1, 1]) == [("gpus", "[1, 1] names one twice")]
    assert faults(model=model, gpus=[0, 1, 2], tensor_parallel_size=2)[0][0] == "gpus"
    assert faults(model=model, gpus=[0], replicas=1)[0][0] == "replicas"
    assert faults(model=model, device="cpu", gpus=[0])[0][0] == "gpus"
    assert faults(model=model, device="cpu", weight_transport="nccl")[0][0] == "weight_transport"


@pytest.mark.req("SYNC-01")
def test_a_rank_that_vllm_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(ContractErrors) as caught:
        load_settings(None, {"model": Path("/m"), "device": "cpu", "max_lora_rank": 24})
    (error,) = caught.value.errors
    assert (error.where, error.found) == ("max_lora_rank", "24")
    assert error.do == "Use one of 1, 8, 16, 32, 64, 128, 256, 320, 512"


@pytest.mark.req("SRV-04")
def test_every_bad_key_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: /m\ndevise: cpu\nport: eighty\n")
    with pytest.raises(ContractErrors) as error:
        load_settings(file, {})
    found = {e.where: e.do for e in error.value.errors}
    assert set(found) == {"devise", "port"}
    assert "'device'" in found["devise"]


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("content", ["[1, 2]", "a: b: c", "\xff"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ContractError) as error:
        load_settings(file, {})
    assert error.value.where == "--config"


def test_the_engine_is_cut_off_from_the_network_and_from_threads_it_does_not_need() -> None:
    cpu = engine_environment(ServerSettings(model=Path("/m"), device="cpu"))
    assert cpu["HF_HUB_OFFLINE"] == cpu["VLLM_NO_USAGE_STATS"] == cpu["OMP_NUM_THREADS"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in cpu
    gpu = engine_environment(ServerSettings(model=Path("/m"), gpus=(0,)))
    assert gpu["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    v2 = ServerSettings(model=Path("/m"), gpus=(0,), model_runner="v2")
    assert engine_environment(v2)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "OMP_NUM_THREADS" not in gpu
    assert cpu["VLLM_HOST_IP"] == gpu["VLLM_HOST_IP"] == "127.0.0.1"


# --- start-up that cannot succeed


@pytest.mark.req("SRV-04")
def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    def found() -> str:
        with pytest.raises(ContractError) as error:
            check_checkpoint(tmp_path / "model")
        assert error.value.where == "model"
        return error.value.found

    assert "no directory" in found()
    (tmp_path / "model").mkdir()
    assert "cannot be read" in found()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "architecture" in found()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["X"]}')
    assert "safetensors" in found()
    (tmp_path / "model" / "model.safetensors").symlink_to("blobs/gone")
    assert "is a broken link" in found()
    with pytest.raises(ContractError, match="no directory"):
        check_checkpoint(tmp_path / ("long" * 100))


@pytest.mark.req("SRV-04")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ContractError) as error:
        check_gpus([99], {})
    assert "GPU 99" in error.value.found


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("visible", ["", "2,3", "1,0", "GPU-8f6a", "0"])
def test_gpus_are_those_of_the_machine_and_not_of_what_is_visible(
    tmp_path: Path, visible: str
) -> None:
    for gpu in range(4):
        (tmp_path / str(gpu)).mkdir()
    with pytest.raises(ContractError, match="names GPUs of the machine") as error:
        check_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": visible}, tmp_path)
    assert error.value.where == "CUDA_VISIBLE_DEVICES"
    check_gpus([0, 1], {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    check_gpus([2, 3], {}, tmp_path)


@pytest.mark.req("SRV-04")
def test_weights_and_caches_must_fit_into_memory(tmp_path: Path) -> None:
    def settings(kv_cache_gib: float, replicas: int) -> ServerSettings:
        return ServerSettings(
            model=tmp_path, device="cpu", kv_cache_gib=kv_cache_gib, replicas=replicas
        )

    check_memory(settings(0.001, replicas=2))
    for too_much in (settings(10**6, replicas=1), settings(1.0, replicas=10**6)):
        with pytest.raises(ContractError) as error:
            check_memory(too_much)
        assert error.value.where == "kv_cache_gib"
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2**43)  # a sparse file
    with pytest.raises(ContractError, match="weights and KV caches of 1 replica"):
        check_memory(settings(0.001, replicas=1))


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
    with bind("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rollout_server", "serve", *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.req("SRV-04")
def test_bad_start_up_is_three_lines_and_exit_code_2_before_anything_heavy(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert [line.split(":")[0].strip() for line in lines] == ["error", "found", "do"]
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "vllm", "fastapi", "transformers"})


@pytest.mark.req("SRV-04", "SRV-05")
def test_a_parent_that_is_none_is_told(tied: Path) -> None:
    done = command("--device", "cpu", "--model", str(tied), "--parent-pid", "1")
    assert done.returncode == 2
    assert "1 is not the parent of this process" in done.stderr


@pytest.mark.slow
@pytest.mark.req("SRV-04")
def test_an_engine_that_cannot_start_ends_the_server(tied: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tied, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Nothing"]}))
    (port,) = free_ports(1)
    options = f"serve --device cpu --port {port} --model {model}".split()
    done = subprocess.run(
        [sys.executable, "-m", "rollout_server", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "\nerror: an engine could not start" in done.stderr


def test_help_takes_at_most_half_a_second_of_cpu() -> None:
    """CPU time, so that a busy machine does not count."""
    best = min(_help_seconds() for _ in range(3))
    assert best <= 0.5


def _help_seconds() -> float:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "rollout_server", "--help"], capture_output=True, check=True
    )
    assert b"serve" in done.stdout
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )


@pytest.mark.slow
@pytest.mark.req("SRV-05")
def test_sigterm_during_start_up_ends_at_once_and_leaves_nothing(
    tied: Path, tmp_path: Path
) -> None:
    from tests.contract.running_server import children, start_server, stop_server, wait_until_gone

    server = start_server(tied, tmp_path / "server", "--grace-seconds", "1")
    deadline = time.monotonic() + 120
    while len(children(server.process.pid)) < 2:  # an engine beside the resource tracker
        assert time.monotonic() < deadline, "no engine was started"
        time.sleep(0.1)
    everything = [server.process.pid, *children(server.process.pid)]
    began = time.monotonic()
    os.kill(server.process.pid, 15)
    stop_server(server)
    assert time.monotonic() - began < 25
    assert wait_until_gone(everything, timeout_s=5) == []
