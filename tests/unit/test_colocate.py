"""The colocated server without vLLM: its GPUs, its settings, its process."""

import itertools
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from learner.config import dump_mapping, dump_resolved, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.distributed.peers import Peers
from learner.models.load import Offload
from learner.rollout.backend import Journal, WeightsVersion
from learner.rollout.client import ServerUnreachable
from learner.rollout.colocate import learner_environment, media_dirs, place, server_settings
from learner.rollout.colocated_backend import ColocatedBackend
from learner.rollout.server_process import STEADY_S, ServerProcess, SupervisedServer, free_ports
from learner.training.input_checks import (
    check_backend,
    check_inputs,
    check_launcher,
    learner_processes,
)
from learner.types import RolloutOutput, Sample
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings, load_settings
from rollout_server.settings.repeat_config import repeat_config_from_environment
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import RequestConfig
from shared_contracts.machine import CUDA_VISIBLE, visible_gpus
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.rollout_config import VllmConfig
from shared_contracts.weights import Transport
from tests.unit.fleets import wait_until
from tests.unit.launched import StandIn
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.refusals import refused

WARMUP = load_mapping(Path(__file__).parents[2] / "configs/demo/warmup.yaml")
BARE = WARMUP | {"rollout_matching": {"max_new_tokens": 16}}

pytestmark = pytest.mark.req("ROLL-03")


def config_of(rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
    return parse_config(merge(BARE, {"rollout_matching": rollout or {}, **sections}))


# --- Its GPUs ---------------------------------------------------------------------------

UUIDS = ("GPU-8932f937-aaaa", "GPU-8932f937-bbbb", "GPU-11112222-cccc", "GPU-33334444-dddd")


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    """Files of the driver of a machine with four GPUs."""
    for index, name in enumerate(("0000:04", "0000:01", "0000:03", "0000:02")):
        folder = tmp_path / "gpus" / name
        folder.mkdir(parents=True)
        uuid = UUIDS[int(name[-1]) - 1]
        (folder / "information").write_text(f"Model: \t H100\nGPU UUID: \t {uuid}\nIRQ: {index}\n")
    return tmp_path / "gpus"


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, [0, 1, 2, 3]),
        ({CUDA_VISIBLE: "2,1"}, [2, 1]),
        ({CUDA_VISIBLE: ""}, []),
        ({CUDA_VISIBLE: "3,7,1"}, [3]),
        ({CUDA_VISIBLE: f"{UUIDS[2]},{UUIDS[0]}"}, [2, 0]),
        ({CUDA_VISIBLE: "GPU-3333, GPU-8932f937-b"}, [3, 1]),
        ({CUDA_VISIBLE: "GPU-3333,GPU-8932f937"}, [3]),
        ({CUDA_VISIBLE: "GPU-9,GPU-3333"}, []),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(
    four_gpus: Path, environment: dict[str, str], gpus: list[int]
) -> None:
    assert visible_gpus(environment, four_gpus) == gpus
    assert visible_gpus(environment, four_gpus / "none") == []


@pytest.mark.req("FULL-10")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MIG-41b3b2a1-9f6f-5a3e-8f0e-1f3f6b7e2c55", "a part of a GPU (MIG)"),
        ("NVIDIA H100", "no id and no UUID"),
    ],
)
def test_name_of_no_whole_gpu_is_refused(four_gpus: Path, name: str, said: str) -> None:
    with refused(CUDA_VISIBLE, said, "nvidia-smi -L"):
        visible_gpus({CUDA_VISIBLE: f"0,{name}"}, four_gpus)


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("gpus", "used", "said"),
    [
        ([4, 5, 6, 7, 8], (4, 5, 6, 7), ""),
        ([5, 2, 7], (5, 2), "3 visible"),  # a size must divide heads and weights
        ([0], (0,), "1 visible"),
        ([], (), "no GPU is visible"),
    ],
)
def test_default_is_four_gpus_and_fewer_are_reported(
    gpus: list[int], used: tuple[int, ...], said: str
) -> None:
    placement = place(VllmConfig(), gpus)
    assert (placement.gpus, placement.tensor_parallel_size) == (used, max(len(used), 1))
    assert placement.gpu_memory_utilization == 0.45
    assert place(VllmConfig(gpu_memory_utilization=0.3), gpus).gpu_memory_utilization == 0.3
    assert learner_environment(placement) == ({CUDA_VISIBLE: str(gpus[0])} if used else {})
    assert bool(placement.adapted) is bool(said)
    assert said in str(placement)
    assert str(placement).startswith("GPU" if used else "the CPU")


@pytest.mark.parametrize(
    ("asked", "gpus", "processes", "found"),
    [
        (5, [0, 1, 2, 3], 1, "5 GPUs are asked for"),
        (2, [], 1, "2 GPUs are asked for"),
        (2, [0, 1, 2], 3, "each of 3 learner processes"),
        (2, [], 2, "each of 2 learner processes"),
    ],
)
def test_size_that_does_not_fit_gpus_or_processes_is_refused(
    asked: int, gpus: list[int], processes: int, found: str
) -> None:
    with refused("rollout_matching.vllm.tensor_parallel_size", found):
        place(VllmConfig(tensor_parallel_size=asked), gpus, processes)


@pytest.mark.parametrize(
    ("processes", "gpus", "asked", "size"),
    [
        (2, [], None, 1),
        (2, [4, 5, 6], None, 2),
        (4, [0, 1, 2, 3], 2, 2),
        (6, [*range(8)], None, 2),
        (3, [0, 1, 2], None, 1),
    ],
)
def test_server_of_several_processes_has_a_worker_for_each(
    tmp_path: Path, processes: int, gpus: list[int], asked: int | None, size: int
) -> None:
    config = config_of({"vllm": {"mode": "colocate", "tensor_parallel_size": asked}})
    placement = place(config.rollout_matching.vllm, gpus, processes)
    assert placement.gpus == tuple(gpus[:processes])
    assert (placement.tensor_parallel_size, placement.replicas) == (size, processes // size)
    assert learner_environment(placement, processes) == {}
    settings = settings_of(config, gpus, "ipc", tmp_path, processes)
    assert settings.num_workers == processes


def settings_of(
    config: Config, gpus: list[int], transport: Transport, folder: Path, processes: int = 1
) -> ServerSettings:
    own, run = folder / "server.yaml", folder / "run.yaml"
    placement = place(config.rollout_matching.vllm, gpus, processes)
    own.write_text(dump_mapping(server_settings(config, placement, [folder], transport, 640)))
    run.write_text(dump_resolved(config))
    return load_settings(own, {}, run)


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize("gpus", [[], [3, 5]])
def test_server_reads_its_settings_and_the_training_yaml(tmp_path: Path, gpus: list[int]) -> None:
    guard = {"enabled": True, "max_object_keys": 9}
    own = {"repeat_terminate": guard, "vllm": {"enable_prefix_caching": False}}
    config = config_of({"decode_batch_size": 6, **own}, model={"torch_dtype": "bfloat16"})
    settings = settings_of(config, gpus, "ipc", tmp_path)
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


def test_the_server_reads_the_folders_of_all_images_of_a_sample() -> None:
    sample = Sample("1", (Path("/b/1.png"), Path("/a/2.png")), 64, 64, ())
    assert media_dirs([sample, sample]) == [Path("/a"), Path("/b")]


@pytest.mark.req("REP-01")
def test_non_server_vllm_paths_are_unchanged_by_this_delta(tmp_path: Path) -> None:
    settings = settings_of(config_of(), [], "gloo", tmp_path)
    assert not settings.repeat_terminate.enabled
    environment = engine_environment(settings)
    assert repeat_config_from_environment(environment) in (None, RepeatTerminateConfig())


# --- Checks before anything is started --------------------------------------------------


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize(
    ("environment", "where", "found"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP", "FSDP"),
        (
            {"LOCAL_WORLD_SIZE": "3", CUDA_VISIBLE: "0,1"},
            CUDA_VISIBLE,
            "2 GPUs are visible to 3 learner processes",
        ),
    ],
)
def test_launcher_that_shards_the_model_or_starts_too_many_processes_is_refused(
    four_gpus: Path, environment: dict[str, str], where: str, found: str
) -> None:
    with refused(where, found):
        check_launcher(environment, four_gpus)
    check_launcher({"ACCELERATE_USE_FSDP": "false", "LOCAL_WORLD_SIZE": "4"}, four_gpus)
    check_launcher({"LOCAL_WORLD_SIZE": "2"}, four_gpus / "none")


LORA = {"tuner": {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}}
ADAPTERS = {"vllm": {"enable_lora": True, "sync": {"mode": "auto"}}}


@pytest.mark.req("SYNC-01", "RES-04")
@pytest.mark.parametrize(
    ("rollout", "environment", "where", "found"),
    [
        (ADAPTERS, {"WORLD_SIZE": "2"}, "vllm.sync.mode", "2 learner processes"),
        ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "vllm.mode", "2 of 4 learner processes"),
    ],
    ids=["adapters", "machines"],
)
def test_processes_that_no_colocated_server_can_serve_are_refused(
    tmp_path: Path, rollout: dict[str, Any], environment: dict[str, str], where: str, found: str
) -> None:
    config = config_of(rollout, model={"model": str(tmp_path)}, **LORA)
    check_backend(config, {CUDA_VISIBLE: ""})
    with refused(f"rollout_matching.{where}", found):
        check_backend(config, {CUDA_VISIBLE: "", **environment})


def test_a_checkpoint_that_the_server_cannot_load_is_refused(
    tmp_path: Path, toy_checkpoint: Path
) -> None:
    model, run = tmp_path / "model", {"output_dir": str(tmp_path / "run")}
    channels = {"schedule": {"b_ratio": 0.5}}
    config = config_of(model={"model": str(model)}, training=run, stage2_ab=channels)
    with refused("model.model", "there is no folder"):
        check_inputs(config)
    shutil.copytree(toy_checkpoint, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with refused("model.model", "holds no *.safetensors file"):
        check_inputs(config)


def test_a_number_of_processes_that_is_none_is_refused() -> None:
    """`learner doctor` reads a WORLD_SIZE that the user sets."""
    for count in ("four", "0", ""):
        with pytest.raises(ContractError, match=f"'{count}' is no number of processes"):
            learner_processes({"WORLD_SIZE": count})


# --- Its process ------------------------------------------------------------------------


@contextmanager
def supervised(
    folder: Path, lives: int, pauses_s: Sequence[float], clock: Callable[[], float] = time.monotonic
) -> Iterator[SupervisedServer]:
    """lives: starts of the server after which it ends at once."""
    (port,) = free_ports(1)
    settings = {"lives": lives, "code": 1, "ready": True, "stubborn": False}
    start = partial(StandIn, folder, 0, port, settings)
    server = SupervisedServer(start, 60.0, pauses_s, clock)
    try:
        yield server
    finally:
        server.stop()


def test_server_that_ends_is_an_error_with_the_lines_since_its_start(tmp_path: Path) -> None:
    log, environment = tmp_path / "server.log", os.environ | {"PYTHONWARNINGS": "none"}
    log.write_text("an earlier start\n")
    options, url = ["--device", "cpu", "--model", str(tmp_path)], "http://127.0.0.2:9"
    with ServerProcess(options, log, environment=environment, base_url=url) as server:
        assert os.getpgid(server.pid) == server.pid, "an interrupt does not reach it"
        with refused(f"the rollout server at {url}", "ended with code 2", "Invalid -W option"):
            server.wait_until_healthy(60.0)
    assert "config.json cannot be read" in server.log_tail()
    assert "an earlier start" not in server.log_tail()
    assert log.read_text().startswith("an earlier start\n")


def test_server_that_is_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    (port,), made = free_ports(1), list[ServerProcess]()
    settings = {"lives": 9, "code": 1, "ready": False, "stubborn": False}

    def start() -> ServerProcess:
        made.append(StandIn(tmp_path, 0, port, settings))
        return made[-1]

    with pytest.raises(ContractError, match="not ready within 0 s"):
        SupervisedServer(start, 0.2)
    assert [each.code() is None for each in made] == [False]


def starts(folder: Path) -> int:
    return len((folder / "starts-0").read_text())


def test_server_that_dies_too_often_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    """The steady time before its first end does not count for the starts that fail after it."""
    clock = itertools.count(0.0, STEADY_S).__next__
    with supervised(tmp_path, lives=1, pauses_s=(0.0, 0.01), clock=clock) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"ended 3 times(?s:.)*no more of this"):
            wait_until(server.check)
    assert starts(tmp_path) == 3


def test_killed_server_is_started_again_at_its_address_and_a_steady_one_as_often_again(
    tmp_path: Path,
) -> None:
    now, looks = 0.0, list[float]()  # at the clock: when a start is ready, and when it has ended

    def clock() -> float:
        looks.append(now)
        return now

    with supervised(tmp_path, lives=9, pauses_s=(0.0,), clock=clock) as server:
        address = server.base_url
        for start in (2, 3):
            now += STEADY_S
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda start=start: len(looks) == 2 * start - 1)  # type: ignore[misc]
            assert server.base_url == address
        now += STEADY_S - 1
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RunError):
            wait_until(server.check)
    assert starts(tmp_path) == 3


def test_server_that_cannot_be_started_again_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with supervised(folder, lives=9, pauses_s=(0.0,)) as server:
        shutil.rmtree(folder)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="could not be restarted"):
            wait_until(server.check)


def test_stopped_server_is_not_started_again(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    with supervised(tmp_path, lives=9, pauses_s=(0.0,)) as server:
        (supervision,) = set(threading.enumerate()) - others
        server.stop()
        supervision.join(60)
        assert not supervision.is_alive()
        server.check()
    assert starts(tmp_path) == 1


# --- Room on the device -----------------------------------------------------------------


class Trained:
    """A small model after an optimizer step, with gradients of the next one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.backward()
        self.optimizer.step()
        self.backward()

    def backward(self) -> None:
        self.model(torch.arange(15.0).view(5, 3)).square().sum().backward()

    def tensors(self) -> list[torch.Tensor]:
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        gradients = [p.grad for p in self.model.parameters()]
        return [*self.model.parameters(), *self.model.buffers(), *state, *gradients]


def places(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def all_equal(one: Trained, other: Trained) -> bool:
    return all(map(torch.equal, one.tensors(), other.tensors()))


def test_moved_tensors_come_back_and_host_buffers_are_reused_and_freed_with_them() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def buffer(tensor: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(buffered := torch.empty_like(tensor)))
        return buffered

    trained, twin = Trained(), Trained()
    offload = Offload(trained.model, trained.optimizer, buffer)
    objects, seen = [id(tensor) for tensor in trained.tensors()], []
    for _ in range(3):
        with offload.room():
            seen.append(places(trained.tensors()))
            assert seen[-1] == places(host for each in made if (host := each()) is not None)
            assert all_equal(trained, twin), "a push sends from host memory"
        assert [id(tensor) for tensor in trained.tensors()] == objects
        assert not places(trained.tensors()) & seen[0], "a step must not change the buffers"
        for each in (trained, twin):
            each.optimizer.step()
        assert all_equal(trained, twin)
    assert seen[0] == seen[1] == seen[2]
    assert len(made) == len(trained.tensors())
    trained.optimizer.zero_grad()
    gone = sum(each() is None for each in made)
    assert gone == len(list(trained.model.parameters())), "the buffers of the gradients"


@pytest.mark.req("CFG-05")
def test_page_locked_memory_that_cannot_be_had_names_the_key_and_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "empty_like", refuse)
    found = "24 bytes (CUDA error: out of memory)"
    with refused("rollout_matching.offload.enabled", found, "vllm.mode to server"):
        Offload(nn.Linear(2, 3, device="meta"), None)


def test_the_buffers_of_a_new_optimizer_are_allocated_before_its_first_step() -> None:
    model, made = nn.Linear(2, 3), list[torch.Size]()

    def buffer(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.shape)
        return torch.empty_like(tensor)

    optimizer = torch.optim.AdamW(model.parameters())
    offload = Offload(model, optimizer, buffer)
    assert sorted(made) == [(3,)] * 3 + [(3, 2)] * 3
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with offload.room():
        assert [shape for shape in made[6:] if shape] == []


def test_only_requested_tensors_are_moved_and_an_error_restores_them() -> None:
    trained = Trained()
    before = [tensor.data_ptr() for tensor in trained.tensors()]
    with Offload(None, None, torch.empty_like).room():
        assert [tensor.data_ptr() for tensor in trained.tensors()] == before
    with pytest.raises(RunError), Offload(trained.model, None, torch.empty_like).room():
        raise RunError("the push broke")
    assert all_equal(trained, Trained())
    states = [v for s in trained.optimizer.state.values() for v in s.values()]
    assert places(states) <= set(before)


# --- The backend ------------------------------------------------------------------------


class Scene:
    """The pool, the server and its memory in one; records their calls in order.

    fails: a rollout fails. keeps: errors of the next calls that free the memory.
    gone: the server does not come back.
    """

    repeat_terminate_active = False

    def __init__(self, *keeps: RunError, fails: bool = False, gone: RunError | None = None) -> None:
        self.journal, self.version = Journal(), WeightsVersion()
        self.calls: list[str] = []
        self.keeps, self.fails, self.gone = [*keeps], fails, gone

    @contextmanager
    def room(self) -> Iterator[None]:
        self.calls.append("room")
        try:
            yield
        finally:
            self.calls.append("restored")

    def rollout(self, requests: object, request_config: object) -> list[RolloutOutput]:
        self.calls.append("rollout")
        if self.fails:
            self.fails = False
            raise RunError("nobody answers")
        return []

    def push_and_ask(self, version: int) -> list[str]:
        self.calls.append(f"push {version}")
        return [f"answers of {version}"]

    def prove(self, answers: list[str]) -> None:
        self.calls += [f"proof by {each}" for each in answers]

    def sleep(self) -> None:
        self.calls.append("sleep")
        if self.keeps:
            raise self.keeps.pop(0)

    def wake_up(self) -> None:
        self.calls.append("wake up")

    def close(self) -> None:
        if self.fails:
            raise RunError("no server")

    def check(self) -> None:
        if self.gone is not None:
            raise self.gone

    def stop(self) -> None:
        self.calls.append("stop")


def colocated(scene: Scene, *, sleeps: bool) -> ColocatedBackend:
    """sleeps: as on a GPU. On the CPU the server keeps its memory."""
    server = cast(Any, scene)
    return ColocatedBackend(server, server, scene.room, server if sleeps else None)


@pytest.mark.req("FULL-06")
def test_server_sleeps_while_the_learner_uses_the_gpu() -> None:
    """It frees its memory before the learner restores its own. A push wakes it, too."""
    scene = Scene()
    backend = colocated(scene, sleeps=True)
    backend.sleep()
    for version in (1, 2):
        with backend.serving():
            backend.push_weights(version)
            backend.rollout([], RequestConfig())
            backend.rollout([], RequestConfig())
    backend.rollout([], RequestConfig())
    assert scene.calls == [
        "sleep",
        *("room", "push 1", "rollout", "rollout", "sleep", "restored", "proof by answers of 1"),
        *("room", "push 2", "rollout", "rollout", "sleep", "restored", "proof by answers of 2"),
        *("room", "wake up", "rollout", "sleep", "restored"),
    ]


STARTING = ProblemError(Problem.of("not-ready", "its engines are starting", "replicas[0]"))
STUCK = ProblemError(Problem.of("weight-transfer-timeout", "its memory is stuck", "/sleep/"))
GONE = ServerUnreachable("connection refused")


@pytest.mark.parametrize(
    ("scene", "error", "moves"),
    [
        (Scene(fails=True), "nobody answers", ["rollout", "sleep"]),
        (Scene(STUCK, fails=True), "nobody answers", ["rollout", "sleep"]),
        (Scene(STUCK), "its memory is stuck", ["rollout", "sleep"]),
        (Scene(GONE, STARTING), None, ["rollout", *["sleep"] * 3]),
        (Scene(GONE, gone=RunError("ended 5 times")), "ended 5 times", ["rollout", "sleep"]),
    ],
    ids=["fails", "fails and keeps", "keeps", "restarts", "is gone for good"],
)
def test_failed_rollout_raises_its_own_error_and_a_restarted_server_is_put_to_sleep(
    scene: Scene, error: str | None, moves: list[str]
) -> None:
    with nullcontext() if error is None else pytest.raises(RunError, match=error):
        colocated(scene, sleeps=True).rollout([], RequestConfig())
    assert scene.calls == ["room", *moves, "restored"]


def test_rollout_after_a_failed_one_wakes_the_server_and_proves_nothing() -> None:
    """The weights may have changed since the push before the failure."""
    scene = Scene(fails=True)
    backend = colocated(scene, sleeps=True)

    def fail_after_a_push() -> None:
        with backend.serving():
            backend.push_weights(1)
            backend.rollout([], RequestConfig())

    with pytest.raises(RunError):
        fail_after_a_push()
    backend.rollout([], RequestConfig())
    assert scene.calls[5:] == ["room", "wake up", "rollout", "sleep", "restored"]


@pytest.mark.req("SYNC-08")
def test_processes_make_room_together_and_process_0_has_the_server_sleep() -> None:
    scenes, calls = [Scene(), Scene()], list[str]()

    def work(peers: Peers) -> None:
        scene = scenes[peers.rank]
        scene.calls = calls
        server = cast(Any, scene)
        backend = ColocatedBackend(server, server, scene.room, server, peers)
        backend.sleep()
        with backend.serving():
            backend.push_weights(1)
            backend.rollout([], RequestConfig())

    for rank in in_ranks(2, work):
        rank.result()
    moves = scenes[0].calls
    assert moves[:3] == ["sleep", "room", "room"]
    assert sorted(moves[3:7]) == ["push 1", "push 1", "rollout", "rollout"]
    assert moves[7] == "sleep"
    assert sorted(moves[8:]) == ["proof by answers of 1"] * 2 + ["restored"] * 2


def test_server_is_stopped_although_close_fails() -> None:
    scene = Scene(fails=True)
    with pytest.raises(RunError):
        colocated(scene, sleeps=False).close()
    assert scene.calls[-1] == "stop"
