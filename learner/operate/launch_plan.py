"""What `learner launch` will start, and everything that can be wrong with it beforehand.

    config and options -> check_launch -> Checked -> plan_launch -> LaunchPlan -> `launch`

`split_devices` gives each GPU to a server or to the learner, `addresses_here` each server its
address. `shell_assignments` is what a launcher in shell needs instead (`learner preflight`).
Imports no torch.
"""

import ipaddress
import json
import os
import shlex
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from learner.config import Config, dump_mapping, dump_resolved
from learner.distributed.waiting import PASSIVE_WAIT
from learner.rollout.colocate import media_dirs
from learner.rollout.distribution import rank_chunk_size
from learner.rollout.server_process import SERVER_GRACE_S
from learner.runs.atomic_files import publish_text
from learner.runs.run_folder import LOGS
from learner.training.checkpoint_checks import context_of_run
from learner.training.input_checks import RunInputs, check_inputs, generates
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors
from shared_contracts.machine import CUDA_VISIBLE, visible_gpus
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, given_token

SERVER_GPUS, TRAIN_GPUS, PROCESSES = "--server-gpus", "--train-gpus", "--train-processes"


@dataclass(frozen=True)
class Asked:
    """The options as they were given; None or empty: not at all."""

    device: str
    server_gpus: tuple[str, ...] = ()
    train_gpus: str | None = None
    train_processes: int | None = None


@dataclass(frozen=True)
class Split:
    """servers: GPU ids of each server, in the order of the config; none on the CPU.

    learner: GPU ids of the learner, one for each process; none on the CPU.
    """

    servers: tuple[tuple[int, ...], ...]
    learner: tuple[int, ...]
    processes: int

    @property
    def on_gpus(self) -> bool:
        return bool(self.learner)


def split_devices(
    asked: Asked, servers: int, tensor_parallel_size: int, visible: Sequence[int]
) -> Split:
    """The split that was asked for.

    servers: how many the config has. tensor_parallel_size: GPUs of one replica.
    visible: ids of the GPUs there are for this process.

    Raises:
        ContractErrors: everything that is wrong with it.
    """
    if asked.device == "cpu":
        errors = list(_beside_cpu(asked))
    elif asked.device == "gpu":
        errors = list(_on_gpus(asked, servers, tensor_parallel_size, visible))
    else:
        errors = [ContractError("--device", f"{asked.device!r}", "Give gpu or cpu")]
    if errors:
        raise ContractErrors(errors)
    if asked.device == "cpu":
        return Split(((),) * servers, (), asked.train_processes or 1)
    learner = _ids(asked.train_gpus)
    return Split(tuple(map(_ids, asked.server_gpus)), learner, len(learner))


def learner_count(asked: Asked) -> int:
    """How many learner processes are meant, as far as can be told of a split with faults."""
    if asked.device == "cpu":
        return max(asked.train_processes or 1, 1)
    return len(_ids(asked.train_gpus)) if _is_list(asked.train_gpus) else 1


def _beside_cpu(asked: Asked) -> Iterator[ContractError]:
    for option, shown in ((SERVER_GPUS, asked.server_gpus), (TRAIN_GPUS, asked.train_gpus)):
        if shown:
            yield ContractError(option, "given, and --device is cpu", "Give one of the two")
    if asked.train_processes is not None and asked.train_processes < 1:
        yield ContractError(PROCESSES, f"{asked.train_processes}", "Give 1 or more")


def _on_gpus(
    asked: Asked, servers: int, tensor_parallel_size: int, visible: Sequence[int]
) -> Iterator[ContractError]:
    """The rule: each server and the learner have a list of GPUs; each visible GPU is in one."""
    if asked.train_processes is not None:
        found = f"{asked.train_processes}, and on GPUs each of {TRAIN_GPUS} has one process"
        yield ContractError(PROCESSES, found, "Leave it out, or give --device cpu")
    if len(asked.server_gpus) != servers:
        found = f"given {len(asked.server_gpus)} times for {servers} server(s) of {_SERVERS}"
        do = "Give it once for each server, in their order, as in 0,1; or give --device cpu"
        yield ContractError(SERVER_GPUS, found, do)
    if asked.train_gpus is None:
        do = "Name the GPUs of the learner, as in 3 or 2,3; or give --device cpu"
        yield ContractError(TRAIN_GPUS, "not given", do)
    if not visible:
        found = f"gpu, and no GPU is here that {CUDA_VISIBLE} does not hide"
        yield ContractError("--device", found, "Give cpu, or start it on a machine with GPUs")
        return
    uses = Counter[int]()
    lists = [(SERVER_GPUS, text) for text in asked.server_gpus]
    lists += [(TRAIN_GPUS, asked.train_gpus)] if asked.train_gpus is not None else []
    for option, text in lists:
        if not _is_list(text):
            yield ContractError(option, f"{text!r} is no list of GPU ids", "Write it like 0,1,2")
            continue
        ids = _ids(text)
        if missing := sorted(set(ids) - set(visible)):
            found = f"no GPU {_shown(missing)} here, there are {_shown(visible)}"
            do = f"Name GPUs that this machine has and {CUDA_VISIBLE} does not hide"
            yield ContractError(option, found, do)
        if option == SERVER_GPUS and len(ids) % tensor_parallel_size:
            found = f"{len(ids)} GPUs ({text}) do not split into replicas of "
            found += f"tensor_parallel_size {tensor_parallel_size}"
            yield ContractError(option, found, f"Give a multiple of {tensor_parallel_size}")
        uses.update(ids)
    if twice := sorted(gpu for gpu, count in uses.items() if count > 1):
        found = f"GPU {_shown(twice)} is named more than once, by it or by {TRAIN_GPUS}"
        yield ContractError(SERVER_GPUS, found, "Name every GPU once")


def _is_list(text: str | None) -> bool:
    return text is not None and all(part.strip().isdecimal() for part in text.split(","))


def _ids(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text is not None else ()


def _shown(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


_SERVERS = "rollout_matching.vllm.server.servers"
_ELSEWHERE = (
    "Start that server where it is to run, with `rollout-server serve`, and then the learner "
    "with deploy/train_stage2.sh or `learner train`"
)
_HTTP_PORT = 80


@dataclass(frozen=True)
class Listen:
    """Where a server listens. host: an IPv4 address of this machine."""

    base_url: str
    host: str
    port: int


def addresses_here(
    servers: Sequence[ServerAddress], environment: Mapping[str, str] = os.environ
) -> list[Listen]:
    """Where each server of the config will listen, on this machine, at ports that are free.

    Both ports of all servers are bound at the same time, then released. So a port that is taken and
    a port with two uses are one fault.

    Raises:
        ContractErrors: each that cannot, and why.
    """
    found = CheckErrors()
    # An unusable token is an error of its own and counts as a token.
    protected = found.of(lambda: given_token(environment) is not None) is not False
    listens: list[Listen] = []
    with ExitStack() as held:
        for index, server in enumerate(servers):
            where = f"{_SERVERS}[{index}]"
            address = partial(_address, server.base_url, f"{where}.base_url", protected)
            if (listen := found.of(address)) is None:
                continue
            listens.append(listen)
            for key, port in (("base_url", listen.port), ("group_port", server.group_port)):
                found.of(partial(_bind, held, f"{where}.{key}", listen.host, port))
    found.raise_all()
    return listens


def _address(base_url: str, where: str, protected: bool) -> Listen:
    parts = urlsplit(base_url)
    if parts.scheme != "http" or parts.path:
        found = f"{base_url}, and a server that is launched answers plain http without a path"
        raise ContractError(where, found, f"Write it like http://127.0.0.1:8000. {_ELSEWHERE}")
    assert parts.hostname, "checked with the config"
    port = parts.port or _HTTP_PORT
    try:
        host = socket.getaddrinfo(parts.hostname, port, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise ContractError(
            where, f"{base_url} is no known host ({error.strerror})", _ELSEWHERE
        ) from None
    assert isinstance(host, str), "of IPv4"
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        raise ContractError(
            where, f"{base_url} is another host than this one", _ELSEWHERE
        ) from None
    if not protected and not ipaddress.ip_address(host).is_loopback:
        raise ContractError(
            TOKEN_VARIABLE,
            f"not set, nor {TOKEN_FILE_VARIABLE}, and {base_url} can be reached from other "
            "machines",
            "Set it to a secret of your own, such as 32 random characters; or use 127.0.0.1",
        )
    return Listen(base_url, host, port)


def _bind(held: ExitStack, where: str, host: str, port: int) -> None:
    """Listen at a port, as a server would, until `held` is closed."""
    try:
        held.enter_context(socket.create_server((host, port)))
    except OSError as error:
        raise ContractError(
            where,
            f"port {port} of {host} cannot be listened at ({os.strerror(error.errno or 0)})",
            f"Give each port one use and stop what listens there (`ss -ltnp sport = :{port}` names "
            "it). If it is a rollout server that you want to use, start the learner alone with "
            "deploy/train_stage2.sh or `learner train`",
        ) from None


# In the folder `LOGS` of the run: what the servers are told.
SERVER_CONFIG = "--server-config"
# Settings of a server that follow from the training YAML and the options of the launch.
_DERIVED = ("model", "device", "gpus", "host", "port", "parent_pid")
# What tells a process that it is one of several, wherever this one was started.
_ONE_OF_SEVERAL = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


@dataclass(frozen=True)
class Checked:
    """split: which GPUs do what. listen: of each server. own: settings given for all servers."""

    split: Split
    listen: list[Listen]
    inputs: RunInputs
    own: Mapping[str, Any]


@dataclass(frozen=True)
class ServerPlan:
    """A server to be started.

    options: of `rollout-server serve`, beside its address. grace_s: its `grace_seconds`.
    """

    listen: Listen
    gpus: tuple[int, ...]
    options: list[str]
    log: Path
    grace_s: float = SERVER_GRACE_S

    def __str__(self) -> str:
        device = f"GPU {','.join(map(str, self.gpus))}" if self.gpus else "the CPU"
        return f"{self.listen.base_url} on {device}"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is started. files: what the servers read, by path."""

    servers: list[ServerPlan]
    server_environment: dict[str, str]
    learner: list[str]
    processes: int
    learner_environment: dict[str, str]
    files: dict[Path, str]

    def write_files(self) -> None:
        """Raises ContractError where the run folder cannot be written to."""
        for path, text in self.files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                publish_text(path, text)
            except OSError as error:
                raise ContractError(
                    "training.output_dir",
                    f"{path} cannot be written ({error.strerror})",
                    "Name a folder that can be written to",
                ) from error


def check_launch(config: Config, asked: Asked, own: Mapping[str, Any]) -> Checked:
    """Everything that can be told before anything is started.

    own: settings that a person gave for all servers, as they are written.

    Raises:
        ContractErrors: all mistakes at once.
    """
    servers = _require_servers(config)
    found = CheckErrors()
    found.of(_require_programs)
    found.of(lambda: _require_allowed(own))
    size = _count(own, "tensor_parallel_size")
    seen = partial(visible_gpus, os.environ) if asked.device == "gpu" else list[int]
    split = found.of(lambda: split_devices(asked, len(servers), size, seen()))
    listen = found.of(lambda: addresses_here(servers))
    learner = _alone(os.environ) | {"WORLD_SIZE": str(learner_count(asked))}
    inputs = found.of(lambda: check_inputs(config, learner))
    if split is not None:
        found.of(lambda: _check_rounds(config, split, own))
    found.raise_all()
    assert split is not None and listen is not None and inputs is not None  # noqa: PT018
    return Checked(split, listen, inputs, own)


def plan_launch(
    file: Path, config: Config, checked: Checked, environment: Mapping[str, str]
) -> LaunchPlan:
    """The processes of a launch. file: the config's. environment: this process's."""
    split, logs = checked.split, config.training.output_dir / LOGS
    run = logs / "run.yaml"
    files = {run: dump_resolved(config)}
    servers, context = [], context_of_run(config, [*checked.inputs.train, *checked.inputs.val])
    for index, (listen, gpus) in enumerate(zip(checked.listen, split.servers, strict=True)):
        settings = logs / f"server-{index}.yaml"
        files[settings] = dump_mapping(server_settings(config, checked, gpus, context))
        options = ["--config", str(settings), "--run-config", str(run)]
        log, grace_s = logs / f"server-{index}.log", _grace_s(checked.own)
        servers.append(ServerPlan(listen, gpus, options, log, grace_s))
    plain = _alone(environment)
    named = {k: v for k, v in plain.items() if k != CUDA_VISIBLE}  # servers are told their ids
    seen = {CUDA_VISIBLE: ",".join(map(str, split.learner))}
    # As torchrun would set it, or accelerate, which both say so at length.
    threads = {"OMP_NUM_THREADS": str(1 if split.processes > 1 else os.cpu_count() or 1)}
    return LaunchPlan(
        servers,
        PASSIVE_WAIT | (named if split.on_gpus else plain),
        [_learner_program(), "train", "--config", str(file.absolute())],
        split.processes,
        PASSIVE_WAIT | threads | plain | seen,
        files,
    )


def server_settings(
    config: Config, checked: Checked, gpus: tuple[int, ...], context: int
) -> dict[str, Any]:
    """What a server is told beside the training YAML (`--run-config`) and its address.

    context: tokens of the longest prompt with its answer.
    """
    own = checked.own
    given = [str(folder) for folder in own.get("allowed_media_dirs", ())]
    images = media_dirs([*checked.inputs.train, *checked.inputs.val])
    return {
        "dtype": config.model.torch_dtype,
        "max_model_len": context,
        **own,
        "model": str(config.model.model),
        **({"device": "gpu", "gpus": list(gpus)} if gpus else {"device": "cpu"}),
        "allowed_media_dirs": sorted({*given, *map(str, images)}),
    }


def _require_servers(config: Config) -> tuple[ServerAddress, ...]:
    """The servers of a run that asks some."""
    if not generates(config):
        raise ContractError(
            "stage2_ab.schedule.b_ratio",
            "0 without evaluation: this run asks for no rollouts, and needs no server",
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


def _require_programs() -> None:
    """What is started is installed."""
    _learner_program()
    if find_spec("vllm") is None:
        found = "not installed here, and servers need it"
        raise ContractError("vllm", found, "Install the extra cpu or gpu")


def _learner_program() -> str:
    """`learner`, of this environment before any other."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which("learner", path=folders)) is None:
        raise ContractError("PATH", "there is no program `learner`", "Install this project")
    return program


def _require_allowed(own: Mapping[str, Any]) -> None:
    """Nothing that each server gets from elsewhere, or that its learner would have to know."""
    if given := [key for key in _DERIVED if key in own]:
        raise ContractError(
            SERVER_CONFIG,
            f"it has {', '.join(given)}, which each server gets from the training YAML and the "
            "options of the launch",
            "Remove it there" if len(given) == 1 else "Remove them there",
        )
    if "token_file" in own:
        raise ContractError(
            SERVER_CONFIG,
            "it has token_file, which the learner does not read",
            f"Remove it there and set {TOKEN_FILE_VARIABLE}, which both programs read",
        )
    folders = own.get("allowed_media_dirs", [])
    if not isinstance(folders, list):
        raise ContractError(SERVER_CONFIG, "allowed_media_dirs is no list", "Write a list")


def _count(own: Mapping[str, Any], key: str) -> int:
    """A number among settings that nobody has checked yet: the server will."""
    value = own.get(key)
    return value if type(value) is int and value > 0 else 1


def _grace_s(own: Mapping[str, Any]) -> float:
    """The grace of a server that starts; with another value than a number of seconds none does."""
    value = own.get("grace_seconds")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        return SERVER_GRACE_S
    return float(value)


def _check_rounds(config: Config, split: Split, own: Mapping[str, Any]) -> None:
    """Together the servers decode a request of every learner process at once (DIST-04)."""
    on_cpu = _count(own, "replicas") * _count(own, "tensor_parallel_size")
    sizes = [len(gpus) or on_cpu for gpus in split.servers]
    rank_chunk_size(config.rollout_matching.decode_batch_size, sizes, split.processes)


def _alone(environment: Mapping[str, str]) -> dict[str, str]:
    """What remains where the process is none of several that a launcher started."""
    return {name: value for name, value in environment.items() if name not in _ONE_OF_SEVERAL}


class RolloutContract(TypedDict):
    """vllm_mode: `colocate` or `server`, None without vLLM; server_base_urls: as declared."""

    rollout_backend: str
    vllm_mode: str | None
    server_base_urls: list[str]


def rollout_contract(config: Config) -> RolloutContract:
    """Which backend generates, and its servers, also of a run that asks them nothing."""
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    return {
        "rollout_backend": rollout.rollout_backend,
        "vllm_mode": None if rollout.backend == "hf" else rollout.vllm.mode,
        "server_base_urls": [entry.base_url for entry in server.servers] if server else [],
    }


def shell_assignments(config: Config) -> str:
    """Text that assigns variables in any POSIX shell that evaluates it (CFG-09).

    ROLLOUT_CONTRACT_JSON      one line of JSON and a newline: `rollout_contract`
    ROLLOUT_SERVER_TIMEOUT_S   seconds a rollout server may take to answer; empty without one
    """
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    values = {
        "ROLLOUT_CONTRACT_JSON": f"{json.dumps(rollout_contract(config))}\n",
        "ROLLOUT_SERVER_TIMEOUT_S": str(server.timeout_s) if server else "",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
