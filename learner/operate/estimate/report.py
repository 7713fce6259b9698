"""An estimate of a run on GPUs of one kind: for a person, as JSON, and what does not fit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from learner.config.schema import Config
from learner.data.show import new_table
from learner.models.gpus import Gpu
from learner.models.load import on_meta
from learner.operate.estimate.fake import ring_bytes
from learner.operate.estimate.sizes import (
    ENGINE_BYTES,
    USABLE,
    Serving,
    gib,
    served_bytes,
    serving,
    sizes_of,
)
from learner.operate.estimate.step import (
    OFFLOAD_REMEDY,
    StepCost,
    meta_model,
    recipe_of,
    step_costs,
)
from learner.rollout.colocate import GPU_MEMORY_UTILIZATION
from learner.training.checkpoint_checks import longest_prompt
from learner.training.input_checks import check_processes, check_step_budget, generates
from learner.types import Channel, Sample
from shared_contracts.errors import ContractError
from shared_contracts.footprint import engine_share

# Numbers of GPUs of servers that the table of steps compares.
SERVERS = (1, 2, 4, 8)
# Shares of the bound that measured steps of other programs reach.
REACHED = (0.55, 0.69)
# Read on 2026-11-25: run, what was measured, and what this estimate says of the same run.
PUBLISHED = (
    ("Qwen3-4B, LoRA, 1 x H100, packs of 16k, prime-rl", "6,230 tokens/s", "8,986 tokens/s"),
    ("Qwen3-4B, all weights, 8 x H200, packs of 65k", "36 % MFU", "-"),
    ("push of Qwen3-4B, 8 x H100, NeMo-RL", "0.21 to 0.34 s", "-"),
)


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

    @property
    def sharded(self) -> bool:
        """Whether each learner GPU has a part of the weights."""
        return self.config.training.data_parallel == "fsdp2"

    def step_s(self, cost: StepCost) -> float:
        """Seconds of a step at best.

        Every pack is as long as the longest one, and messages travel while packs are computed.
        """
        computed = cost.packs * cost.pack.seconds(self.gpu)
        return max(computed, self.messages_s(cost)) + cost.update.seconds(self.gpu)

    def messages_s(self, cost: StepCost) -> float:
        """Seconds of a step's messages between learner GPUs of one node, at best.

        FSDP2 gathers parameters and reduces gradients for every pack, DDP reduces gradients once.
        """
        return (cost.packs * cost.pack.sent + cost.update.sent) / self.gpu.link

    def mfu(self, cost: StepCost) -> float:
        """The highest share of the GPU's arithmetic that a step can reach."""
        return cost.packs * cost.flops / (self.step_s(cost) * self.gpu.flops)

    @property
    def gather_s(self) -> float:
        """Seconds at best in which shards are gathered and copied to the host, before a push."""
        if not self.sharded:
            return 0.0
        return ring_bytes(self.pushed, self.processes) / self.gpu.link + self.pushed / self.gpu.host

    @property
    def send_s(self) -> float:
        """Seconds of the transfer of a push at best, over the link between GPUs of a node."""
        return self.pushed / (min(self.gpu.link, self.gpu.host) if self.sharded else self.gpu.link)

    @property
    def push_s(self) -> float:
        return self.gather_s + self.send_s

    @property
    def server_counts(self) -> tuple[int, ...]:
        """Numbers of GPUs of servers that steps of channel B are estimated for."""
        if self.served is None or "B" not in self.costs:
            return ()
        return (1,) if self.colocated else SERVERS

    def rollouts_s(self, servers: int) -> float:
        """Seconds at best in which GPUs of `servers` answer the samples of a step.

        The samples of all processes are spread evenly. A decoded token reads all weights and the
        cache of each sequence; answers have `max_new_tokens`, and a prompt token is 2 FLOPs for
        each weight.
        """
        served = self.served
        assert served is not None, "the run has servers"
        new = self.config.rollout_matching.max_new_tokens
        each = math.ceil(self.samples * self.processes / servers)
        rounds = math.ceil(each / max(1, min(served.at_once, self.sequences or 1)))
        token_s = (served.weights + math.ceil(each / rounds) * served.sequence) / self.gpu.bandwidth
        prompts = each * (served.length - new)
        return rounds * new * token_s + prompts * 2 * self.parameters / self.gpu.flops

    def served_step_s(self, servers: int) -> float:
        """Seconds of a step of channel B at best: a push, then the longer of both sides.

        With GPUs of their own, servers answer while the learner trains (STEP-03). A colocated
        server and a learner take turns.
        """
        sides = self.rollouts_s(servers), self.step_s(self.costs["B"])
        return self.push_s + (sum(sides) if self.colocated else max(sides))

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
            yield ContractError("--gpu", found, cost.remedy(self.config, self.room))
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

    The step is counted once; `dataclasses.replace` with another `gpu` estimates it on that one.

    Raises ContractError for a model or data that no run could take, and a number of processes
    that the config cannot have.
    """
    check_processes(config, processes)
    check_step_budget(config, len(samples), processes)
    own = samples[: max(1, config.training.effective_batch_size // processes)]
    model = on_meta(config)
    sizes, loaded = sizes_of(model), meta_model(config, model)
    recipe = recipe_of(config, loaded)
    channels = sorted({recipe.channel(step) for step in range(1000)})
    costs, served = step_costs(config, loaded, recipe, own, channels, processes), None
    if generates(config) and config.rollout_matching.backend != "hf":
        served = serving(config, sizes, longest_prompt(config, samples), 1)
    return Estimate(
        config=config,
        gpu=gpu,
        processes=processes,
        samples=len(own),
        costs=costs,
        parameters=sizes.parameters,
        pushed=sizes.parameters * served_bytes(config),
        served=served,
    )


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
                "messages_seconds_at_best": found.messages_s(cost),
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
        "push_gather_seconds_at_best": found.gather_s,
        "served_steps_seconds_at_best": {
            str(count): found.served_step_s(count) for count in found.server_counts
        },
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
    if found.processes > 1:
        time.add_row("of messages beside", *(f"{found.messages_s(cost):.3g}" for _, cost in costs))
    time.add_row("MFU", *(f"{found.mfu(cost):.0%}" for _, cost in costs))
    time.add_row("seconds a push", *(f"{found.push_s:.3g}" for _ in costs))
    if found.sharded:
        time.add_row("of these to gather", *(f"{found.gather_s:.3g}" for _ in costs))
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
    if found.server_counts:
        steps = new_table("#GPUs of servers", "#answers", "#learning", "#step", "#expected")
        for count in found.server_counts:
            best = found.served_step_s(count)
            sides = found.rollouts_s(count), found.step_s(found.costs["B"])
            expected = f"{best / REACHED[1]:.3g} to {best / REACHED[0]:.3g}"
            steps.add_row(f"{count}", *(f"{s:.3g}" for s in (*sides, best)), expected)
        title = "Seconds of a step of channel B; expected: the step / 0.69 to the step / 0.55"
        yield title, steps
    others = new_table("run", "measured", "our bound")
    for row in PUBLISHED:
        others.add_row(*row)
    yield "What others have measured", others
