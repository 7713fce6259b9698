"""The estimate of a run on GPUs of one kind: tables, JSON, and errors for what does not fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.config.schema import Config
from learner.data.show import Table
from learner.models.gpus import Gpu
from learner.operate.step_cost import (
    SMALLER,
    USABLE,
    StepCost,
    gib,
    meta_model,
    ring_bytes,
    step_costs,
)
from learner.rollout.colocate import GPU_MEMORY_UTILIZATION
from learner.training.checkpoint_checks import check_model, longest_prompt
from learner.training.input_checks import check_processes, check_step_budget, generates
from learner.types import Channel, Sample
from shared_contracts.checkpoints import GIB, MIB, cache_elements, engine_share, run_context
from shared_contracts.errors import ContractError

# Engine memory beside weights and cache: the CUDA context, kernels, graphs, activations of a
# prefill. Also the upper bound of a sleeping engine's memory.
ENGINE_BYTES = 4 * GIB
_KINDS = ("weights", "start", "gradients", "moments", "working", "total")
# Expected range of a real step's speed, as shares of the bound; the first is PUBLISHED[0]'s.
REACHED = (0.69, 0.55)
# Run, published measurement (read on 2026-11-25), and this estimate's bound for the same run.
PUBLISHED = (
    ("Qwen3-4B, LoRA, 1 x H100, packs of 16k, prime-rl", "6,230 tokens/s", "8,986 tokens/s"),
    ("Qwen3-4B, all weights, 8 x H200, packs of 65k", "36 % MFU", "-"),
    ("push of Qwen3-4B, 8 x H100, NeMo-RL", "0.21 to 0.34 s", "-"),
)


@dataclass(frozen=True)
class Serving:
    """What a server's GPU holds beside the weights.

    sequence: bytes of the KV cache of the longest sequence, which has `length` tokens.
    context: `max_model_len`.
    """

    sequence: int
    length: int
    context: int


@dataclass(frozen=True)
class Estimate:
    """processes: learner GPUs. samples: per learner GPU and step. costs: of a learner GPU.

    parameters: number in the model. pushed: their bytes, in a push and on a server's GPU.
    largest_tensor: bytes of the largest one. served: None without servers.
    """

    config: Config
    gpu: Gpu
    processes: int
    samples: int
    costs: dict[Channel, StepCost]
    parameters: int
    pushed: int
    largest_tensor: int
    served: Serving | None

    @property
    def colocated(self) -> bool:
        return self.config.rollout_matching.backend == "colocate" and self.served is not None

    @property
    def sharded(self) -> bool:
        return self.config.training.data_parallel == "fsdp2"

    @property
    def server_share(self) -> float:
        if self.colocated:
            stated = self.config.rollout_matching.vllm.gpu_memory_utilization
            return stated or GPU_MEMORY_UTILIZATION
        return engine_share(self.gpu.memory, self.largest_tensor)

    @property
    def largest(self) -> StepCost:
        return max(self.costs.values(), key=lambda cost: cost.total)

    @property
    def room(self) -> float:
        """Bytes of a GPU for a step; a colocated server sleeps meanwhile."""
        return self.gpu.memory * USABLE - (ENGINE_BYTES if self.colocated else 0)

    @property
    def kept(self) -> int:
        """Bytes of the learner while a colocated server works; without gradients."""
        offload = self.config.rollout_matching.offload
        model = 0 if offload.enabled and offload.offload_model else self.largest.weights
        moments = 0 if offload.enabled and offload.offload_optimizer else self.largest.moments
        return model + moments + self.largest.start

    @property
    def left(self) -> float:
        """Bytes of a GPU that a colocated server leaves while it works."""
        return self.gpu.memory * (USABLE - self.server_share)

    @property
    def sequences(self) -> int | None:
        """Number of longest sequences that fit on a server's GPU; None without servers."""
        if self.served is None:
            return None
        room = self.gpu.memory * self.server_share - ENGINE_BYTES - self.pushed
        return max(0, int(room / self.served.sequence))

    def step_s(self, cost: StepCost) -> float:
        """Return the lower bound of a step in seconds (Williams et al., "Roofline", CACM 2009).

        Assumes that all packs are as long as the longest, and that communication overlaps with
        computation. The update reads weights, gradients and moments, and writes weights and
        moments: 28 bytes for each parameter.
        """
        pack = cost.flops / self.gpu.flops + cost.moved / self.gpu.bandwidth
        update = 3.5 * cost.moments / self.gpu.bandwidth
        return max(cost.packs * pack, self.messages_s(cost)) + update

    def expected_s(self, cost: StepCost) -> tuple[float, float]:
        """Return the expected range of a real step in seconds."""
        best = self.step_s(cost)
        return best / REACHED[0], best / REACHED[1]

    def messages_s(self, cost: StepCost) -> float:
        """Return the lower bound of a step's communication between learner GPUs of one node, in s.

        FSDP2 gathers parameters and reduces gradients for every pack; DDP reduces gradients once.
        """
        reduced = 0.0 if self.sharded else ring_bytes(cost.moments, self.processes)
        return (cost.packs * cost.sent + reduced) / self.gpu.link

    def mfu(self, cost: StepCost) -> float:
        """Return the upper bound of a step's model FLOPs utilization, counted as `perf/mfu`."""
        return cost.packs * cost.useful / (self.step_s(cost) * self.gpu.flops)

    @property
    def push_s(self) -> float:
        """Lower bound of a push in seconds; shards are gathered and copied to the host before."""
        if not self.sharded:
            return self.pushed / self.gpu.link
        gather = ring_bytes(self.pushed, self.processes) / self.gpu.link
        host = self.pushed / self.gpu.host
        return gather + host + self.pushed / min(self.gpu.link, self.gpu.host)

    def served_steps(self) -> dict[int, dict[str, float]]:
        """Return lower bounds of channel B's steps in seconds, by the number of server GPUs.

        Separate servers answer while the learner trains (STEP-03); a colocated server and the
        learner alternate. A decoded token reads all weights and the cache of each sequence.
        Answers have `max_new_tokens`; a prompt token is 2 FLOPs for each weight.
        """
        served, rollout = self.served, self.config.rollout_matching
        if served is None or "B" not in self.costs:
            return {}
        requests = self.samples * self.processes * self.config.answers_per_sample
        prompt = 2 * self.parameters * (served.length - rollout.max_new_tokens)
        learning, steps = self.step_s(self.costs["B"]), dict[int, dict[str, float]]()
        for servers in (1,) if self.colocated else (1, 2, 4, 8):
            each = math.ceil(requests / servers)
            rounds = math.ceil(each / max(1, min(rollout.decode_batch_size, self.sequences or 1)))
            read = self.pushed + math.ceil(each / rounds) * served.sequence
            answers = rounds * rollout.max_new_tokens * read / self.gpu.bandwidth
            answers += each * prompt / self.gpu.flops
            sides = answers + learning if self.colocated else max(answers, learning)
            steps[servers] = {
                "answers_seconds": answers,
                "learning_seconds": learning,
                "step_seconds": self.push_s + sides,
            }
        return steps

    def refusals(self) -> Iterator[ContractError]:
        cost, served, gpu = self.largest, self.served, self.gpu
        if cost.total > self.room:
            found = f"a learner needs {cost}; {gib(self.room)} of the {gpu.name} can be used"
            yield ContractError("--gpu", found, SMALLER)
        if self.colocated and self.kept > self.left:
            found = (
                f"while its server works, a learner keeps {gib(self.kept)} of weights and "
                f"optimizer; the server leaves {gib(self.left)} of the {gpu.name}"
            )
            do = "Set offload.enabled with offload_optimizer or offload_model, or lower "
            do += "rollout_matching.vllm.gpu_memory_utilization"
            yield ContractError("rollout_matching.offload", found, do)
        if served is not None and self.sequences == 0:
            found = (
                f"a server needs {gib(self.pushed)} of weights and {gib(served.sequence)} of KV "
                f"cache for a sequence of {served.length} tokens; it takes "
                f"{gib(gpu.memory * self.server_share)} of the {gpu.name}"
            )
            do = "Lower rollout_matching.max_new_tokens, or raise tensor_parallel_size"
            yield ContractError("rollout_matching.vllm", found, do)


def estimate(config: Config, samples: Sequence[Sample], gpu: Gpu, processes: int) -> Estimate:
    """Estimate a run. samples: the training data, those of a step first. processes: learner GPUs.

    Raises ContractError for an invalid model, data, or number of processes.
    """
    check_model(config)
    check_processes(config, processes)
    check_step_budget(config, len(samples), processes)
    own = samples[: max(1, config.training.effective_batch_size // processes)]
    loaded, rollout, served = meta_model(config), config.rollout_matching, None
    elements = [
        weight.numel()
        for name, weight in loaded.model.named_parameters()
        if "lora_" not in name and "trainable_tokens" not in name
    ]
    parameters, size = sum(elements), 4 if config.model.torch_dtype == "float32" else 2
    if generates(config) and rollout.backend != "hf":
        prompt, new = longest_prompt(config, samples), rollout.max_new_tokens
        context = rollout.vllm.max_model_len or run_context(config.model.model, prompt, new)
        length, text = min(prompt + new, context), loaded.inner.config.get_text_config()
        served = Serving(length * cache_elements(text.to_dict()) * size, length, context)
    costs = step_costs(config, loaded, own, processes)
    pushed, largest = parameters * size, max(elements) * size
    return Estimate(config, gpu, processes, len(own), costs, parameters, pushed, largest, served)


def as_json(found: Estimate) -> dict[str, Any]:
    """Return the document of `learner estimate --json`: bytes, seconds and counts."""
    served, beside = found.served, None
    if found.colocated:
        beside = {"kept_bytes": found.kept, "usable_bytes": int(found.left)}
    return {
        "gpu": found.gpu.name,
        "gpu_bytes": found.gpu.memory,
        "usable_bytes": int(found.room),
        "learner_gpus": found.processes,
        "fits": not list(found.refusals()),
        "beside_server": beside,
        "channels": {
            channel: {
                "pack_tokens": cost.tokens,
                "packs": cost.packs,
                **{f"{kind}_bytes": getattr(cost, kind) for kind in _KINDS},
                "pack_flops": cost.flops,
                "step_seconds_at_best": found.step_s(cost),
                "step_seconds_expected": found.expected_s(cost),
                "messages_seconds_at_best": found.messages_s(cost),
                "mfu_at_best": found.mfu(cost),
            }
            for channel, cost in found.costs.items()
        },
        "push_bytes": found.pushed,
        "push_seconds_at_best": found.push_s,
        "served_steps_seconds_at_best": {
            str(servers): step["step_seconds"] for servers, step in found.served_steps().items()
        },
        "server": served
        and {
            "weights_bytes": found.pushed,
            "sequence_bytes": served.sequence,
            "sequence_tokens": served.length,
            "token_bytes": served.sequence // served.length,
            "memory_share": found.server_share,
            "max_model_len": served.context,
            "sequences": found.sequences,
        },
    }


def tables(found: Estimate) -> Iterator[Table]:
    document = as_json(found)
    plain = {key: value for key, value in document.items() if isinstance(value, int | float)}
    channels = {f"channel {name}": each for name, each in document["channels"].items()}
    steps = {f"{servers} GPU(s)": step for servers, step in found.served_steps().items()}
    for title, columns in (
        (f"{found.gpu.name}: learner GPUs and pushes", {"": plain}),
        (
            f"Each of {found.processes} learner GPU(s), in a step of {found.samples} samples",
            channels,
        ),
        ("While the server works, the learner keeps", {"": document["beside_server"]}),
        ("Each GPU of a server", {"": document["server"]}),
        ("Steps of channel B, by GPUs of servers", steps),
    ):
        if any(columns.values()):
            yield _table(title, columns)
    reached = " to ".join(f"{share:.0%}" for share in reversed(REACHED))
    title = f"Real steps reach {reached} of a bound. What others have measured"
    yield Table(title, ("run", "measured", "our bound"), PUBLISHED)


def _table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of mappings with equal keys; the suffix of a key is its unit."""
    rows = []
    for key in next(iter(columns.values())):
        name = key.replace("_bytes", "").replace("_seconds", "").replace("_", " ")
        rows.append([name, *(_with_unit(key, numbers[key]) for numbers in columns.values())])
    return Table(title, ("", *(f"#{name}" for name in columns)), rows)


def _with_unit(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return gib(value) if value >= MIB else f"{value / 1024:.3g} KiB"
    if "seconds" in key:
        values = value if isinstance(value, tuple) else (value,)
        return " to ".join(f"{each:.3g}" for each in values) + " s"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value}"
