"""An estimate of a run on GPUs of one kind: for a person, as JSON, and what does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from learner.config.schema import Config
from learner.data.show import new_table
from learner.models.gpus import Gpu
from learner.operate.estimate.sizes import (
    ENGINE_BYTES,
    USABLE,
    Serving,
    Sizes,
    gib,
    read_sizes,
    served_bytes,
    serving,
)
from learner.operate.estimate.step import (
    OFFLOAD_REMEDY,
    StepCost,
    meta_model,
    recipe_of,
    step_cost,
)
from learner.rollout.colocate import GPU_MEMORY_UTILIZATION
from learner.training.start_checks import (
    check_processes,
    check_step_budget,
    generates,
    longest_prompt,
)
from learner.types import Channel, Sample
from shared_contracts.errors import ContractError
from shared_contracts.footprint import engine_share


@dataclass(frozen=True)
class Estimate:
    """processes: learner GPUs. costs: of one of them, by channel. samples: of its step.

    parameters: of the model. pushed: bytes of a push. served: on each GPU of the servers; None
    where the run has none.
    """

    config: Config
    gpu: Gpu
    processes: int
    samples: int
    costs: dict[Channel, StepCost]
    parameters: int
    pushed: int
    served: Serving | None

    @property
    def server_share(self) -> float:
        """Of a GPU, what an engine takes."""
        rollout = self.config.rollout_matching
        if rollout.backend == "colocate":
            return rollout.vllm.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        return engine_share(self.gpu.memory, 0.0 if self.served is None else self.served.largest)

    @property
    def colocated(self) -> bool:
        """Whether learner and server take turns on a GPU."""
        return self.config.rollout_matching.backend == "colocate" and self.served is not None

    @property
    def room(self) -> float:
        """Bytes of a GPU that a step can have: beside a colocated server, which sleeps then."""
        return self.gpu.memory * USABLE - (ENGINE_BYTES if self.colocated else 0)

    @property
    def kept(self) -> int:
        """Bytes that the learner keeps while a colocated server works."""
        return self.largest.kept(self.config.rollout_matching.offload)

    @property
    def left(self) -> float:
        """Bytes of a GPU that a colocated server leaves while it works."""
        return self.gpu.memory * (USABLE - self.server_share)

    @property
    def forwards(self) -> int:
        """Of a pack in channel A."""
        return 1 if self.config.stage2_ab is None else self.config.stage2_ab.n_softctx_iter

    @property
    def largest(self) -> StepCost:
        return max(self.costs.values(), key=lambda cost: cost.total)

    def step_s(self, cost: StepCost) -> float:
        """Seconds of a step at best: every pack as long as the longest one."""
        return cost.packs * cost.seconds + cost.update_s

    def mfu(self, cost: StepCost) -> float:
        """The highest share of the GPU's arithmetic that a step can reach."""
        return cost.packs * cost.flops / (self.step_s(cost) * self.gpu.flops)

    @property
    def push_s(self) -> float:
        """Seconds of a push at best, over the link between GPUs of a node."""
        return self.pushed / self.gpu.link

    @property
    def sequences(self) -> int | None:
        """How many sequences of the longest kind a server's GPU can hold at once."""
        if self.served is None:
            return None
        return self.served.sequences(self.gpu.memory * self.server_share - ENGINE_BYTES)

    def refusals(self) -> Iterator[ContractError]:
        """What cannot fit, with the numbers."""
        cost = self.largest
        if cost.total > self.room:
            found = f"a learner needs {cost}; {gib(self.room)} of the {self.gpu.name} can be used"
            yield ContractError("--gpu", found, cost.remedy(self.room))
        if self.colocated and self.kept > self.left:
            found = (
                f"while its server works, a learner keeps {gib(self.kept)} of weights and "
                f"optimizer; the server leaves {gib(self.left)} of the {self.gpu.name}"
            )
            yield ContractError("rollout_matching.offload", found, OFFLOAD_REMEDY)
        if self.sequences == 0:
            has = gib(self.gpu.memory * self.server_share)
            found = f"a server needs {self.served}; it takes {has} of the {self.gpu.name}"
            do = "Lower rollout_matching.max_new_tokens, or raise tensor_parallel_size"
            yield ContractError("rollout_matching.vllm", found, do)


def estimate(config: Config, samples: Sequence[Sample], gpu: Gpu, processes: int) -> Estimate:
    """Estimate a run. samples: of its data.

    Raises ContractError for a model or data that no run could take, and a number of processes
    that the config cannot have.
    """
    check_processes(config, processes)
    check_step_budget(config, len(samples), processes)
    own = samples[: max(1, config.training.effective_batch_size // processes)]
    sizes = read_sizes(config)
    recipe = recipe_of(config, meta_model(config))
    channels = {recipe.channel(step) for step in range(1000)}
    costs = {
        channel: step_cost(config, own, channel, gpu, processes) for channel in sorted(channels)
    }
    return Estimate(
        config=config,
        gpu=gpu,
        processes=processes,
        samples=len(own),
        costs=costs,
        parameters=sizes.parameters,
        pushed=sizes.parameters * served_bytes(config),
        served=_served(config, sizes, samples),
    )


def _served(config: Config, sizes: Sizes, samples: Sequence[Sample]) -> Serving | None:
    if not generates(config) or config.rollout_matching.backend == "hf":
        return None
    return serving(config, sizes, longest_prompt(config, samples), 1)


def as_json(found: Estimate) -> dict[str, Any]:
    """Bytes, seconds and counts under plain names."""
    return {
        "gpu": found.gpu.name,
        "gpu_bytes": found.gpu.memory,
        "usable_bytes": int(found.room),
        "learner_gpus": found.processes,
        "fits": not list(found.refusals()),
        "beside_server": {"kept_bytes": found.kept, "usable_bytes": int(found.left)}
        if found.colocated
        else None,
        "channels": {
            channel: {
                "pack_tokens": cost.tokens,
                "packs": cost.packs,
                "weights_bytes": cost.weights,
                "gradients_bytes": cost.gradients,
                "moments_bytes": cost.moments,
                "working_bytes": cost.working,
                "total_bytes": cost.total,
                "pack_flops": cost.flops,
                "step_seconds_at_best": found.step_s(cost),
                "mfu_at_best": found.mfu(cost),
                "largest_tensors": [
                    {"shape": list(shape), "dtype": dtype, "bytes": size}
                    for shape, dtype, size in cost.largest
                ],
            }
            for channel, cost in found.costs.items()
        },
        "push_bytes": found.pushed,
        "push_seconds_at_best": found.push_s,
        "server": None
        if found.served is None
        else {
            "weights_bytes": int(found.served.weights),
            "sequence_bytes": int(found.served.sequence),
            "sequence_tokens": found.served.length,
            "token_bytes": int(found.served.token),
            "memory_share": found.server_share,
            "max_model_len": found.served.context,
            "sequences": found.sequences,
        },
    }


def tables(found: Estimate) -> Iterator[tuple[str, Table]]:
    """Memory, time, the largest tensors, and the servers."""
    costs = found.costs.items()
    memory = new_table("learner GPU", *(f"#channel {channel}" for channel, _ in costs))
    for name in ("weights", "gradients", "moments", "working", "total"):
        memory.add_row(name, *(gib(getattr(cost, name)) for _, cost in costs))
    memory.add_row(f"usable of {found.gpu.name}", *(gib(found.room) for _ in costs))
    if found.colocated:
        memory.add_row("kept while the server works", *(gib(found.kept) for _ in costs))
        memory.add_row("usable then", *(gib(found.left) for _ in costs))
    yield f"Memory of each of {found.processes} learner GPU(s)", memory
    time = new_table("at best", *(f"#channel {channel}" for channel, _ in costs))
    time.add_row("packs in a step", *(f"{cost.packs}" for _, cost in costs))
    time.add_row("tokens in the longest", *(f"{cost.tokens:,}" for _, cost in costs))
    time.add_row("PFLOP a pack", *(f"{cost.flops / 1e15:.3g}" for _, cost in costs))
    time.add_row("seconds a step", *(f"{found.step_s(cost):.3g}" for _, cost in costs))
    time.add_row("MFU", *(f"{found.mfu(cost):.0%}" for _, cost in costs))
    time.add_row("seconds a push", *(f"{found.push_s:.3g}" for _ in costs))
    yield f"Time of a step of {found.samples} samples, by the roofline of the GPU", time
    tensors = new_table("shape", "type", "#GiB")
    for shape, dtype, size in found.largest.largest[:4]:
        tensors.add_row(" x ".join(map(str, shape)), dtype, f"{size / 2**30:.2f}")
    yield "Largest tensors at the peak, beside weights, gradients and moments", tensors
    if found.served is not None:
        servers = new_table("server GPU", "#")
        servers.add_row("gpu_memory_utilization", f"{found.server_share:g}")
        servers.add_row("max_model_len", f"{found.served.context:,}")
        servers.add_row("weights", gib(found.served.weights))
        servers.add_row("cache of a token", f"{found.served.token / 1024:.3g} KiB")
        servers.add_row(f"cache of {found.served.length:,} tokens", gib(found.served.sequence))
        servers.add_row("sequences at once", f"{found.sequences}")
        servers.add_row("decode_batch_size", f"{found.served.at_once}")
        yield "Each GPU of a server", servers
