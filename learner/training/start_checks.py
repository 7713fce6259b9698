"""The start-up checks of a run: everything that can be wrong before a model is loaded.

    InputChecks     processes, trackers, Hub, run folder, checkpoint, data, step
    ServerChecks    servers, settings, servers together, group port, media
    check_inputs, reach_servers    run them for `learner train`; the first failure is raised
    check_files     cheap file checks of a config; reports all problems together

`learner doctor` runs the same two lists and shows every result. Imports no torch.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from learner.config.schema import (
    Config,
    CustomConfig,
    LoraTuner,
    resolved_sync_mode,
    wanted_sync_mode,
)
from learner.config.trackers import require_trackers
from learner.config.training import TrainingConfig
from learner.config.yaml12 import read_mapping
from learner.data.images import UnreadableImage, Watch
from learner.data.jsonl import build_messages, build_request, capped, read_samples, scan
from learner.data.lengths import (
    SampleLengths,
    TokenLimits,
    chat_template,
    image_rule,
    read_tokenizer,
)
from learner.data.order import image_faults
from learner.data.show import watch
from learner.rollout.client import SERVER_ERRORS, RolloutClient, may_pass, needs_push
from learner.rollout.colocate import Placement, place
from learner.rollout.distribution import rank_chunk_size
from learner.runs.hub import require_hub_access
from learner.runs.resume import BEGINNING, Start, find_start, require_run_folder
from learner.runs.run_folder import RESOLVED
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import answer_format
from learner.stages.tokens import IM_END
from learner.types import Sample
from shared_contracts.adapters import checkpoint_chain, folder_with
from shared_contracts.errors import CheckErrors, ContractError, ContractErrors, ProblemError
from shared_contracts.footprint import run_context
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.machine import CUDA_VISIBLE, GPU_DEVICES, address_towards, visible_gpus
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info
from shared_contracts.strict_model import shown

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
    """Return the result of an earlier check; raises `Waiting` if there is none."""
    if result is None:
        raise Waiting(f"waits for {check}")
    return result


@dataclass(frozen=True)
class RunInputs:
    """What a run starts from.

    val: empty when the config names no validation file.
    placement: of a colocated server; None in a run that starts none.
    processes: of the learner, as torchrun says.
    start: where the run goes on, if it does.
    bad: by `sample_id`, why samples of either file cannot be shown to a model; those of `val` are
        left out of it. Empty unless `data.on_bad_sample` is skip.
    """

    train: Sequence[Sample]
    val: list[Sample]
    placement: Placement | None = None
    processes: int = 1
    start: Start = BEGINNING
    bad: Mapping[str, ContractError] = field(default_factory=dict)

    @property
    def readable(self) -> list[Sample]:
        """The training samples that can be shown to a model."""
        return [sample for sample in self.train if sample.sample_id not in self.bad]

    def finished(self, training: TrainingConfig) -> str | None:
        """A line about a run that has finished already; None for any other."""
        if self.start.step < training.total_steps(len(self.train)):
            return None
        return f"Finished at step {self.start.step}: {training.output_dir}"


class InputChecks:
    """The checks of everything that a run needs besides servers, and their results.

    environment: of the process that trains. A result is None until its check passed.
    """

    def __init__(self, config: Config, environment: Mapping[str, str] = os.environ) -> None:
        self._config = config
        self._environment = environment
        self._first = environment.get("RANK", "0") == "0"
        self._has_checkpoint = False
        self.processes: int | None = None
        self.placement: Placement | None = None
        self.start: Start | None = None
        self.read: RunInputs | None = None

    def checks(self) -> list[Check]:
        return [
            Check("processes", self._check_processes),
            Check("trackers", self._check_trackers),
            Check("hub", self._check_hub),
            Check("run folder", self._check_run_folder),
            Check("checkpoint", self._check_checkpoint),
            Check("data", self._check_data),
            Check("step", self._check_step),
        ]

    def inputs(self) -> RunInputs:
        """What the run starts from, after all checks passed."""
        read = require(self.read, "data")
        processes, start = require(self.processes, "processes"), require(self.start, "run folder")
        return RunInputs(read.train, read.val, self.placement, processes, start, read.bad)

    def _check_processes(self) -> str:
        if generates(self._config):
            self.placement = check_backend(self._config, self._environment)
        processes = learner_processes(self._environment)
        check_processes(self._config, processes)
        check_launcher(self._environment)
        self.processes = processes
        return f"{processes} learner process(es)"

    def _check_trackers(self) -> str:
        require_trackers(self._config.training.report_to, self._environment)
        return ", ".join(self._config.training.report_to)

    def _check_hub(self) -> str:
        training = self._config.training
        if not (training.push_to_hub and self._first):
            return "nothing is pushed"
        assert training.hub_model_id is not None, "checked with the config"
        require_hub_access("training.push_to_hub", training.hub_model_id)
        return f"{training.hub_model_id} can be written"

    def _check_run_folder(self) -> str:
        processes = require(self.processes, "processes")
        self.start = start = find_start(self._config, processes)
        resumes = f" resumes from step {start.step}" if start.goes_on else ""
        return f"{self._config.training.output_dir}{resumes}"

    def _check_checkpoint(self) -> str:
        check_model(self._config)
        check_target_modules(self._config)
        self._has_checkpoint = True
        return f"{self._config.model.model} has a tokenizer with every coordinate token"

    def _check_data(self) -> str:
        data = self._config.data
        if not self._has_checkpoint:  # images are checked by its processor's rule
            for file in filter(None, (data.train_jsonl, data.val_jsonl)):
                read_samples(file, allow_poly=self._config.allow_poly)
            raise Waiting("waits for checkpoint")
        self.read = read = _read_inputs(self._config, self._first)
        held_out = f", {len(read.val)} to validate on" if data.val_jsonl else ""
        return f"{len(read.train)} samples to train on{held_out}"

    def _check_step(self) -> str:
        processes, read = require(self.processes, "processes"), require(self.read, "data")
        check_step_budget(self._config, len(read.train), processes)
        return f"{self._config.training.total_steps(len(read.train))} steps"


def check_inputs(config: Config, environment: Mapping[str, str] = os.environ) -> RunInputs:
    """Everything a run needs besides servers, be it new or resumed.

    environment: of the process that trains.

    Raises:
        ContractError: names the file, line or key.
    """
    found = InputChecks(config, environment)
    for check in found.checks():
        check.run()
    return found.inputs()


def read_inputs(config: Config, environment: Mapping[str, str] = os.environ) -> RunInputs:
    """Look at the checkpoint folder, read the data and the headers of all images.

    Process 0 shows how far it is.
    """
    check_model(config)
    return _read_inputs(config, environment.get("RANK", "0") == "0")


def _read_inputs(config: Config, show: bool) -> RunInputs:
    """The data of a run. show: with a progress bar."""
    files = (config.data.train_jsonl, config.data.val_jsonl)
    shown = watch if show else lambda looks, _: looks
    (train, val), bad = read_data(config, files, config.model.model, shown)
    if all(sample.sample_id in bad for sample in train):
        raise ContractError(
            "data.train_jsonl",
            f"none of {len(train)} samples can be trained on; first {bad[train[0].sample_id]}",
            "Mend the images, or their paths",
        )
    return RunInputs(train, [sample for sample in val if sample.sample_id not in bad], bad=bad)


def read_data(
    config: Config, files: Sequence[Path | None], checkpoint: Path, shown: Watch
) -> tuple[list[list[Sample]], dict[str, ContractError]]:
    """The samples of each file, none of None, and why some of them cannot be shown to a model.

    checkpoint: whose processor will take the images; of an adapter, that of what it is over.

    Raises ContractErrors for what is wrong with a file, and, unless `data.on_bad_sample` is skip,
    for samples that cannot be shown.
    """
    skip = config.data.on_bad_sample == "skip"
    samples = [
        read_samples(file, allow_poly=config.allow_poly, find_images=not skip) if file else []
        for file in files
    ]
    bad = image_faults(list(chain(*samples)), image_rule(checkpoint), shown)
    if bad and not skip:
        raise capped("data", list(bad.values()))
    return samples, bad


def check_backend(
    config: Config, environment: Mapping[str, str], gpus: Path = GPU_DEVICES
) -> Placement | None:
    """What the backend needs besides its servers; see `learner.training.backends` for the backends.

    gpus: where the driver shows them. Returns where a colocated server runs.

    Raises:
        ContractError: names the key or the variable.
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
    placement = place(rollout.vllm, visible_gpus(environment, gpus), processes)
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
    *_, weights = checkpoint_chain(config.model.model, "model.model")
    if not any(weights.glob("*.safetensors")):
        raise ContractError(
            "model.model",
            f"{weights} holds no *.safetensors file, which the colocated server loads",
            "Save the weights as safetensors",
        )


def learner_processes(environment: Mapping[str, str]) -> int:
    """How many learner processes there are, as torchrun says.

    Raises ContractError for a WORLD_SIZE that is no number.
    """
    count = environment.get("WORLD_SIZE", "1")
    if not count.isdecimal() or count == "0":
        raise ContractError("WORLD_SIZE", f"{count!r} is no number of processes", "Unset it")
    return int(count)


def check_processes(config: Config, processes: int) -> None:
    """Raise ContractError if so many processes cannot share the model."""
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
    """What one step trains on can be split, is there, and fits where it waits.

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
    batch = training.effective_batch_size // processes
    queue = config.rollout_matching.async_rollout
    if queue.enabled and not training.packing and batch > queue.queue_limit:
        # With packing a run finds out how many packs a rank batch is.
        raise ContractError(
            "rollout_matching.async_rollout.queue_limit",
            f"{queue.queue_limit} packs cannot hold the {batch} that each process trains on in "
            "a step without packing",
            f"Raise it to at least {batch}, or lower training.effective_batch_size",
        )
    if training.packing and training.packing_buffer < batch:
        raise ContractError(
            "training.packing_buffer",
            f"{training.packing_buffer} segments cannot hold the {batch} of a step",
            f"Raise it to at least {batch}, or lower training.effective_batch_size",
        )


def check_model(config: Config) -> None:
    """`model.model` is a checkpoint that can write the answers of this run.

    Raises:
        ContractError: as `check_checkpoint` and `check_taught_format`.
    """
    check_checkpoint(config.model.model, answer_format(config).end_marker)
    check_taught_format(config.model.model, config.custom.answer_format, "model.model")


def check_taught_format(checkpoint: Path, wanted: str, where: str) -> None:
    """A checkpoint inside a run folder is of a run with the format `wanted`.

    One that is in no run folder does not say its format. Raises ContractError, about `where`.
    """
    resolved = checkpoint.absolute().parent / RESOLVED
    try:
        custom = read_mapping(resolved).get("custom") if resolved.is_file() else None
    except ContractError:  # a damaged file says nothing
        return
    # Runs before the key existed had the default format.
    default = CustomConfig.model_fields["answer_format"].default
    taught = custom.get("answer_format", default) if isinstance(custom, dict) else wanted
    if taught != wanted:
        raise ContractError(
            where,
            f"{checkpoint} writes answers as {taught} ({resolved}), and custom.answer_format is "
            f"{wanted}",
            f"Set custom.answer_format to {taught}; or export the checkpoint with "
            "`learner export` to a folder outside of its run, and teach it the format in a warm-up",
        )


def check_checkpoint(folder: Path, end_marker: str = IM_END) -> None:
    """The folder is a checkpoint with a chat template, the coordinate tokens and the end marker.

    It may be an adapter over one, whose tokenizer may be in either.

    Raises:
        ContractError: names what is missing.
    """
    if not folder.is_dir():
        raise ContractError("model.model", f"there is no folder {folder}", _where_it_may_be(folder))
    chain = checkpoint_chain(folder, "model.model")
    having = {
        "config.json": chain[-1],
        "tokenizer.json": folder_with(folder, "tokenizer.json", "model.model"),
    }
    for name, holder in having.items():
        if not (holder / name).is_file():
            raise ContractError(
                "model.model",
                f"{folder} has no {name}",
                "Give the folder of a checkpoint saved with its processor",
            )
    tokenizer = read_tokenizer(having["tokenizer.json"] / "tokenizer.json")
    if tokenizer.token_to_id(end_marker) is None:
        raise ContractError(
            "model.model",
            f"the tokenizer of {folder} has no token {end_marker}",
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
    chat_template(having["tokenizer.json"])


def coordinate_ids(folder: Path) -> list[int]:
    """Ids of the coordinate tokens, in the order of the bins, of a folder that was checked."""
    place = folder_with(folder, "tokenizer.json", "model.model")
    tokenizer = read_tokenizer(place / "tokenizer.json")
    ids = [tokenizer.token_to_id(coord_token(k)) for k in range(COORD_BINS)]
    return [each for each in ids if each is not None]


def _where_it_may_be(folder: Path) -> str:
    """What to do about a folder that is not there, also where `org/name` of the Hub is meant."""
    do = "Give the folder of a checkpoint saved with its processor"
    here = Path.cwd()
    name = folder.relative_to(here) if folder.is_relative_to(here) else folder
    if len(name.parts) != 2 or folder.parent.exists():
        return do
    return f"{do}; for a model of the Hugging Face Hub, first: hf download {name} --local-dir DIR"


def check_target_modules(config: Config) -> None:
    """Every name of `tuner.target_modules` is one that peft finds in the checkpoint.

    Says nothing where there are no safetensors files to look into. Raises ContractErrors.
    """
    tuner = config.tuner
    if not isinstance(tuner, LoraTuner) or isinstance(tuner.target_modules, str):
        return
    modules = {name.rpartition(".")[0] for name in tensor_names(config.model.model)}
    if not modules:
        return
    last = {name.rpartition(".")[2] for name in modules} | {"lm_head"}  # no file has a tied one
    errors = [
        ContractError(
            f"tuner.target_modules[{place}]",
            f"{shown(target)} is the end of no module's name in {config.model.model}",
            "Name modules literally, without patterns; "
            f"there are {', '.join(sorted(name for name in last if not name.isdecimal()))}",
        )
        for place, target in enumerate(tuner.target_modules)
        if target.rpartition(".")[2] not in last
    ]
    if errors:
        raise ContractErrors(errors)


def tensor_names(folder: Path) -> list[str]:
    """Names in the headers of a checkpoint's `model*.safetensors`; broken files have none."""
    names: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with file.open("rb") as content:
                header = content.read(int.from_bytes(content.read(8), "little"))
            names += json.loads(header)
        except (OSError, ValueError, OverflowError, MemoryError):
            continue
    return names


def check_files(config: Config) -> list[ContractError]:
    """Cheap file checks of a config; reports all problems together.

    Folders, the checkpoint's tokenizer and module names, the first sample of each data file.
    """
    data = config.data
    found = CheckErrors()
    found.of(lambda: require_run_folder(config))
    found.of(lambda: check_model(config))
    found.of(lambda: check_target_modules(config))
    found.of(lambda: _check_first_sample("data.train_jsonl", data.train_jsonl, config.allow_poly))
    if (val := data.val_jsonl) is not None:
        found.of(lambda: _check_first_sample("data.val_jsonl", val, config.allow_poly))
    return found.errors


def _check_first_sample(key: str, file: Path, allow_poly: bool) -> None:
    """The file is there and its first sample is one, images included: where `key` says."""
    try:
        problems: Sequence[ContractError] = next(scan(file, allow_poly=allow_poly)).problems
    except ContractError as error:
        problems = [error]
    if problems:
        raise ContractErrors([ContractError(key, f"{e.where}: {e.found}", e.do) for e in problems])


def generates(config: Config) -> bool:
    """True when the run asks for rollouts: in channel B or to evaluate."""
    return config.b_ratio > 0 or config.training.eval_strategy != "no"


class ServerChecks:
    """The checks of the config's servers, and what they found.

    samples: of the run; some of them are sent with their images. patience_s: how long to wait for
    a server that is not ready; None: `timeout_s`. clients, infos, envelopes: in the order of the
    servers, None until their check passed.
    """

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str] = os.environ,
        samples: Sequence[Sample] = (),
        patience_s: float | None = None,
    ) -> None:
        server = config.rollout_matching.vllm.server
        assert server is not None, "checked with the config"
        self._config = config
        self._environment = environment
        self._server = server
        self._patience_s = patience_s or server.timeout_s
        self.samples = samples_of_folders(samples)
        self.clients: list[RolloutClient] | None = None
        self.infos: list[Info] | None = None
        self.envelopes: list[list[RolloutEnvelope]] | None = None

    def checks(self) -> list[Check]:
        return [
            Check("servers", self._check_reachable),
            Check("settings", self._check_settings),
            Check("servers together", self._check_together),
            Check("group port", self._check_group_ports),
            Check("media", self._check_media),
        ]

    def requests(self) -> list[RolloutInferRequest]:
        template = self._config.template
        return [build_request(each, template.prompt, template.system) for each in self.samples]

    def _check_reachable(self) -> str:
        clients, infos = [], []
        for entry in self._server.servers:
            with RolloutClient(entry.base_url, self._patience_s) as waiting:
                waiting.wait_until_pushable()
            client = RolloutClient(
                entry.base_url, self._server.timeout_s, self._server.infer_timeout_s
            )
            clients.append(client)
            infos.append(client.info())
        self.clients, self.infos = clients, infos
        return "; ".join(map(describe_server, infos))

    def _check_settings(self) -> str:
        infos = require(self.infos, "servers")
        urls = [entry.base_url for entry in self._server.servers]
        servers = list(zip(urls, infos, strict=True))
        errors = [e for url, info in servers for e in differences(self._config, url, info)]
        if errors:
            raise ContractErrors(errors)
        needed = 0
        if self.samples:
            needed = longest_prompt(self._config, self.samples)
            needed += self._config.rollout_matching.max_new_tokens
        cautions = [e for url, info in servers for e in _cautions(self._config, url, info, needed)]
        if cautions:
            raise Caution(cautions)
        return "as in the config"

    def _check_together(self) -> str:
        sizes = [info.world_size for info in require(self.infos, "servers")]
        processes = learner_processes(self._environment)
        batch = self._config.rollout_matching.decode_batch_size
        each = rank_chunk_size(batch, sizes, processes)
        return f"{sum(sizes)} device(s); {processes} learner process(es) send {each} requests each"

    def _check_group_ports(self) -> str:
        infos = require(self.infos, "servers")
        for index, (entry, info) in enumerate(zip(self._server.servers, infos, strict=True)):
            if info.owner is None:  # the server frees the port of its owner
                where = f"rollout_matching.vllm.server.servers[{index}].group_port"
                check_group_port(where, entry.base_url, entry.group_port)
        return ", ".join(str(entry.group_port) for entry in self._server.servers)

    def _check_media(self) -> str:
        """Every server reads images of up to `_ASKED` folders of the data and answers one token."""
        clients, requests = require(self.clients, "servers"), self.requests()
        if not requests:
            return "no images to read"
        call = InferCall(
            infer_requests=requests, request_config=RequestConfig(max_tokens=1, return_details=True)
        )
        envelopes = [ask_for_media(client, call) for client in clients]
        if None in envelopes:
            raise Waiting("waits for the first push of the run")
        self.envelopes = [each for each in envelopes if each is not None]
        images = sum(len(request.images) for request in requests)
        return f"{images} image(s) of {len(requests)} samples were read"


# Samples whose images a server reads before the run, of as many folders.
_ASKED = 4


def samples_of_folders(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample of each image folder, at most `_ASKED` of them, spread over the data."""
    by_folder: dict[Path, Sample] = {}
    for sample in samples:
        by_folder.setdefault(sample.images[0].parent if sample.images else Path(), sample)
    return spread(list(by_folder.values()), _ASKED)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spaced, the first among them."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]


def ask_for_media(client: RolloutClient, call: InferCall) -> list[RolloutEnvelope] | None:
    """The answers of a server to `call`; None if it needs a push first.

    Raises ContractErrors, one for each reason and folder of images that the server cannot read;
    `Caution` if the server goes away.
    """
    where = f"POST {client.base_url}/infer/"
    try:
        return client.infer(call)
    except SERVER_ERRORS as error:
        if needs_push(error):
            return None
        unanswered = ContractError(client.base_url, str(error).rstrip("."), "See the server's log")
        if may_pass(error):
            raise Caution([unanswered]) from error
        faults = (error.problem.errors or []) if isinstance(error, ProblemError) else []
        unread: dict[tuple[str, Path], Path] = {}
        for fault in faults:
            if ".images[" in fault["where"]:
                image = _image_at(fault["where"], call.infer_requests)
                unread.setdefault((fault["detail"], image.parent), image)
        if not unread:
            raise unanswered from error
        raise ContractErrors(
            [
                ContractError(
                    where, f"the server cannot read {image}: {detail}", _media_fix(image, detail)
                )
                for (detail, _), image in unread.items()
            ]
        ) from error


def _media_fix(image: Path, detail: str) -> str:
    if "--allowed-media-dir" in detail:
        return f"Start the server with --allowed-media-dir {image.parent}, or a folder above it"
    return "Mount the images at the same path on the server's machine, readable by its user"


def _image_at(where: str, requests: Sequence[RolloutInferRequest]) -> Path:
    """where: such as `infer_requests[3].images[0]`."""
    request, image = (int(part.partition("]")[0]) for part in where.split("[")[1:3])
    return Path(requests[request].images[image])


_CONNECT_S = 3.0
_RELEASE_S = 5.0  # how long a server may take to release the port of its last learner


def check_group_port(where: str, base_url: str, port: int) -> None:
    """Raise ContractError if a server cannot listen on its `group_port`.

    On this machine the port is bound and released. On another one a connection is tried, which
    must be refused, as nothing listens there between runs; `Caution` if there is no answer.
    """
    host = urlsplit(base_url).hostname
    assert host is not None, "checked with the config"
    try:
        ip = socket.gethostbyname(host)
        here = address_towards(ip) == ip
    except OSError as error:
        found = f"{host}: {error.strerror or error}"
        raise ContractError(
            where, found, _group_port_fix("Give the server's IPv4 address")
        ) from error
    deadline = time.monotonic() + _RELEASE_S
    while (reason := _port_problem(ip, port, here)) is not None:
        if time.monotonic() > deadline:
            fix = _group_port_fix("Name another group_port, or stop what uses this one")
            raise ContractError(where, f"{ip}:{port} {reason}", fix)
        time.sleep(0.1)


def _port_problem(ip: str, port: int, here: bool) -> str | None:
    """Why nothing can listen on the port, or None. here: `ip` is this machine's."""
    if here:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((ip, port))  # other processes of the run may do so at the same time
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                return "is taken" if taken else f"cannot be bound ({error.strerror})"
        return None
    try:
        socket.create_connection((ip, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        found = f"{ip}:{port} gives no answer ({error}): a firewall may drop what goes there"
        fix = _group_port_fix("Open the port for the learner")
        raise Caution([ContractError("group_port", found, fix)]) from error
    return "is taken"


def _group_port_fix(first: str) -> str:
    return (
        f"{first}; or use rollout_matching.vllm.mode: colocate or rollout_backend: hf, which need "
        "no port"
    )


def reach_servers(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    samples: Sequence[Sample] = (),
    report: Callable[[str], object] = lambda line: None,
) -> list[RolloutClient]:
    """Clients of the configured servers, which passed `ServerChecks`.

    None for a backend that needs no servers. environment: of the process that asks. report: gets a
    line for each `Caution`.

    Raises:
        ContractError: the first check that failed, of all servers at once.
    """
    if config.rollout_matching.backend != "server":
        return []
    found = ServerChecks(config, environment, samples)
    for check in found.checks():
        try:
            check.run()
        except Caution as caution:
            for error in caution.errors:
                report(f"Warning: {error}")
        except Waiting:  # the server needs a push before it can answer
            continue
    return require(found.clients, "servers")


def describe_server(info: Info) -> str:
    guard = "on" if info.repeat_terminate.active else "off"
    return (
        f"{Path(info.model).name}, {len(info.replicas)} replica(s) on {info.world_size} device(s), "
        f"weights {info.weights_version} {info.weights_state}, repeat guard {guard}"
    )


_FROM_RUN_CONFIG = "Start it with `rollout-server serve --run-config` and the YAML of this run"


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
            _FROM_RUN_CONFIG,
        )
    if rollout.decode_batch_size * info.world_size > info.max_num_seqs * len(info.replicas):
        yield ContractError(
            f"{where} max_num_seqs",
            f"each of {len(info.replicas)} replicas decodes {info.max_num_seqs} sequences at "
            f"once, fewer than rollout_matching.decode_batch_size {rollout.decode_batch_size} "
            f"on each of {info.world_size} devices",
            f"{_FROM_RUN_CONFIG}, or lower decode_batch_size",
        )
    stated = rollout.vllm.max_model_len
    if stated is not None and info.max_model_len is not None and info.max_model_len < stated:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and rollout_matching.vllm.max_model_len is {stated}",
            _FROM_RUN_CONFIG,
        )
    if wanted_sync_mode(config) == "adapter" and not info.enable_lora:
        yield ContractError(
            f"{where} enable_lora",
            f"is false, and rollout_matching.vllm.sync.mode {rollout.vllm.sync.mode} resolves to "
            "adapter",
            f"{_FROM_RUN_CONFIG}, or set sync.mode to full",
        )


def _cautions(config: Config, base_url: str, info: Info, needed: int) -> Iterator[ContractError]:
    """Settings of a server that a run only reports. needed: tokens of a prompt and an answer."""
    where, vllm = f"GET {base_url}/info/", config.rollout_matching.vllm
    if info.max_model_len is not None and info.max_model_len < needed:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and a prompt with max_new_tokens has {needed} tokens: its "
            "answer is cut short, or refused",
            f"Set rollout_matching.vllm.max_model_len to {needed} or more, and restart it",
        )
    stated = vllm.max_model_len
    if stated is not None and info.max_model_len is not None and info.max_model_len > stated:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and rollout_matching.vllm.max_model_len is {stated}",
            _FROM_RUN_CONFIG,
        )
    if info.enable_prefix_caching not in (None, vllm.enable_prefix_caching):
        yield ContractError(
            f"{where} enable_prefix_caching",
            f"is {info.enable_prefix_caching}, and rollout_matching.vllm.enable_prefix_caching is "
            f"{vllm.enable_prefix_caching}",
            _FROM_RUN_CONFIG,
        )


def _guard(active: bool, config: RepeatTerminateConfig) -> str:
    """A repeat guard in a message: the keys that are not at their defaults, if it runs."""
    if not active:
        return "configured but inactive" if config.enabled else "off"
    return config.model_dump_json(exclude_defaults=True)


def context_of_run(config: Config, samples: Iterable[Sample]) -> int:
    """The `max_model_len` of the servers of a run: as stated, or derived (FULL-06).

    Derived, it holds the longest prompt of `samples` and an answer of `max_new_tokens`, rounded
    up.

    Raises ContractError as `lengths_of_run` does.
    """
    if (stated := config.rollout_matching.vllm.max_model_len) is not None:
        return stated
    prompt, answer = longest_prompt(config, samples), config.rollout_matching.max_new_tokens
    return run_context(config.model.model, prompt, answer)


def longest_prompt(config: Config, samples: Iterable[Sample]) -> int:
    """Tokens of the longest prompt; a sample that no model can be shown is asked of nobody.

    Raises ContractError as `lengths_of_run` does.
    """
    lengths, longest = lengths_of_run(config), 0
    for sample in samples:
        with suppress(ContractError, UnreadableImage):
            longest = max(longest, lengths.prompt(sample))
    return longest


def lengths_of_run(config: Config) -> SampleLengths:
    """Measures samples for the checkpoint, the prompt and the limits of a run.

    Raises ContractError for a folder that is no checkpoint.
    """
    answers = answer_format(config)
    check_model(config)
    template = config.template
    pack = config.global_max_length if config.training.packing else None
    return SampleLengths(
        folder_with(config.model.model, "tokenizer.json", "model.model"),
        partial(answers.write, field_order=config.custom.object_field_order),
        lambda sample: [
            message.model_dump(exclude_none=True)
            for message in build_messages(sample, template.prompt, template.system)
        ],
        TokenLimits(config.rollout_matching.max_new_tokens, pack),
    )
