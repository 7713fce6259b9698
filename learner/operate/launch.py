"""`learner launch`: the servers and the learner on one machine (DEP-02). Imports no torch.

    config and options -> plan_launch, which starts no process -> LaunchPlan
    servers start -> all are ready -> the learner trains
        -> the learner ends, a server fails for good, or a signal arrives
        -> the learner is stopped, then the servers

If this process is killed, the kernel kills its children (parent-death signal).
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from learner.config import Config, dump_mapping, dump_resolved
from learner.distributed.waiting import PASSIVE_WAIT, waiting_for
from learner.operate.torchrun import SHUTDOWN_S
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.colocate import media_dirs
from learner.rollout.distribution import rank_chunk_size
from learner.rollout.server_process import PAUSES_S, SERVER_GRACE_S, ServerProcess, SupervisedServer
from learner.runs.atomic_files import publish_text
from learner.runs.run_folder import LOGS
from learner.training.checkpoint_checks import context_of_run
from learner.training.input_checks import RunInputs, check_inputs, generates
from shared_contracts.cli import RUN_FAILED
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors, RunError
from shared_contracts.machine import CUDA_VISIBLE, visible_gpus
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE

SERVER_GPUS, TRAIN_GPUS, PROCESSES = "--server-gpus", "--train-gpus", "--train-processes"
SERVER_CONFIG = "--server-config"
_SERVERS = "rollout_matching.vllm.server.servers"
# Server settings that follow from the training YAML and the options of the launch.
_DERIVED = ("model", "device", "gpus", "host", "port", "parent_pid", "token_file")
# Variables of torchrun, which may have started this process.
_TORCHRUN_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
_ELSEWHERE = (
    "Write it like http://127.0.0.1:8000, give each port one use, and stop what listens there "
    "(`ss -ltnp`). For servers that run already, or elsewhere (`rollout-server serve`), start the "
    "learner alone with deploy/train_stage2.sh or `learner train`"
)
Tell = Callable[[str], object]
# Longer than the grace time after which torchrun itself kills.
STOP_GRACE_S = SHUTDOWN_S + 10.0
# Imports, weights, and on GPUs the capture of graphs.
START_S = 900.0
# Timeout of a readiness call.
_CALL_S = 2.0
_POLL_S = 0.2


@dataclass(frozen=True)
class LaunchOptions:
    """Options as given on the command line; None or empty: not given."""

    device: Literal["gpu", "cpu"]
    server_gpus: tuple[str, ...] = ()
    train_gpus: str | None = None
    train_processes: int | None = None

    @property
    def processes(self) -> int:
        return self.train_processes or len((self.train_gpus or "").split(","))


def split_devices(
    options: LaunchOptions, servers: int, tensor_parallel_size: int, visible: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the GPUs of each server in config order, and those of the learner; none on the CPU.

    servers: number of servers in the config. tensor_parallel_size: GPUs of one replica.
    visible: ids of the GPUs that this process may use.

    Raises:
        ContractErrors: all faults of the options.
    """
    given = [(SERVER_GPUS, text) for text in options.server_gpus]
    if options.device == "cpu":
        if given or options.train_gpus:
            found = f"cpu, beside {SERVER_GPUS} or {TRAIN_GPUS}"
            raise ContractError("--device", found, "Give one of the two")
        return [()] * (servers + 1)
    if not visible:
        do = f"Use a machine with GPUs, name GPUs in {CUDA_VISIBLE}, or give --device cpu"
        raise ContractError("--device", "gpu, and no GPU is visible here", do)
    faults, lists = list[tuple[str, str, str]](), list[tuple[int, ...]]()
    if options.train_processes is not None:
        do = "Leave it out: each GPU has one process"
        faults.append((PROCESSES, f"{options.train_processes}", do))
    if len(given) != servers:
        found = f"given {len(given)} times for {servers} server(s) of {_SERVERS}"
        do = "Give it once for each server, in their order, as in 0,1"
        faults.append((SERVER_GPUS, found, do))
    for option, text in (*given, (TRAIN_GPUS, options.train_gpus or "")):
        ids = [int(part) for part in text.split(",") if part.strip() in map(str, visible)]
        lists.append(tuple(ids))
        if len(ids) <= text.count(","):
            found = f"{text!r}, and the GPUs here are {_id_list(visible)}"
            faults.append(
                (option, found, f"Name some of them, as in 0,1; {CUDA_VISIBLE} hides GPUs")
            )
        elif option == SERVER_GPUS and len(ids) % tensor_parallel_size:
            found = f"{len(ids)} GPUs ({text}) do not split into replicas of "
            found += f"tensor_parallel_size {tensor_parallel_size}"
            faults.append((option, found, f"Give a multiple of {tensor_parallel_size}"))
    if repeated := [gpu for gpu, count in Counter(chain(*lists)).items() if count > 1]:
        found = f"GPU {_id_list(repeated)} is named more than once"
        faults.append((f"{SERVER_GPUS}, {TRAIN_GPUS}", found, "Name every GPU once"))
    if faults:
        raise ContractErrors([ContractError(*fault) for fault in faults])
    return lists


def _id_list(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def addresses_here(servers: Sequence[ServerAddress]) -> list[tuple[str, str, int]]:
    """Return URL, IPv4 address and port of each server of the config, all on this machine.

    Binds both ports of all servers at the same time, then releases them: this finds used ports and
    ports that the config names twice.

    Raises:
        ContractErrors: all addresses that cannot be bound, with reasons.
    """
    faults, addresses = CheckErrors(), list[tuple[str, str, int]]()
    with ExitStack() as held:
        for index, server in enumerate(servers):
            where, url = f"{_SERVERS}[{index}]", urlsplit(server.base_url)
            if url.scheme != "http" or url.path:
                found = f"{server.base_url} is no plain http, or has a path"
                faults.errors.append(ContractError(f"{where}.base_url", found, _ELSEWHERE))
                continue
            host, port = str(url.hostname), url.port or 80
            for key, number in (("base_url", port), ("group_port", server.group_port)):
                try:
                    listening = held.enter_context(socket.create_server((host, number)))
                except OSError as error:
                    found = f"{host}:{number} cannot be bound ({error})"
                    faults.errors.append(ContractError(f"{where}.{key}", found, _ELSEWHERE))
                    break
                host = listening.getsockname()[0]
            addresses.append((server.base_url, host, port))
    faults.raise_all()
    return addresses


@dataclass(frozen=True)
class LaunchPlan:
    """All processes to start.

    servers: starts of the servers by their descriptions, in config order. learner: the command.
    files: texts of the server configs, by path.
    """

    inputs: RunInputs
    servers: dict[str, partial[ServerProcess]]
    learner: list[str]
    processes: int
    learner_environment: dict[str, str]
    files: dict[Path, str]

    def write_files(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            publish_text(path, text)


def plan_launch(
    file: Path,
    config: Config,
    options: LaunchOptions,
    own: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Check everything that needs no started process, and plan the processes.

    file: the training YAML. own: the content of `--server-config`, for all servers.
    environment: this process's.

    Raises:
        ContractErrors: all faults at once.
    """
    errors, servers_of_config = CheckErrors(), _require_servers(config)
    alone = {name: v for name, v in environment.items() if name not in _TORCHRUN_VARIABLES}
    errors.of(lambda: _require_allowed(own))
    size = int(_number(own, "tensor_parallel_size", 1))
    visible = visible_gpus(environment) if options.device == "gpu" else []
    split = errors.of(lambda: split_devices(options, len(servers_of_config), size, visible))
    addresses = errors.of(lambda: addresses_here(servers_of_config))
    processes = options.processes
    launched = alone | {"WORLD_SIZE": str(processes)}
    inputs = errors.of(lambda: check_inputs(config, launched))
    if split is not None:  # each process has a request in every decoded batch (DIST-04)
        on_cpu = int(_number(own, "replicas", 1)) * size
        sizes = [len(gpus) or on_cpu for gpus in split[:-1]]
        decoded = config.rollout_matching.decode_batch_size
        errors.of(lambda: rank_chunk_size(decoded, sizes, processes))
    errors.raise_all()
    assert split and addresses and inputs  # noqa: PT018  # else there are errors
    *of_servers, of_learner = split

    samples, logs = [*inputs.train, *inputs.val], config.training.output_dir / LOGS
    context, run = context_of_run(config, samples), logs / "run.yaml"
    files, servers = {run: dump_resolved(config)}, dict[str, partial[ServerProcess]]()
    around = PASSIVE_WAIT | alone
    if of_learner:  # servers have ids of GPUs
        around.pop(CUDA_VISIBLE, None)
    grace_s = _number(own, "grace_seconds", SERVER_GRACE_S)
    for index, ((url, host, port), gpus) in enumerate(zip(addresses, of_servers, strict=True)):
        settings, log = logs / f"server-{index}.yaml", logs / f"server-{index}.log"
        files[settings] = dump_mapping(
            {
                "dtype": config.model.torch_dtype,
                "max_model_len": context,
                **own,
                "model": str(config.model.model),
                **({"device": "gpu", "gpus": list(gpus)} if gpus else {"device": "cpu"}),
                "allowed_media_dirs": sorted(
                    {*map(str, own.get("allowed_media_dirs", ())), *map(str, media_dirs(samples))}
                ),
            }
        )
        words = ["--config", str(settings), "--run-config", str(run)]
        device = f"GPU {_id_list(gpus)}" if gpus else "the CPU"
        start = partial(ServerProcess, words, log, port, around, host, url, grace_s)
        servers[f"{url} on {device} (log: {log})"] = start
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("learner", path=programs) or "learner"
    # torchrun's default for several processes, without its warning.
    threads = {"OMP_NUM_THREADS": str(1 if processes > 1 else os.cpu_count() or 1)}
    return LaunchPlan(
        inputs,
        servers,
        [program, "train", "--config", str(file.absolute())],
        processes,
        PASSIVE_WAIT | threads | alone | {CUDA_VISIBLE: _id_list(of_learner)},
        files,
    )


def _require_servers(config: Config) -> tuple[ServerAddress, ...]:
    if not generates(config):
        raise ContractError(
            "stage2_ab.schedule.b_ratio",
            "0 without evaluation: this run requests no rollouts, and needs no server",
            "Use `learner train`, or torchrun with it",
        )
    rollout = config.rollout_matching
    if rollout.backend != "server":
        key = "rollout_backend" if rollout.backend == "hf" else "vllm.mode"
        raise ContractError(
            f"rollout_matching.{key}",
            f"{rollout.backend}, and `learner launch` starts servers",
            "Set rollout_matching.vllm.mode to server and name them, or use `learner train`",
        )
    assert rollout.vllm.server is not None, "checked with the config"
    return rollout.vllm.server.servers


def _require_allowed(own: Mapping[str, Any]) -> None:
    if given := [key for key in _DERIVED if key in own]:
        raise ContractError(
            SERVER_CONFIG,
            f"it has {', '.join(given)}, which come from the training YAML, the options of the "
            f"launch, or {TOKEN_FILE_VARIABLE} for both programs",
            "Remove them there",
        )
    if not isinstance(own.get("allowed_media_dirs", []), list):
        raise ContractError(SERVER_CONFIG, "allowed_media_dirs is no list", "Write a list")


def _number(own: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number of `own`, else `default`; the server checks the value itself."""
    value = own.get(key)
    return value if isinstance(value, int | float) and value > 0 else default


def shell_assignments(config: Config) -> str:
    """Return variable assignments for a POSIX shell (CFG-09).

    ROLLOUT_CONTRACT_JSON      one line of JSON and a newline: the rollout backend and its servers,
                               also for a run that sends no requests
    ROLLOUT_SERVER_TIMEOUT_S   timeout of rollout servers in seconds; empty without servers
    """
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    contract = {
        "rollout_backend": rollout.rollout_backend,
        "vllm_mode": None if rollout.backend == "hf" else rollout.vllm.mode,
        "server_base_urls": [entry.base_url for entry in server.servers] if server else [],
    }
    values = {
        "ROLLOUT_CONTRACT_JSON": f"{json.dumps(contract)}\n",
        "ROLLOUT_SERVER_TIMEOUT_S": str(server.timeout_s) if server else "",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


class StopRequested(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP of this process from now on, in the main thread.

    A signal stays ignored if the parent ignored it, as nohup does.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._received.append(number))

    def pause(self, seconds: float = _POLL_S) -> None:
        """Sleep; raise StopRequested if a signal has arrived."""
        time.sleep(seconds)
        if self._received:
            raise StopRequested(self._received[0])


def launch(
    starts: Sequence[Callable[[], ServerProcess]],
    learner: Callable[[], subprocess.Popen[bytes]],
    tell: Tell,
    pauses_s: Sequence[float] = PAUSES_S,
) -> int:
    """Run servers and learner; return the learner's exit code, or 128 plus a stop signal.

    A server that ends while the learner runs is restarted.

    starts: a function for each server, which starts it. learner: starts the learner. tell: prints
    a line. pauses_s: of `SupervisedServer`.

    Raises:
        ContractError: a server ended at its start, or did not become ready.
        RunError: a server failed for good.
    """
    signals, processes = StopSignals(), list[ServerProcess]()
    running: Sequence[ServerProcess | SupervisedServer] = processes
    try:
        for start in starts:
            processes.append(start())
        _wait_until_ready(processes, signals, tell)
        running = servers = [
            SupervisedServer(start, START_S, pauses_s, first=first)
            for start, first in zip(starts, processes, strict=True)
        ]
        tell("Starting the learner")
        return _run_learner(learner(), servers, signals, tell)
    except StopRequested as stop:
        return 128 + stop.number
    finally:
        with suppress(OSError):  # the terminal may be gone
            tell("Stopping the servers")
        with ThreadPoolExecutor(max(len(running), 1)) as pool:
            for server in running:
                pool.submit(server.stop)


def start_learner(
    command: list[str], processes: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start torchrun with `processes` times `command`; they end with this process.

    They have a session of their own: an interrupt of the terminal reaches this process only.
    """
    torchrun = [sys.executable, "-m", "learner.operate.torchrun", str(os.getpid())]
    return subprocess.Popen(
        [*torchrun, "--standalone", f"--nproc-per-node={processes}", "--", *command],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def _wait_until_ready(servers: Sequence[ServerProcess], signals: StopSignals, tell: Tell) -> None:
    """Wait until every server accepts pushes.

    Raises:
        ContractError: a server ended or was not ready in time; the message has its last lines.
        StopRequested: a signal arrived.
    """
    began, waiting, reason = time.monotonic(), list(servers), ""
    with waiting_for("the rollout servers", lambda: reason):
        while waiting:
            signals.pause()
            for server in servers:
                if (code := server.code()) is not None:
                    raise server.failure(f"it ended with code {code}")
            passed, server = time.monotonic() - began, waiting[0]
            try:
                RolloutClient(server.base_url, _CALL_S).check_pushable()
            except SERVER_ERRORS as error:
                reason = str(error)
                if passed > START_S:
                    raise server.failure(f"not ready within {START_S:g} s ({reason})") from error
                continue
            tell(f"Ready after {passed:.0f} s: {server.base_url}")
            waiting.pop(0)


def _run_learner(
    learner: subprocess.Popen[bytes],
    servers: Sequence[SupervisedServer],
    signals: StopSignals,
    tell: Tell,
) -> int:
    """Return the learner's exit code; stop it if a server fails for good or a signal arrives."""
    try:
        while learner.poll() is None:
            for server in servers:
                server.check()
            signals.pause()
        code = learner.returncode if learner.returncode >= 0 else RUN_FAILED
        tell(f"The learner ended with code {code}")
        return code
    except (RunError, StopRequested) as reason:
        with suppress(OSError):
            tell(f"Stopping the learner ({str(reason).splitlines()[0]})")
        raise
    finally:
        learner.terminate()
        with suppress(subprocess.TimeoutExpired):
            learner.wait(STOP_GRACE_S)
        learner.kill()  # and the kernel kills its processes
        learner.wait()
