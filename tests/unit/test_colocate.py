"""The colocated server without vLLM: its place, its settings, its life."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, dump_resolved, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.rollout.colocate import (
    describe_backend,
    learner_environment,
    media_dirs,
    place,
    server_settings,
)
from learner.rollout.server_process import STEADY_S, ServerProcess, SupervisedServer, free_ports
from learner.training.start_checks import check_backend, check_launcher
from learner.types import Sample
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import load_settings
from rollout_server.settings.preflight import check_gpus
from rollout_server.settings.repeat_config import repeat_config_from_environment
from shared_contracts.errors import ContractError, RunError
from shared_contracts.machine import CUDA_VISIBLE, visible_gpus
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.rollout_config import VllmConfig

WARMUP = load_mapping(Path(__file__).parents[2] / "configs/demo/warmup.yaml")
BARE = {key: section for key, section in WARMUP.items() if key != "rollout_matching"}


def config_of(rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
    section = {"max_new_tokens": 16, **(rollout or {})}
    return parse_config(merge(BARE, {"rollout_matching": section, **sections}))


# --- Where it runs ----------------------------------------------------------------------

UUIDS = ("GPU-8932f937-aaaa", "GPU-8932f937-bbbb", "GPU-11112222-cccc", "GPU-33334444-dddd")


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    """What the driver shows of a machine with four."""
    for index, name in enumerate(("0000:04", "0000:01", "0000:03", "0000:02")):
        folder = tmp_path / "gpus" / name
        folder.mkdir(parents=True)
        told = (
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {UUIDS[int(name[-1]) - 1]}\nIRQ: \t {index}\n"
        )
        (folder / "information").write_text(told)
    return tmp_path / "gpus"


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, [0, 1, 2, 3]),
        ({CUDA_VISIBLE: "2,1"}, [2, 1]),
        ({CUDA_VISIBLE: ""}, []),
        ({CUDA_VISIBLE: "-1"}, []),
        ({CUDA_VISIBLE: "3,7"}, [3]),
        ({CUDA_VISIBLE: "3,7,1"}, [3]),
        ({CUDA_VISIBLE: "1,-1,0"}, [1]),
        ({CUDA_VISIBLE: f"{UUIDS[2]},{UUIDS[0]}"}, [2, 0]),
        ({CUDA_VISIBLE: "GPU-3333, GPU-8932f937-b"}, [3, 1]),
        ({CUDA_VISIBLE: "GPU-3333,GPU-8932f937"}, [3]),
        ({CUDA_VISIBLE: "GPU-9,GPU-3333"}, []),
    ],
)
def test_the_learner_sees_the_gpus_that_cuda_would_show_it(
    four_gpus: Path, environment: dict[str, str], gpus: list[int]
) -> None:
    assert visible_gpus(environment, four_gpus) == gpus
    assert visible_gpus(environment, four_gpus / "none") == []


@pytest.mark.req("ROLL-03", "FULL-10")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MIG-41b3b2a1-9f6f-5a3e-8f0e-1f3f6b7e2c55", "a part of a GPU (MIG)"),
        ("MIG-GPU-8932f937-aaaa/1/0", "a part of a GPU (MIG)"),
        ("NVIDIA H100", "no id and no UUID"),
        ("0;1", "no id and no UUID"),
    ],
)
def test_a_name_of_no_whole_gpu_is_refused(four_gpus: Path, name: str, said: str) -> None:
    with pytest.raises(ContractError) as caught:
        visible_gpus({CUDA_VISIBLE: f"0,{name}"}, four_gpus)
    assert caught.value.where == CUDA_VISIBLE
    assert said in caught.value.found
    assert "nvidia-smi -L" in caught.value.do


@pytest.mark.req("SRV-04", "FULL-10")
def test_a_server_takes_the_gpus_that_cuda_counts_as_the_machine_does(four_gpus: Path) -> None:
    for named in ("0,1", ",".join(UUIDS), f"0,{UUIDS[1]}"):
        check_gpus([0, 1], {CUDA_VISIBLE: named}, four_gpus)
    for named in ("1,0", f"{UUIDS[1]},{UUIDS[0]}", UUIDS[0], ""):
        with pytest.raises(ContractError) as caught:
            check_gpus([0, 1], {CUDA_VISIBLE: named}, four_gpus)
        assert caught.value.where == CUDA_VISIBLE
        assert "--gpus" in caught.value.do
    with pytest.raises(ContractError, match="MIG"):
        check_gpus([0], {CUDA_VISIBLE: "MIG-1"}, four_gpus)
    check_gpus([3], {}, four_gpus)


@pytest.mark.req("ROLL-03", "CFG-05")
def test_by_default_it_takes_four_gpus_and_less_than_half_of_their_memory() -> None:
    placement = place(VllmConfig(), [4, 5, 6, 7, 8])
    assert (placement.gpus, placement.tensor_parallel_size) == ((4, 5, 6, 7), 4)
    assert placement.gpu_memory_utilization == 0.45
    assert placement.adapted == ""


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize(
    ("gpus", "used", "said"),
    [
        ([5, 2, 7], (5, 2), "3 visible"),
        ([0, 1], (0, 1), "2 visible"),
        ([0], (0,), "1 visible"),
        ([], (), "no GPU is visible"),
    ],
)
def test_fewer_gpus_change_the_default_and_are_mentioned(
    gpus: list[int], used: tuple[int, ...], said: str
) -> None:
    """Sizes that divide heads and weights: never 3."""
    placement = place(VllmConfig(), gpus)
    assert (placement.gpus, placement.tensor_parallel_size) == (used, max(len(used), 1))
    assert said in str(placement)
    assert "tensor_parallel_size 4 by default" in str(placement)


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize(("asked", "gpus"), [(2, [0]), (5, [0, 1, 2, 3]), (2, [])])
def test_more_gpus_than_there_are_fail_fast(asked: int, gpus: list[int]) -> None:
    with pytest.raises(ContractError) as caught:
        place(VllmConfig(tensor_parallel_size=asked), gpus)
    assert caught.value.where == "rollout_matching.vllm.tensor_parallel_size"
    assert f"{asked} GPUs are asked for" in caught.value.found
    assert CUDA_VISIBLE in caught.value.do


def test_a_stated_size_is_not_an_adaption() -> None:
    placement = place(VllmConfig(tensor_parallel_size=2, gpu_memory_utilization=0.3), [0, 1, 2])
    assert (placement.gpus, placement.tensor_parallel_size) == ((0, 1), 2)
    assert (placement.gpu_memory_utilization, placement.adapted) == (0.3, "")


@pytest.mark.req("ROLL-03", "CFG-09")
@pytest.mark.parametrize("gpus", [[], [3, 5]])
def test_its_settings_are_a_servers(tmp_path: Path, gpus: list[int]) -> None:
    """Together with the training YAML, as the server itself reads both."""
    guard = {"enabled": True, "max_object_keys": 9}
    config = config_of(
        {
            "decode_batch_size": 6,
            "repeat_terminate": guard,
            "vllm": {"enable_prefix_caching": False},
        },
        model={"torch_dtype": "bfloat16"},
    )
    told, run = tmp_path / "told.yaml", tmp_path / "run.yaml"
    placement = place(config.rollout_matching.vllm, gpus)
    told.write_text(dump_mapping(server_settings(config, placement, [tmp_path], "ipc", 640)))
    run.write_text(dump_resolved(config))
    settings = load_settings(told, {}, run)
    assert (settings.host, settings.dtype) == ("127.0.0.1", "bfloat16")
    assert settings.max_num_seqs == 6 * max(len(gpus), 1)
    assert (settings.max_model_len, settings.enable_prefix_caching) == (640, False)
    assert settings.repeat_terminate.max_object_keys == 9
    assert (settings.allowed_media_dirs, settings.transport) == ((tmp_path,), "ipc")
    assert (settings.device, settings.gpus) == ("gpu" if gpus else "cpu", tuple(gpus))
    assert (settings.num_replicas, settings.num_workers) == (1, max(len(gpus), 1))
    if gpus:
        assert settings.share_gpus
        assert settings.gpu_memory_utilization == 0.45


@pytest.mark.req("ROLL-03", "REP-01")
def test_non_server_vllm_paths_are_unchanged_by_this_delta(tmp_path: Path) -> None:
    """A run that asks for no guard has none in its own server: not in its settings, its engine."""
    config = config_of()
    told, run = tmp_path / "told.yaml", tmp_path / "run.yaml"
    placement = place(config.rollout_matching.vllm, [])
    told.write_text(dump_mapping(server_settings(config, placement, [tmp_path], "gloo", 640)))
    run.write_text(dump_resolved(config))
    settings = load_settings(told, {}, run)
    assert not settings.repeat_terminate.enabled
    assert repeat_config_from_environment(engine_environment(settings)) in (
        None,
        RepeatTerminateConfig(),
    )


@pytest.mark.req("WIRE-04")
def test_it_may_read_the_folders_of_the_datas_images() -> None:
    paths = ["/data/b/1.png", "/data/a/2.png", "/data/b/3.png"]
    samples = [Sample(path, (Path(path),), 64, 64, ()) for path in paths]
    assert media_dirs(samples) == [Path("/data/a"), Path("/data/b")]


def test_a_run_says_who_generates() -> None:
    assert "transformers" in describe_backend(config_of({"rollout_backend": "hf"}), None)
    assert "the CPU" in describe_backend(config_of(), place(VllmConfig(), []))
    server = WARMUP["rollout_matching"]["vllm"]
    assert describe_backend(config_of({"vllm": server}), None) == "http://127.0.0.1:8000"


# --- What is found before anything is started -------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, Any]:
    """A section for a checkpoint with weights."""
    (tmp_path / "model.safetensors").touch()
    return {"model": str(tmp_path)}


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize("library", ["DeepSpeed", "FSDP"])
def test_a_launcher_that_shards_the_model_behind_the_configs_back_fails_fast(library: str) -> None:
    """Whole tensors could neither be moved out of a server's way nor pushed."""
    variable = f"ACCELERATE_USE_{library.upper()}"
    with pytest.raises(ContractError, match=library) as caught:
        check_launcher({variable: "true"})
    assert caught.value.where == variable
    check_launcher({variable: "false"})


@pytest.mark.req("DDP-01")
def test_more_processes_than_gpus_on_a_machine_fail_fast(four_gpus: Path) -> None:
    with pytest.raises(ContractError, match="2 GPUs are visible to 3 learner processes") as caught:
        check_launcher({"LOCAL_WORLD_SIZE": "3", CUDA_VISIBLE: "0,1"}, four_gpus)
    assert caught.value.where == CUDA_VISIBLE
    check_launcher({"LOCAL_WORLD_SIZE": "4"}, four_gpus)
    check_launcher({"LOCAL_WORLD_SIZE": "2"}, four_gpus / "none")


@pytest.mark.req("ROLL-03")
def test_the_learner_trains_on_the_first_gpu_of_its_server(
    four_gpus: Path, checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    config, environment = config_of(model=checkpoint), {CUDA_VISIBLE: "2,1,3"}
    placement = check_backend(config, environment, four_gpus)
    assert placement is not None
    narrowed = environment | learner_environment(placement)
    assert visible_gpus(narrowed, four_gpus) == [2]
    assert server_settings(config, placement, [tmp_path], "ipc", 640)["gpus"] == [2, 1]
    assert learner_environment(place(VllmConfig(), [])) == {}
    assert check_backend(config_of({"rollout_backend": "hf"}), environment, four_gpus) is None
    assert learner_environment(None) == {}


@pytest.mark.req("SYNC-01", "RES-04")
def test_adapters_of_several_processes_fail_fast(checkpoint: dict[str, Any]) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    vllm = {"enable_lora": True, "sync": {"mode": "auto"}}
    config = config_of({"vllm": vllm}, model=checkpoint, tuner=tuner)
    with pytest.raises(ContractError) as caught:
        check_backend(config, {CUDA_VISIBLE: "", "WORLD_SIZE": "2"})
    assert caught.value.where == "rollout_matching.vllm.sync.mode"
    check_backend(config, {CUDA_VISIBLE: ""})


def test_a_world_size_is_a_number(checkpoint: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as caught:
        check_backend(config_of(model=checkpoint), {"WORLD_SIZE": "two"})
    assert caught.value.where == "WORLD_SIZE"


def test_a_checkpoint_that_its_server_cannot_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="safetensors") as caught:
        check_backend(config_of(model={"model": str(tmp_path)}), {CUDA_VISIBLE: ""})
    assert caught.value.where == "model.model"


# --- Its life ---------------------------------------------------------------------------

# A process that answers /health/ until it is killed, or ends at once from its third start on.
STAND_IN = """
import http.server, pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
print("start", len(starts.read_text()), flush=True)
if len(starts.read_text()) > int(sys.argv[3]):
    sys.exit("no more of this")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status":"ok","state":"READY","weights_version":0,"server_epoch":"e-0",'
        body += b'"replicas":[]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


class StandIn(ServerProcess):
    """Another program in the place of the server's."""

    def __init__(self, folder: Path, port: int, lives: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", STAND_IN, str(folder / "starts"), str(port), str(lives)],
                stdout=output,
                stderr=output,
            )


@contextmanager
def kept(
    folder: Path,
    lives: int,
    pauses_s: Sequence[float],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[SupervisedServer]:
    (port,) = free_ports(1)
    server = SupervisedServer(lambda: StandIn(folder, port, lives), 30.0, pauses_s, clock)
    try:
        yield server
    finally:
        server.stop()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def given_up(server: SupervisedServer) -> bool:
    try:
        server.check()
    except RunError:
        return True
    return False


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


@pytest.mark.req("ROLL-03")
def test_a_server_that_dies_is_started_again_at_its_address(tmp_path: Path) -> None:
    with kept(tmp_path, lives=9, pauses_s=(0.0, 0.0, 0.0)) as server:
        address = server.base_url
        for lives in (2, 3):
            before = server.pid
            os.kill(before, signal.SIGKILL)
            wait_for(lambda before=before: server.pid != before)
            wait_for(lambda lives=lives: starts(tmp_path) == lives)
            server.await_ready()
            assert (server.base_url, server.starts) == (address, lives)


@pytest.mark.req("ROLL-03")
def test_a_server_that_dies_too_often_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with kept(tmp_path, lives=1, pauses_s=(0.0, 0.01)) as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: given_up(server))
        with pytest.raises(RunError, match=r"ended 3 times(?s:.)*no more of this"):
            server.await_ready()
    assert starts(tmp_path) == 3


@pytest.mark.req("ROLL-03")
def test_a_server_that_served_for_minutes_may_die_as_often_again(tmp_path: Path) -> None:
    now = 0.0

    def die_and_return(server: SupervisedServer, start: int) -> None:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.starts == start)
        server.await_ready()

    with kept(tmp_path, lives=9, pauses_s=(0.0,), clock=lambda: now) as server:
        for start in (2, 3):
            now += STEADY_S
            die_and_return(server, start)
        now += STEADY_S - 1
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: given_up(server))
    assert starts(tmp_path) == 3


@pytest.mark.req("ROLL-03")
def test_a_server_that_cannot_be_started_again_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    outcomes = [StandIn(tmp_path, port, lives=9)]

    def start() -> ServerProcess:
        if not outcomes:
            raise OSError("no space left for a log")
        return outcomes.pop()

    server = SupervisedServer(start, 30.0, (0.0, 0.0))
    try:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: given_up(server))
        with pytest.raises(RunError, match="could not be started again: no space left"):
            server.check()
    finally:
        server.stop()


@pytest.mark.req("ROLL-03")
def test_a_stopped_server_is_not_started_again(tmp_path: Path) -> None:
    with kept(tmp_path, lives=9, pauses_s=(0.0,)) as server:
        server.stop()
        server.stop()
    assert starts(tmp_path) == 1
    server.check()


def test_a_server_that_does_not_start_is_an_error_and_gone(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no more of this"), kept(tmp_path, 0, (0.0,)):
        pass
    assert starts(tmp_path) == 1
