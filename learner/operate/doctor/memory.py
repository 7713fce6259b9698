"""What a checkpoint weighs, and what a run keeps of it in memory and on disk, beside what is here.

stored_rows  the coordinate rows in the files of the checkpoint
judge_*      what a run needs by `learner.operate.estimate`, beside what there is
weigh        all findings
"""

import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from learner.config.rollout_matching import OffloadConfig
from learner.config.schema import Config, LoraTuner
from learner.models.coord_tokens import untrained
from learner.models.load import check_parameters, weight_dtype
from learner.models.loading import loading
from learner.operate.doctor import machine
from learner.operate.doctor.findings import Finding, Status, of_error, ok, skipped
from learner.operate.doctor.inputs import CHECKPOINT, DATA, IMAGES, Looked, spread
from learner.operate.estimate.sizes import (
    ENGINE_BYTES,
    USABLE,
    Serving,
    Sizes,
    gib,
    read_sizes,
    serving,
)
from learner.operate.estimate.step import OFFLOAD_REMEDY, StepCost, step_cost
from learner.rollout.colocate import Placement
from learner.runs.checkpoint import checkpoints_in
from learner.training.start_checks import (
    coordinate_ids,
    generates,
    learner_processes,
)
from shared_contracts.adapters import checkpoint_chain
from shared_contracts.errors import ContractError
from shared_contracts.machine import GpuUse

# Bytes of a weight that is trained, of its gradient, and of each moment.
FLOAT32 = 4


def stored_rows(folder: Path, ids: Sequence[int]) -> Iterator[Tensor]:
    """The rows [ids, width] of a checkpoint's embedding, and of its head where it has one.

    Those of an adapter where it has any. Raises ContractError for a file that is not whole.
    """
    *adapters, folder = checkpoint_chain(folder, "model.model")
    for adapter in adapters:
        if own := list(_stored(adapter, re.compile(r"\.trainable_tokens_"), slice(None))):
            yield from own
            return
    first = min(ids)
    names = re.compile(r"(embed_tokens|lm_head)\.weight$")
    for rows in _stored(folder, names, slice(first, max(ids) + 1)):
        yield rows[[each - first for each in ids]]


def _stored(folder: Path, names: re.Pattern[str], rows: slice) -> Iterator[Tensor]:
    """Rows of the tensors in a folder's safetensors files whose names are searched for."""
    for file in sorted(folder.glob("*.safetensors")):
        fix = "Save the checkpoint again, or copy it whole"
        with loading(str(file), "it", fix), safe_open(file, framework="pt") as tensors:
            found = filter(names.search, tensors.keys())
            held = [tensors.get_slice(name)[rows] for name in found]
        yield from held


LEARNER, SERVER = "memory (estimate)", "server memory (estimate)"
BESIDE = "memory beside the server (estimate)"
LOADING = "host memory while the model is loaded (estimate)"


def judge_training(config: Config, needed: StepCost, there: float | None, where: str) -> Finding:
    """there: bytes for this process; None where nobody tells."""
    if there is None:
        return ok(LEARNER, f"{needed}; how much there is nobody tells", where)
    found = f"{needed}; there are {gib(there)}"
    if needed.total <= there * USABLE:
        return ok(LEARNER, found, where)
    status: Status = "fail" if needed.states > there else "warn"
    return Finding(LEARNER, where, status, found, needed.remedy(config, there * USABLE))


def judge_loading(
    config: Config, sizes: Sizes, processes: int, there: float | None
) -> Finding | None:
    """None where the processes of a host can load the model, or nobody tells how much there is.

    Each process has the whole model on the host, then whole on its GPU; FSDP2 splits it after that.

    processes: of the learner on this host. there: bytes of the host's memory.
    """
    whole = sizes.parameters * weight_dtype(config).itemsize
    if there is None or processes * whole <= there:
        return None
    found = f"{processes} learner processes load {gib(whole)} each; there are {gib(there)}"
    do = "Start fewer learner processes on this host, use more hosts, or tuner.train_type: lora"
    return Finding(LOADING, "RAM", "fail", found, do)


def judge_beside(needed: StepCost, offload: OffloadConfig, left: float, where: str) -> Finding:
    """left: bytes for the learner while a colocated server works."""
    kept = needed.kept(offload)
    found = f"while the server works, the learner keeps {gib(kept)}; there are {gib(max(left, 0))}"
    if kept <= left:
        return ok(BESIDE, found, where)
    return Finding(BESIDE, where, "fail", found, OFFLOAD_REMEDY)


def judge_serving(
    needed: Serving, budget: float | None, where: str, budget_of: str = ""
) -> Finding:
    """budget: bytes that the server may take of a device; None: it runs, and has taken them."""
    if budget is None:
        return ok(SERVER, f"{needed}; it runs, so its engines have taken theirs", where)
    room = budget - needed.weights
    found = (
        f"{needed}; {budget_of} leaves {gib(max(room, 0))} beside the weights, for "
        f"{needed.sequences(budget)} sequences"
    )
    if room < needed.sequence:
        do = "Raise rollout_matching.vllm.gpu_memory_utilization or tensor_parallel_size"
        return Finding(SERVER, where, "fail", found, do)
    if room < needed.sequence * needed.at_once:
        do = "Lower rollout_matching.decode_batch_size: sequences beyond the cache wait"
        return Finding(SERVER, where, "warn", found, do)
    return ok(SERVER, found, where)


def available_ram(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):
        return None


WEIGHTS, ROWS, DISK = "weights", "coordinate rows", "disk (estimate)"


@dataclass(frozen=True)
class Weighed:
    """sizes: None where the checkpoint describes no model."""

    findings: list[Finding]
    sizes: Sizes | None = None


def weigh(
    config: Config,
    looked: Looked,
    visible: Sequence[int] | None,
    use: GpuUse | None,
    placement: Placement | None,
) -> Weighed:
    """visible: GPUs of the learner; None where that is not known.

    placement: of a colocated server.
    """
    if not looked.has_checkpoint:
        return Weighed([skipped(check, f"waits for {CHECKPOINT}") for check in _CHECKS])
    try:
        sizes = read_sizes(config)
        check_parameters(config.model.model)
    except ContractError as error:
        return Weighed([*of_error(WEIGHTS, error), skipped(LEARNER, f"waits for {WEIGHTS}")])
    counted = f"{_millions(sizes.parameters)} parameters, {_millions(sizes.trained)} trained"
    found = [ok(WEIGHTS, counted, str(config.model.model)), *_rows(config)]
    if not looked.samples:
        return Weighed([*found, skipped(LEARNER, f"waits for {DATA}")], sizes)
    found.append(judge_disk(config, sizes, len(looked.samples)))
    if any(each.check == IMAGES and each.status == "fail" for each in looked.findings):
        return Weighed([*found, skipped(LEARNER, f"waits for {IMAGES}")], sizes)
    if visible is None:
        return Weighed([*found, skipped(LEARNER, f"waits for {machine.GPUS}")], sizes)
    try:
        estimated = _memory_findings(config, sizes, looked, visible, use, placement)
    except ContractError as error:
        estimated = of_error(LEARNER, error)
    return Weighed([*found, *estimated], sizes)


_CHECKS = (WEIGHTS, LEARNER)


def _rows(config: Config) -> list[Finding]:
    """Whether coordinate tokens look trained, where embedding or head can be looked into."""
    folder = config.model.model
    ids = coordinate_ids(folder)
    why = next(filter(None, map(untrained, stored_rows(folder, ids))), None)
    if why is None:
        return [ok(ROWS, "those of the 1000 coordinate tokens look trained", str(folder))]
    found = f"those of the 1000 coordinate tokens look untrained ({why})"
    tuner = config.tuner
    if isinstance(tuner, LoraTuner) and (tuner.adapts_rows or not tuner.train_coordinate_rows):
        do = "Set tuner.train_coordinate_rows to auto, with embed_tokens and lm_head no targets"
        return [Finding(ROWS, str(folder), "warn", f"{found}, and are left to adapters", do)]
    if generates(config):
        do = "Train channel A alone first (b_ratio: 0): answers hold no coordinates before that"
        return [Finding(ROWS, str(folder), "warn", f"{found}; this run trains them", do)]
    return [ok(ROWS, f"{found}; this run trains them", str(folder))]


def checkpoint_bytes(config: Config, sizes: Sizes) -> int:
    """Of one checkpoint: what is trained in float32, AdamW's two moments, tokenizer and processor.

    Under LoRA only the adapters are in it.
    """
    weights = sizes.trained if config.tuner.train_type == "lora" else sizes.parameters
    files = (path for path in config.model.model.glob("*") if path.suffix != ".safetensors")
    beside = sum(path.stat().st_size for path in files if path.is_file())
    return FLOAT32 * (weights + 2 * sizes.trained) + beside


def judge_disk(config: Config, sizes: Sizes, samples: int) -> Finding:
    """Whether the checkpoints that a run keeps fit beside what is on its disk."""
    training = config.training
    if training.save_strategy == "no":
        return skipped(DISK, "save_strategy no: no checkpoint is written")
    saves = math.ceil(training.total_steps(samples) / training.save_steps)
    # The next one is whole before the oldest is removed.
    kept = saves if training.save_total_limit is None else min(saves, training.save_total_limit + 1)
    each, there = checkpoint_bytes(config, sizes), len(checkpoints_in(training.output_dir))
    folder = training.output_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = (
        f"{kept} checkpoints of {gib(each)} at once, {there} of them there already; "
        f"{gib(free)} are free"
    )
    if each * max(kept - there, 0) <= free:
        return ok(DISK, found, str(training.output_dir))
    do = "Lower training.save_total_limit, raise save_steps, or name an output_dir on another disk"
    return Finding(DISK, str(training.output_dir), "fail", found, do)


def _memory_findings(
    config: Config,
    sizes: Sizes,
    looked: Looked,
    visible: Sequence[int],
    use: GpuUse | None,
    placement: Placement | None,
) -> list[Finding]:
    processes = learner_processes(os.environ)
    chosen = spread(looked.samples, max(1, config.training.effective_batch_size // processes))
    device = "cuda" if visible else "cpu"
    needed = step_cost(config, chosen, "A", processes=processes, device=device)
    here, where = _own_room(visible, use)
    on_host = None if not visible else judge_loading(config, sizes, _sharing(), available_ram())
    loading = [] if on_host is None else [on_host]
    if looked.longest_prompt is None:
        return [*loading, judge_training(config, needed, here, where)]
    devices = placement.tensor_parallel_size if placement is not None else 1
    served = serving(config, sizes, looked.longest_prompt, devices)
    if placement is None:
        return [
            *loading,
            judge_training(config, needed, here, where),
            judge_serving(served, None, ""),
        ]
    if not placement.gpus:
        return [
            judge_training(config, needed, here, where),
            judge_serving(served, here, "a colocated server", "this machine"),
        ]
    budget = None if here is None else here * placement.gpu_memory_utilization
    used = f"gpu_memory_utilization {placement.gpu_memory_utilization:g}"
    findings = [judge_serving(served, budget, "a colocated server", used)]
    if here is not None and budget is not None:
        offload = config.rollout_matching.offload
        findings.append(judge_beside(needed, offload, USABLE * here - budget, where))
        here, where = here - ENGINE_BYTES, f"{where} beside the server, which sleeps"
    return [*loading, judge_training(config, needed, here, where), *findings]


def _own_room(visible: Sequence[int], use: GpuUse | None) -> tuple[float | None, str]:
    """Bytes for one learner process, and of what; None where nobody tells."""
    if visible:
        totals = [gpu.total_mib for gpu in use.gpus if gpu.index in visible] if use else []
        return (min(totals) * 2.0**20 if totals else None), "a GPU"
    available = available_ram()
    return (None if available is None else available / _sharing()), "RAM"


def _sharing() -> int:
    """Learner processes of this host."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(int(local), 1) if local.isdecimal() else 1


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.4g} million"
