"""How much memory a run takes, estimated: states, activations, and what a server keeps.

training     bytes of one learner process, from the shapes of the model alone
serving      bytes of one device of a server: weights, and KV cache of the sequences at once
judge_*      either beside what there is
"""

from dataclasses import dataclass
from pathlib import Path

from learner.config.schema import Config
from learner.doctor.findings import Finding, Status, ok
from learner.doctor.sizes import Sizes, Tower

LEARNER, SERVER = "memory (estimate)", "server memory (estimate)"

GIB = 2**30
FLOAT32 = 4
# Of a GPU, what the driver, kernels and a fragmented allocator leave.
USABLE = 0.92

# Bytes of activations per token, layer and element of the hidden vector, with 16-bit elements.
_KEPT, _SCORES, _RECOMPUTED = 34, 5, 2


@dataclass(frozen=True)
class Training:
    """Bytes of one process.

    states: weights, their gradients and AdamW's two moments; certain.
    activations, logits: of one pack; estimated.
    """

    states: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} for each process: {gib(self.states)} of weights, gradients and "
            f"optimizer, {gib(self.activations)} of activations, {gib(self.logits)} of logits"
        )


def training(config: Config, sizes: Sizes, processes: int, image_share: float) -> Training:
    """What one process keeps in the middle of a backward.

    States: a trained parameter is float32 here and has a float32 gradient and two float32
    moments (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models", SC 2020, section 3.1, without their half-precision copies: 4 + 4 + 8 bytes). Autocast
    keeps a bfloat16 copy of it during a forward. DDP holds every gradient once more, in its
    buckets; FSDP2 splits all of it.

    image_share: of the tokens of a pack, those of images.
    """
    element = FLOAT32 if config.model.torch_dtype == "float32" else 2
    several, sharded = processes > 1, config.training.data_parallel == "fsdp2"
    cast = 0 if element == FLOAT32 else element
    buckets = FLOAT32 if several and not sharded else 0
    states = sizes.trained * (4 * FLOAT32 + cast + buckets) + sizes.frozen * element
    tokens = config.global_max_length
    eager = config.model.attn_implementation == "eager"
    again = config.model.gradient_checkpointing
    kept = activations(sizes.language, tokens, element, again, eager)
    if sizes.vision is not None:
        patches = round(tokens * image_share) * sizes.merged
        kept += activations(sizes.vision, patches, element, again, eager)
    return Training(
        states=states / (processes if sharded else 1),
        activations=kept,
        logits=2 * tokens * sizes.vocabulary * element,  # and their gradient
    )


def activations(tower: Tower, tokens: int, element: int, recomputed: bool, eager: bool) -> float:
    """Bytes that a forward of `tokens` keeps for its backward.

    Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys
    2023 (arXiv 2205.05198): `s h (34 + 5 a s / h)` bytes a layer with 16-bit elements, tables 2
    and equation 2; without its second term where attention keeps no scores (sdpa); with full
    recomputation `2 s h` a layer, and one whole layer while it is made again. Their blocks have
    an MLP of 4 h and dropout, so this is a measure and no count.

    recomputed: gradient checkpointing. eager: attention that keeps its scores.
    """
    scores = _SCORES * tower.heads * tokens / tower.hidden if eager else 0.0
    layer = tokens * tower.hidden * (_KEPT + scores) * element / 2
    if not recomputed:
        return tower.layers * layer
    return tower.layers * tokens * tower.hidden * _RECOMPUTED * element / 2 + layer


def judge_training(needed: Training, there: float | None, where: str) -> Finding:
    """there: bytes for this process; None where nobody tells."""
    if there is None:
        return ok(LEARNER, f"{needed}; how much there is nobody tells", where)
    found = f"{needed}; there are {gib(there)}"
    if needed.total <= there * USABLE:
        return ok(LEARNER, found, where)
    status: Status = "fail" if needed.states > there else "warn"
    do = (
        "Use training.data_parallel: fsdp2 over more processes, or tuner.train_type: lora"
        if needed.states > there * USABLE
        else "Set model.gradient_checkpointing: true, or lower global_max_length"
    )
    return Finding(LEARNER, where, status, found, do)


@dataclass(frozen=True)
class Serving:
    """Bytes on one device of a server.

    weights: certain. sequence: KV cache of one sequence of `length` tokens. at_once: sequences
    that the config asks of a device at once.
    """

    weights: float
    sequence: float
    length: int
    at_once: int

    def __str__(self) -> str:
        return (
            f"{gib(self.weights)} of weights and {gib(self.sequence)} of KV cache for a sequence "
            f"of {self.length} tokens, of which decode_batch_size asks {self.at_once} at once"
        )


def serving(config: Config, sizes: Sizes, longest_prompt: int, devices: int) -> Serving:
    """What a server keeps on each of the `devices` of a replica.

    A token's cache is a key and a value in every layer (Kwon et al., "Efficient memory
    management for large language model serving with PagedAttention", SOSP 2023, section 3).
    """
    rollout = config.rollout_matching
    element = FLOAT32 if config.model.torch_dtype == "float32" else 2
    length = longest_prompt + rollout.max_new_tokens
    if rollout.vllm.max_model_len is not None:
        length = min(length, rollout.vllm.max_model_len)
    token = 2 * sizes.language.layers * sizes.kv_width * element
    return Serving(
        weights=sizes.parameters * element / devices,
        sequence=length * token / devices,
        length=length,
        at_once=rollout.decode_batch_size * devices,
    )


def judge_serving(
    needed: Serving, budget: float | None, where: str, budget_of: str = ""
) -> Finding:
    """budget: bytes that the server may take of a device; None: it runs, and has taken them."""
    if budget is None:
        return ok(SERVER, f"{needed}; it runs, so its engines have taken theirs", where)
    room = budget - needed.weights
    found = f"{needed}; {budget_of} leaves {gib(max(room, 0))} beside the weights"
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


def gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"
