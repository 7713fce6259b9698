"""What the checkpoint weighs and what the run keeps, beside what this machine has."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.config.schema import Config
from learner.data.images import UnreadableImage
from learner.doctor import gpus, memory
from learner.doctor.findings import Finding, of_error, ok, skipped
from learner.doctor.inputs import CHECKPOINT, DATA, IMAGES, SAMPLED, Looked, spread
from learner.doctor.sizes import Sizes, Stored, read_sizes, stored_tensors
from learner.preflight import generates, learner_processes
from learner.rollout.colocate import Placement
from learner.run_lengths import lengths_of_run
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.gpu_use import GpuUse

WEIGHTS = "weights"


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
        files = judge_files(str(config.model.model), sizes, stored_tensors(config.model.model))
    except ContractError as error:
        return Weighed([*of_error(WEIGHTS, error), skipped(memory.LEARNER, f"waits for {WEIGHTS}")])
    if not looked.samples:
        return Weighed([files, skipped(memory.LEARNER, f"waits for {DATA}")], sizes)
    if visible is None:
        return Weighed([files, skipped(memory.LEARNER, f"waits for {gpus.CHECK}")], sizes)
    try:
        estimated = _memory(config, sizes, looked.samples, visible, use, placement)
    except ContractError as error:
        estimated = of_error(memory.LEARNER, error)
    except UnreadableImage:  # told with the images
        estimated = [skipped(memory.LEARNER, f"waits for {IMAGES}")]
    return Weighed([files, *estimated], sizes)


_CHECKS = (WEIGHTS, memory.LEARNER)


def judge_files(folder: str, sizes: Sizes, stored: Mapping[str, Stored]) -> Finding:
    """Whether the files of a checkpoint have what its config describes."""
    if not stored:
        return skipped(WEIGHTS, "there are no safetensors files to look into", folder)
    missing = [name for name in sizes.shapes if name not in stored]
    other = [
        name
        for name, shape in sizes.shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    if not missing and not other:
        found = f"{_count(sizes.parameters)} parameters, {_count(sizes.trained)} trained"
        return ok(WEIGHTS, found, folder)
    found = (
        f"{len(missing)} parameters of its config are in no file, {len(other)} have another shape; "
        f"first {[*other, *missing][0]}"
    )
    do = (
        "Save it again with transformers' save_pretrained: what transformers does not find, it "
        "draws at random"
    )
    return Finding(WEIGHTS, folder, "fail" if other else "warn", found, do)


def _memory(
    config: Config,
    sizes: Sizes,
    samples: Sequence[Sample],
    visible: Sequence[int],
    use: GpuUse | None,
    placement: Placement | None,
) -> list[Finding]:
    share, longest = _measured(config, samples)
    needed = memory.training(config, sizes, learner_processes(os.environ), share)
    here, where = _own_room(visible, use)
    if not generates(config) or config.rollout_matching.backend == "hf":
        return [memory.judge_training(needed, here, where)]
    devices = placement.tensor_parallel_size if placement is not None else 1
    served = memory.serving(config, sizes, longest, devices)
    if placement is None:
        serving = memory.judge_serving(served, None, "")
        return [memory.judge_training(needed, here, where), serving]
    if not placement.gpus:
        return [
            memory.judge_training(needed, here, where),
            memory.judge_serving(served, here, "a colocated server", "this machine"),
        ]
    budget = None if here is None else here * placement.gpu_memory_utilization
    used = f"gpu_memory_utilization {placement.gpu_memory_utilization:g}"
    if here is not None and budget is not None:  # offload or not: an idle server keeps its own
        here, where = here - budget, f"{where} beside the server"
    return [
        memory.judge_training(needed, here, where),
        memory.judge_serving(served, budget, "a colocated server", used),
    ]


def _measured(config: Config, samples: Sequence[Sample]) -> tuple[float, int]:
    """Of some samples: the share of image tokens in what is trained on, the longest prompt."""
    lengths = lengths_of_run(config)
    chosen = spread(samples, SAMPLED)
    images = [lengths.images(sample) for sample in chosen]
    prompts = [lengths.prompt(sample) for sample in chosen]
    targets = [lengths.target(sample) for sample in chosen]
    return sum(images) / (sum(prompts) + sum(targets)), max(prompts)


def _own_room(visible: Sequence[int], use: GpuUse | None) -> tuple[float | None, str]:
    """Bytes for one learner process, and of what; None where nobody tells."""
    if visible:
        totals = [gpu.total_mib for gpu in use.gpus if gpu.index in visible] if use else []
        return (min(totals) * 2.0**20 if totals else None), "a GPU"
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    sharing = max(int(local), 1) if local.isdecimal() else 1
    available = memory.available_ram()
    return (None if available is None else available / sharing), "RAM"


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:,.4g} million"
