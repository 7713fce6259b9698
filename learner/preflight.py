"""What can be found wrong before torch is imported or a model is loaded.

check_inputs(config)   data files, images, checkpoint folder, coordinate tokens, the backend,
                       and what the run folder holds already
reach_servers(config)  every server answers, has the settings of the config and no other learner
differences(...)       what a server has otherwise; asked again when one comes back
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from learner.config.schema import Config
from learner.config.sync_mode import resolved_sync_mode, wanted_sync_mode
from learner.config.trackers import require_trackers
from learner.config.training import TrainingConfig
from learner.coords import COORD_BINS, coord_token
from learner.data.jsonl import read_samples
from learner.data.lengths import read_tokenizer
from learner.resume import BEGINNING, Start, find_start
from learner.rollout.alone import require_alone
from learner.rollout.client import RolloutClient
from learner.rollout.colocate import Placement, place, visible_gpus
from learner.rollout.distribution import rank_chunk_size
from learner.tokens import IM_END
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.gpu_use import CUDA_VISIBLE, GPU_DEVICES
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info


@dataclass(frozen=True)
class RunInputs:
    """What a run starts from.

    val: empty when the config names no validation file.
    placement: of a colocated server; None in a run that starts none.
    processes: of the learner, as torchrun says.
    start: where the run goes on, if it does.
    """

    train: list[Sample]
    val: list[Sample]
    placement: Placement | None = None
    processes: int = 1
    start: Start = BEGINNING

    def finished(self, training: TrainingConfig) -> str | None:
        """What is told of a run that was at its end already; None of any other."""
        if self.start.step < training.total_steps(len(self.train)):
            return None
        return f"Finished at step {self.start.step}: {training.output_dir}"


def check_inputs(config: Config, environment: Mapping[str, str] = os.environ) -> RunInputs:
    """Everything a run needs besides servers, be it new or one that goes on.

    environment: of the process that trains.

    Raises:
        ContractError: names the file, line or key.
    """
    placement = check_backend(config, environment) if generates(config) else None
    processes = learner_processes(environment)
    check_processes(config, processes)
    check_launcher(environment)
    require_trackers(config.training.report_to, environment)
    start = find_start(config, processes)
    inputs = read_inputs(config)
    check_step_budget(config, len(inputs.train), processes)
    return replace(inputs, placement=placement, processes=processes, start=start)


def read_inputs(config: Config) -> RunInputs:
    """Look at the checkpoint folder and read the data."""
    check_checkpoint(Path(config.model.model))
    train, val = config.data.train_jsonl, config.data.val_jsonl
    return RunInputs(
        train=read_samples(Path(train), allow_poly=config.allow_poly),
        val=read_samples(Path(val), allow_poly=config.allow_poly) if val else [],
    )


def check_backend(
    config: Config, environment: Mapping[str, str], gpus: Path = GPU_DEVICES
) -> Placement | None:
    """What the backend needs besides its servers; see `learner.backends` for the backends.

    gpus: where the driver shows them. Returns where a colocated server runs.

    Raises:
        ContractError: names the key or the variable.
    """
    rollout = config.rollout_matching
    if rollout.backend != "hf":
        resolved_sync_mode(config, learner_processes(environment))
    if rollout.backend != "colocate":
        return None
    placement = place(rollout.vllm, visible_gpus(environment, gpus))
    _check_own_server(config)
    return placement


def _check_own_server(config: Config) -> None:
    """What a server that the learner starts itself would refuse after its imports."""
    if find_spec("vllm") is None:
        raise ContractError(
            "rollout_matching.vllm.mode",
            "colocate, and vllm is not installed here",
            "Install it (the extra cpu or gpu), or set rollout_matching.rollout_backend to hf",
        )
    if not any(config.model.model.glob("*.safetensors")):
        raise ContractError(
            "model.model",
            f"{config.model.model} holds no *.safetensors file, which the colocated server loads",
            "Save the weights as safetensors",
        )


def learner_processes(environment: Mapping[str, str]) -> int:
    """How many learner processes there are, as torchrun says.

    Raises ContractError for a WORLD_SIZE that is no number.
    """
    said = environment.get("WORLD_SIZE", "1")
    if not said.isdecimal() or said == "0":
        raise ContractError("WORLD_SIZE", f"{said!r} is no number of processes", "Unset it")
    return int(said)


def check_processes(config: Config, processes: int) -> None:
    """A colocated server belongs to one process, and shards to several; ContractError if not."""
    if processes > 1 and generates(config) and config.rollout_matching.backend == "colocate":
        raise ContractError(
            "rollout_matching.vllm.mode",
            f"colocate, and there are {processes} learner processes",
            "Use vllm.mode: server with GPUs of its own, or one process",
        )
    if config.training.data_parallel == "fsdp2":
        _check_sharding(config, processes)


def check_launcher(environment: Mapping[str, str], gpus: Path = GPU_DEVICES) -> None:
    """How the processes were started fits what they run, and the machine.

    gpus: where the driver shows them. Raises ContractError.
    """
    for library in ("DeepSpeed", "FSDP"):
        if environment.get(f"ACCELERATE_USE_{library.upper()}", "").lower() in ("1", "true", "yes"):
            raise ContractError(
                f"ACCELERATE_USE_{library.upper()}",
                f"the learner was launched with {library}, which its YAML says nothing of",
                "Launch with torchrun; training.data_parallel: fsdp2 shards the model",
            )
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    seen = visible_gpus(environment, gpus)
    if seen and local.isdecimal() and int(local) > len(seen):
        raise ContractError(
            CUDA_VISIBLE,
            f"{len(seen)} GPUs are visible to {local} learner processes on this machine",
            f"Start at most {len(seen)} here, or make more visible",
        )


def _check_sharding(config: Config, processes: int) -> None:
    """What needs whole weights in one process, which are pieces in several under FSDP2."""
    do = "Set it to ddp"
    if processes == 1:
        found = "fsdp2, and there is one learner process: nothing to shard over"
        do = "Set it to ddp, or use several processes"
    elif config.tuner.train_type == "lora":
        found = "fsdp2 beside tuner.train_type lora: adapters are merged into whole weights"
    elif generates(config) and config.rollout_matching.backend == "hf":
        found = "fsdp2 beside rollout_backend hf, which generates with the whole model"
    else:
        return
    raise ContractError("training.data_parallel", found, do)


def check_step_budget(config: Config, samples: int, processes: int) -> None:
    """What one step trains on can be shared out, is there, and fits where it waits.

    samples: in the training data. Raises ContractError.
    """
    training = config.training
    training.resolve_accumulation(processes)
    if samples < training.effective_batch_size:
        raise ContractError(
            "training.effective_batch_size",
            f"{training.effective_batch_size} samples a step, but there are {samples} to train on",
            "Lower it, or give more data",
        )
    share = training.effective_batch_size // processes
    _check_queue(config, share)
    if training.packing and training.packing_buffer < share:
        raise ContractError(
            "training.packing_buffer",
            f"{training.packing_buffer} segments cannot hold the {share} of a step",
            f"Raise it to at least {share}, or lower training.effective_batch_size",
        )


def _check_queue(config: Config, share: int) -> None:
    """Without packing it is known how many packs a share is; else the run finds out."""
    queue = config.rollout_matching.async_rollout
    if queue.enabled and not config.training.packing and share > queue.queue_limit:
        raise ContractError(
            "rollout_matching.async_rollout.queue_limit",
            f"{queue.queue_limit} packs cannot hold the {share} that each process trains on in "
            "a step without packing",
            f"Raise it to at least {share}, or lower training.effective_batch_size",
        )


def check_checkpoint(folder: Path) -> None:
    """The folder is a checkpoint whose tokenizer has the coordinate tokens and `<|im_end|>`.

    Raises:
        ContractError: names what is missing.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ContractError(
                "model.model",
                f"{folder} has no {name}",
                "Give the folder of a checkpoint saved with its processor",
            )
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    if tokenizer.token_to_id(IM_END) is None:
        raise ContractError(
            "model.model",
            f"the tokenizer of {folder} has no token {IM_END}",
            "Use a model of the Qwen-VL family, whose turns end with it",
        )
    missing = [k for k in range(COORD_BINS) if tokenizer.token_to_id(coord_token(k)) is None]
    if missing:
        raise ContractError(
            "model.model",
            f"the tokenizer of {folder} lacks {len(missing)} of the {COORD_BINS} coordinate "
            f"tokens, first {coord_token(missing[0])}",
            "Add them with `learner toy make-model --expand-vocab SOURCE --out FOLDER`",
        )


def generates(config: Config) -> bool:
    """True when the run asks for rollouts: in channel B or to evaluate."""
    return config.b_ratio > 0 or config.training.eval_strategy != "no"


def reach_servers(
    config: Config, environment: Mapping[str, str] = os.environ
) -> list[RolloutClient]:
    """Clients of the configured servers, each healthy and with the settings of the config.

    None for a backend that needs no servers. environment: of the process that asks.

    Raises:
        ContractError: a server is not there, or not ready within `timeout_s`; or has
            settings of its own (all servers are told at once); or together they decode less
            than a request of every learner process at once (DIST-04); or another learner
            pushes to one.
    """
    server = config.rollout_matching.vllm.server
    if config.rollout_matching.backend != "server" or server is None:
        return []
    clients = [
        RolloutClient(entry.base_url, server.timeout_s, server.infer_timeout_s)
        for entry in server.servers
    ]
    for client in clients:
        client.wait_until_pushable()
    infos = [client.info() for client in clients]
    told = zip(clients, infos, strict=True)
    errors = [e for client, info in told for e in differences(config, client.base_url, info)]
    if errors:
        raise ContractErrors(errors)
    sizes, processes = [info.world_size for info in infos], learner_processes(environment)
    rank_chunk_size(config.rollout_matching.decode_batch_size, sizes, processes)
    require_alone(clients)
    return clients


def differences(config: Config, base_url: str, info: Info) -> list[ContractError]:
    """What a server has otherwise than the part of the config that it shares (REP-06)."""
    return list(_differences(config, f"GET {base_url}/info/", info))


def _differences(config: Config, where: str, info: Info) -> Iterator[ContractError]:
    rollout = config.rollout_matching
    ours, theirs = rollout.repeat_terminate, info.repeat_terminate
    if ours.enabled != theirs.active or (ours.enabled and ours != theirs.config):
        yield ContractError(
            f"{where} repeat_terminate",
            f"the server's guard is {_guard(theirs.active, theirs.config)}, and "
            f"rollout_matching.repeat_terminate is {_guard(ours.enabled, ours)}",
            "Start it with `rollout-server serve --run-config` and the YAML of this run",
        )
    if rollout.decode_batch_size * info.world_size > info.max_num_seqs * len(info.replicas):
        yield ContractError(
            f"{where} max_num_seqs",
            f"each of {len(info.replicas)} replicas decodes {info.max_num_seqs} sequences at "
            f"once, fewer than rollout_matching.decode_batch_size {rollout.decode_batch_size} "
            f"on each of {info.world_size} devices",
            "Start it with `rollout-server serve --run-config` and the YAML of this run, or "
            "lower decode_batch_size",
        )
    if wanted_sync_mode(config) == "adapter" and not info.enable_lora:
        yield ContractError(
            f"{where} enable_lora",
            f"is false, and rollout_matching.vllm.sync.mode {rollout.vllm.sync.mode} resolves to "
            "adapter",
            "Start it with `rollout-server serve --run-config` and the YAML of this run, or set "
            "sync.mode to full",
        )


def _guard(active: bool, config: RepeatTerminateConfig) -> str:
    """A repeat guard in a message: the keys that are not at their defaults, if it runs."""
    if not active:
        return "configured but inactive" if config.enabled else "off"
    return config.model_dump_json(exclude_defaults=True)
