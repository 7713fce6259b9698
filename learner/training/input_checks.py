"""The checks of what a run needs besides servers, before a model is loaded.

`check_inputs` runs them for `learner train` and raises the first failure. `learner doctor` runs
them, and those of `server_checks`, and shows every result. Imports no torch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from learner.config.schema import Config, resolved_sync_mode
from learner.config.training import TrainingConfig
from learner.data.checkpoint import Checkpoint
from learner.data.files import capped
from learner.data.jsonl import DataFile, read_samples
from learner.data.order import image_faults
from learner.rollout.colocate import Placement, place
from learner.runs.checkpoint import BEGINNING, Start, find_start, require_run_folder
from learner.runs.hub import require_hub_access
from learner.stages.formats import answer_format
from learner.training.checkpoint_checks import check_model, check_target_modules
from learner.types import Sample
from shared_contracts.checkpoints import weight_files
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors
from shared_contracts.machine import CUDA_VISIBLE, GPU_DEVICES, visible_gpus
from shared_contracts.strict_model import shown

if TYPE_CHECKING:
    from learner.rollout.client import RolloutClient
    from shared_contracts.infer import RolloutEnvelope
    from shared_contracts.server_info import Info

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One start-up check.

    run: returns one line about what holds. Raises ContractError for what stops a run, `Caution`
    for what a run only reports, and `Waiting` if an earlier check did not pass.
    """

    name: str
    run: Callable[[], str]


class Caution(ContractErrors):
    """Problems that do not stop a run."""


class Waiting(Exception):
    """A check cannot run; the message names the earlier check that did not pass."""


def require(result: T | None, check: str) -> T:
    if result is None:
        raise Waiting(f"waits for {check}")
    return result


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run.

    val: empty if the config names no validation file.
    placement: of a colocated server.
    processes: learner processes, of torchrun.
    bad: the faults of unusable samples of both files, by `sample_id`; `val` does not have them.
        Empty unless `data.on_bad_sample` is skip.
    """

    train: Sequence[Sample]
    val: list[Sample]
    placement: Placement | None = None
    processes: int = 1
    start: Start = BEGINNING
    bad: Mapping[str, ContractError] = field(default_factory=dict)

    @property
    def readable(self) -> list[Sample]:
        return [sample for sample in self.train if sample.sample_id not in self.bad]

    @property
    def answered(self) -> list[Sample]:
        """The samples to which servers generate answers."""
        return [*self.readable, *self.val]

    def finished(self, training: TrainingConfig) -> str | None:
        """Return a line for the user if the run has finished already, else None."""
        if self.start.step < training.total_steps(len(self.train)):
            return None
        return f"Finished at step {self.start.step}: {training.output_dir}"


@dataclass
class StartUp:
    """A run, and the results of its start-up checks; None until the check has passed.

    environment: of the training process. patience_s: longest wait for a server that is not ready;
    None: `timeout_s`. samples: to which servers generate answers. envelopes: by server.
    """

    config: Config
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    patience_s: float | None = None
    samples: Sequence[Sample] = ()
    processes: int | None = None
    placement: Placement | None = None
    start: Start | None = None
    checkpoint: Path | None = None
    read: RunInputs | None = None
    clients: "list[RolloutClient] | None" = None
    infos: "dict[str, Info] | None" = None
    envelopes: "list[list[RolloutEnvelope]] | None" = None


def input_checks(run: StartUp) -> list[Check]:
    return [
        Check("processes", partial(_check_processes, run)),
        Check("trackers", partial(_check_trackers, run)),
        Check("hub", partial(_check_hub, run)),
        Check("run folder", partial(_check_run_folder, run)),
        Check("checkpoint", partial(_check_checkpoint, run)),
        Check("data", partial(_check_data, run)),
        Check("step", partial(_check_step, run)),
    ]


def check_inputs(config: Config, environment: Mapping[str, str] = os.environ) -> RunInputs:
    """Run all checks except those of servers. Raises ContractError with the file, line or key."""
    run = StartUp(config, environment)
    for check in input_checks(run):
        check.run()
    return require(run.read, "data")


def _check_processes(run: StartUp) -> str:
    if generates(run.config):
        run.placement = check_backend(run.config, run.environment)
    processes = learner_processes(run.environment)
    check_processes(run.config, processes)
    check_launcher(run.environment)
    run.processes = processes
    return f"{processes} learner process(es)"


def _check_trackers(run: StartUp) -> str:
    """Make the callback of each tracker, which checks that its packages are installed."""
    report_to, found = run.config.training.report_to, CheckErrors()
    for index, tracker in enumerate(report_to):
        if tracker in ("none", "tensorboard"):
            continue
        from transformers.integrations import get_reporting_integration_callbacks  # seconds

        try:
            (callback,) = get_reporting_integration_callbacks([tracker])
            callback()
        except Exception as error:  # noqa: BLE001 - of any library
            fault = f"{tracker} cannot be used here: {str(error).rstrip('.')}"
            do = "Correct that, or take it out"
            found.errors.append(ContractError(f"training.report_to[{index}]", fault, do))
    found.raise_all()
    return ", ".join(report_to)


def _check_hub(run: StartUp) -> str:
    training = run.config.training
    if not (training.push_to_hub and run.environment.get("RANK", "0") == "0"):
        return "nothing is pushed"
    assert training.hub_model_id is not None, "checked with the config"
    require_hub_access("training.push_to_hub", training.hub_model_id)
    return f"{training.hub_model_id} can be written"


def _check_run_folder(run: StartUp) -> str:
    run.start = start = find_start(run.config, require(run.processes, "processes"))
    resumes = f" resumes from step {start.step}" if start.step else ""
    return f"{run.config.training.output_dir}{resumes}"


def _check_checkpoint(run: StartUp) -> str:
    check_model(run.config)
    check_target_modules(run.config)
    run.checkpoint = folder = run.config.model.model
    if run.placement is not None:
        weight_files(Checkpoint(folder).base, "model.model")
    return f"{folder} has a tokenizer with every coordinate token"


def _check_data(run: StartUp) -> str:
    if run.checkpoint is None:  # its processor limits the images; faults of lines are shown
        for file in filter(None, (run.config.data.train_jsonl, run.config.data.val_jsonl)):
            read_samples(file, allow_poly=run.config.allow_poly)
    require(run.checkpoint, "checkpoint")
    run.read = read = replace(
        read_inputs(run.config),
        placement=run.placement,
        processes=run.processes or 1,
        start=run.start or BEGINNING,
    )
    run.samples = read.answered
    held_out = f", {len(read.val)} to validate on" if run.config.data.val_jsonl else ""
    return f"{len(read.train)} samples to train on{held_out}"


def _check_step(run: StartUp) -> str:
    samples = len(require(run.read, "data").train)
    check_step_budget(run.config, samples, require(run.processes, "processes"))
    return f"{run.config.training.total_steps(samples)} steps"


def read_inputs(config: Config) -> RunInputs:
    """Read the data and the headers of all images; process 0 shows a progress bar.

    Raises ContractErrors as `read_data`, and for a description that the answer format cannot have.
    """
    files = (config.data.train_jsonl, config.data.val_jsonl)
    (train, val), bad = read_data(config, files, config.model.model)
    forbidden, do = answer_format(config).forbidden, "Correct it, or use answer_format object_keys"
    found = f"has {shown(forbidden)}, which ends an entry of {config.custom.answer_format}"
    described = ((sample.sample_id, item.desc) for sample in train for item in sample.objects)
    faults = [
        ContractError(where, f"{shown(desc)} {found}", do)
        for where, desc in described
        if set(forbidden).intersection(desc)
    ]
    if faults:
        raise capped("data.train_jsonl", faults)
    return RunInputs(train, [sample for sample in val if sample.sample_id not in bad], bad=bad)


def read_data(
    config: Config, files: Sequence[Path | None], checkpoint: Path
) -> tuple[list[list[Sample]], dict[str, ContractError]]:
    """Return the samples of each file (none for None), and the faults of bad samples by id.

    checkpoint: its processor, or that of an adapter's base, limits the images.

    Raises ContractErrors for faults of a file, for a file of bad samples alone, and, unless
    `data.on_bad_sample` is skip, for bad samples.
    """
    samples = [read_samples(file, allow_poly=config.allow_poly) if file else [] for file in files]
    bad = image_faults(list(chain(*samples)), Checkpoint(checkpoint).image_rule)
    if bad and config.data.on_bad_sample == "stop":
        raise capped("data", list(bad.values()))
    for file, own in zip(files, samples, strict=True):
        if own and all(sample.sample_id in bad for sample in own):
            found = f"none of {len(own)} samples can be used; first {bad[own[0].sample_id]}"
            raise ContractError(str(file), found, "Correct the images, or their paths")
    return samples, bad


def check_backend(config: Config, environment: Mapping[str, str]) -> Placement | None:
    """Check the backend of a config, except its servers; return a colocated server's placement.

    Raises ContractError with the key or the variable.
    """
    rollout = config.rollout_matching
    if rollout.backend != "hf":
        resolved_sync_mode(config, learner_processes(environment))
    if rollout.backend != "colocate":
        return None
    processes = learner_processes(environment)
    here = environment.get("LOCAL_WORLD_SIZE", str(processes))
    if here != str(processes):
        raise ContractError(
            "rollout_matching.vllm.mode",
            f"colocate, and {here} of {processes} learner processes run on this machine",
            "Use vllm.mode: server, or start all processes on one machine",
        )
    placement = place(rollout.vllm, visible_gpus(environment), processes)
    if find_spec("vllm") is None:
        raise ContractError(
            "rollout_matching.vllm.mode",
            "colocate, and vllm is not installed here",
            "Install it (the extra cpu or gpu), or set rollout_matching.rollout_backend to hf",
        )
    return placement


def learner_processes(environment: Mapping[str, str]) -> int:
    """Return the number of learner processes, which torchrun sets.

    Raises ContractError for a WORLD_SIZE that is no number.
    """
    count = environment.get("WORLD_SIZE", "1")
    if not count.isdecimal() or count == "0":
        raise ContractError("WORLD_SIZE", f"{count!r} is no number of processes", "Unset it")
    return int(count)


def check_launcher(environment: Mapping[str, str], gpus: Path = GPU_DEVICES) -> None:
    """Raise ContractError for a launcher that the run does not support, or too few GPUs."""
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


def check_processes(config: Config, processes: int) -> None:
    """Raise ContractError if FSDP2 cannot shard the model over so many processes."""
    if config.training.data_parallel != "fsdp2":
        return
    do, rollout = "Set it to ddp", config.rollout_matching
    moved = rollout.offload.offload_model or rollout.offload.offload_optimizer
    if processes == 1:
        found = "fsdp2, and there is one learner process: nothing to shard over"
        do = "Set it to ddp, or use several processes"
    elif config.tuner.train_type == "lora":
        found = "fsdp2 beside tuner.train_type lora: adapters are merged into whole weights"
    elif generates(config) and rollout.backend == "hf":
        found = "fsdp2 beside rollout_backend hf, which generates with the whole model"
    elif generates(config) and rollout.backend == "colocate" and rollout.offload.enabled and moved:
        found = "fsdp2 beside rollout_matching.offload, which cannot move pieces of tensors"
        do = "Set it to ddp, or rollout_matching.offload.enabled to false"
    else:
        return
    raise ContractError("training.data_parallel", found, do)


def check_step_budget(config: Config, samples: int, processes: int) -> None:
    """Raise ContractError if a step cannot be split over processes, or does not fit."""
    training = config.training
    training.resolve_accumulation(processes)
    if samples < training.effective_batch_size:
        raise ContractError(
            "training.effective_batch_size",
            f"{training.effective_batch_size} samples a step, but there are {samples} to train on",
            "Lower it, or give more data",
        )
    batch = training.effective_batch_size // processes * config.answers_per_sample
    queue = config.rollout_matching.async_rollout
    if queue.enabled and not training.packing and batch > queue.queue_limit:
        # With packing, the number of packs of a rank batch is not known here.
        raise ContractError(
            "rollout_matching.async_rollout.queue_limit",
            f"{queue.queue_limit} packs cannot hold the {batch} that each process trains on in "
            "a step without packing",
            f"Raise it to at least {batch}, or lower training.effective_batch_size",
        )
    if not training.packing:
        return
    from learner.stages.packing import binpacking_module  # numpy

    binpacking_module()
    if training.packing_buffer < batch:
        raise ContractError(
            "training.packing_buffer",
            f"{training.packing_buffer} segments cannot hold the {batch} of a step",
            f"Raise it to at least {batch}, or lower training.effective_batch_size",
        )


def check_files(config: Config) -> list[ContractError]:
    """Check folders, tokenizer, module names and first samples; report all problems together."""
    found, data = CheckErrors(), config.data
    for check in (require_run_folder, check_model, check_target_modules):
        found.of(partial(check, config))
    for key, file in (("data.train_jsonl", data.train_jsonl), ("data.val_jsonl", data.val_jsonl)):
        if file is not None:
            found.of(partial(_check_first_sample, key, file, config.allow_poly))
    return found.errors


def _check_first_sample(key: str, file: Path, allow_poly: bool) -> None:
    try:
        DataFile(file, allow_poly=allow_poly, lines=1).valid_samples()
    except ContractError as error:
        raise ContractErrors(
            [ContractError(key, f"{e.where}: {e.found}", e.do) for e in error.errors]
        ) from error


def generates(config: Config) -> bool:
    """Return whether the run generates rollouts: in channel B or to evaluate."""
    return config.b_ratio > 0 or config.training.eval_strategy != "no"
