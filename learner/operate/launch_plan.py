"""What `learner launch` will start, and everything that can be wrong with it beforehand.

    config and options -> check_launch -> Checked -> plan_launch -> LaunchPlan -> `launch`

Imports no torch.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from learner.config import dump_mapping, dump_resolved
from learner.config.schema import Config
from learner.cores import PASSIVE
from learner.operate.addresses import Listen, addresses_here
from learner.operate.server_process import SERVER_GRACE_S
from learner.operate.split import Asked, Split, learner_count, split_devices
from learner.preflight import RunInputs, check_inputs, generates
from learner.publish import publish_text
from learner.rollout.colocate import media_dirs, visible_gpus
from learner.rollout.distribution import rank_chunk_size
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.gpu_use import CUDA_VISIBLE
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE

T = TypeVar("T")

# In the run folder: what the servers say, and what they are told.
LOGS = "logs"
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


@dataclass
class Findings:
    """Errors of several looks, told together."""

    errors: list[ContractError] = field(default_factory=list)

    def of(self, look: Callable[[], T]) -> T | None:
        """What `look` returns; None where it raises, which is noted."""
        try:
            return look()
        except ContractErrors as error:
            self.errors += error.errors
        except ContractError as error:
            self.errors.append(error)
        return None

    def tell(self) -> None:
        if self.errors:
            raise ContractErrors(self.errors)


def check_launch(config: Config, asked: Asked, own: Mapping[str, Any]) -> Checked:
    """Everything that can be told before anything is started.

    own: settings that a person gave for all servers, as they are written.

    Raises:
        ContractErrors: all mistakes at once.
    """
    servers = _require_servers(config)
    found = Findings()
    found.of(_require_programs)
    found.of(lambda: _require_allowed(own))
    split = found.of(lambda: _split(asked, len(servers), own))
    listen = found.of(lambda: addresses_here(servers))
    learner = _alone(os.environ) | {"WORLD_SIZE": str(learner_count(asked))}
    inputs = found.of(lambda: check_inputs(config, learner))
    if split is not None:
        found.of(lambda: _check_rounds(config, split, own))
    found.tell()
    assert split is not None, "else it was told"
    assert listen is not None, "else it was told"
    assert inputs is not None, "else it was told"
    return Checked(split, listen, inputs, own)


def plan_launch(
    file: Path, config: Config, checked: Checked, environment: Mapping[str, str]
) -> LaunchPlan:
    """The processes of a launch. file: the config's. environment: this process's."""
    split, logs = checked.split, config.training.output_dir / LOGS
    run = logs / "run.yaml"
    files = {run: dump_resolved(config)}
    servers = []
    for index, (listen, gpus) in enumerate(zip(checked.listen, split.servers, strict=True)):
        settings = logs / f"server-{index}.yaml"
        files[settings] = dump_mapping(server_settings(config, checked, gpus))
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
        PASSIVE | (named if split.on_gpus else plain),
        [_learner_program(), "train", "--config", str(file.absolute())],
        split.processes,
        PASSIVE | threads | plain | seen,
        files,
    )


def server_settings(config: Config, checked: Checked, gpus: tuple[int, ...]) -> dict[str, Any]:
    """What a server is told beside the training YAML (`--run-config`) and its address."""
    own = checked.own
    given = [str(folder) for folder in own.get("allowed_media_dirs", ())]
    images = media_dirs([*checked.inputs.train, *checked.inputs.val])
    return {
        "dtype": config.model.torch_dtype,
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
        raise ContractError(
            "vllm", "not installed here, and servers need it", "Install the extra cpu or gpu"
        )


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


def _split(asked: Asked, servers: int, own: Mapping[str, Any]) -> Split:
    visible = visible_gpus(os.environ) if asked.device == "gpu" else []
    return split_devices(asked, servers, _count(own, "tensor_parallel_size"), visible)


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
