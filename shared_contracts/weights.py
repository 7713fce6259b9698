"""A push of weights on the wire: bodies of the calls, buckets, and the group (section 5).

A push of full weights, in order; each call answers when its phase is over on every replica:

    POST /init_communicator/     InitCommunicator -> CommunicatorReady   (once)
    POST /start_weight_update/   StartWeightUpdate -> WeightStatus       manifest; drain, pause
    POST /update_weights/        GroupCall -> WeightStatus               transfer and load buckets
    POST /finish_weight_update/  GroupCall -> SyncReport                 caches, version, resume
    POST /close_communicator/    GroupCall -> WeightStatus

A LoRA adapter needs one call, and no group (`world_size` 1):

    POST /load_adapter/?version=N&attempt=A   safetensors -> SyncReport

`/init_communicator/` and `/update_weights/` answer only after the learner's part, so the learner
posts them from a thread. The newest `/init_communicator/` owns the server: every other call names
its `attempt`, and a call with an older one is refused (`taken-over`). A phase ends if the
connection of its call ends.

The group. The learner is rank 0, the engine workers are ranks 1... The server opens a store at
`host:port`, with the key `attempt_key(attempt)`. Over `PrefixStore(group_prefix(number), store)`
each rank calls `meet` and joins a process group of torch; then all join
an `allreduce` of one float32. `gloo` and `ipc` use a gloo group on the network device of the route
to `host`; `nccl` uses an NCCL group. The number is 0, unless there are several `senders`.

The buckets. `plan_buckets(parameters, bucket_bytes)` cuts the manifest. A bucket has the bytes of
each of its tensors, padded with zeros to `ParameterMeta.wire_bytes`. Rank 0 broadcasts one uint8
tensor for each bucket, and then the trailer: for each bucket the `digest` of its 64-bit words, as
int64. A worker refuses buckets with other digests.

With `ipc` the group carries signals only. Every worker maps the learner's memory with the buckets
and the trailer: two alternating slots of `SharedMemory.slot_bytes`. Rank 0 first broadcasts the
`SharedMemory`: the length of its JSON as one int64, then the JSON as uint8. For each bucket, rank 0
broadcasts one byte when the slot is filled, and all ranks pass a barrier after the workers' copy.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared_contracts.machine import address_towards

Transport = Literal["gloo", "nccl", "ipc"]

# READY        the engines answer with one version of the weights
# UPDATING     a push runs; calls wait
# PUSH_NEEDED  a push failed: the engines are rebuilt, and answer after the next full push
WeightState = Literal["READY", "UPDATING", "PUSH_NEEDED"]

# Alignment of parameters in a bucket, so that they can be viewed in place.
WIRE_ALIGNMENT = 16

# Types of the weights of an engine.
DtypeName = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Limit of every number, so that it fits into 64 bits.
MOST = 2**62
Count = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Largest increase of the version in a push. A restarted server, at version 0, gets the version of
# a run that has pushed to other servers.
MOST_VERSION_STEP = 10**6

MAX_FIELDS = 64
MOST_DIMENSIONS = 16
MOST_RANK = 4096


class Wire(BaseModel):
    """A body, or a part of one: bounded, without unknown fields."""

    # str_max_length makes pydantic refuse unpaired surrogates.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, str_max_length=2**30)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # else each is a fault
            raise ValueError(f"{len(value)} fields are more than any object has")
        return value


class InitCommunicator(Wire):
    """Form the weight group, and own the server.

    host, port: address on the server for the store of the rendezvous.
    world_size: number of ranks: `senders` learner processes and all engine workers. 1: the learner
        owns the server without a group, for adapters.
    senders: learner processes that send. Each has its own group with an equal share of the workers,
        in order: colocated processes send to the workers on their own GPUs.
    attempt: a new name for every call; it names the group.
    learner: name of the learner, for the error of a learner that loses the server to it.
    replaces: attempt of this learner's previous group; the call is refused if the server has a
        newer owner. None: a new learner.
    bucket_bytes: size of a packed bucket, equal on both sides.
    timeout_s: limit of every phase, capped by the server's `max_weight_timeout_seconds`.
    """

    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=1)
    senders: int = Field(default=1, ge=1, le=MOST_RANK)
    attempt: str = Field(min_length=1)
    learner: str = ""
    replaces: str | None = None
    transport: Transport = "gloo"
    bucket_bytes: int = Field(default=64 * 2**20, ge=1, le=MOST)
    timeout_s: float = Field(default=240.0, gt=0, le=86400)


class GroupCall(Wire):
    """A call of the owner of the server. attempt: of its `InitCommunicator`."""

    attempt: str


class CommunicatorReady(Wire):
    """The weight group has been formed.

    weights_version: of the server; the versions of the learner's pushes follow it.
    dtype: of the engines' weights; the learner sends each parameter in its `wire_dtype`.
    """

    weights_version: Count
    world_size: Count
    transport: Transport
    server_epoch: str
    dtype: DtypeName


# Engines keep these parameters, the decays of linear attention, in float32.
_WIDE = ".A_log"


def wire_dtype(name: str, dtype: DtypeName) -> DtypeName:
    """Return the type in which a parameter travels to engines whose weights have `dtype`."""
    return "float32" if name.endswith(_WIDE) else dtype


# Name of a tensor with the stacked matrices of all experts -> names of the matrices.
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def unfused(name: str, shape: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return name and shape of each matrix in a tensor of E fused experts; others stay whole.

    transformers holds `experts.gate_up_proj` (E, 2 * I, H) and `experts.down_proj` (E, H, I); the
    rows of the gate come first. The order is that of the matrices in memory.
    """
    owner, _, leaf = name.rpartition(".")
    if not owner.endswith(".experts") or leaf not in _FUSED_EXPERTS or len(shape) != 3:
        return [(name, list(shape))]
    parts = _FUSED_EXPERTS[leaf]
    experts, rows, columns = shape
    return [
        (f"{owner}.{expert}.{part}.weight", [rows // len(parts), columns])
        for expert in range(experts)
        for part in parts
    ]


class ParameterMeta(Wire):
    """A parameter on the wire: name as in the checkpoint, torch dtype name."""

    name: str
    dtype: DtypeName
    shape: Annotated[list[Count], Field(fail_fast=True, max_length=MOST_DIMENSIONS)]

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """`num_bytes`, padded to a multiple of `WIRE_ALIGNMENT`."""
        return math.ceil(self.num_bytes / WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def plan_buckets(
    parameters: Sequence[ParameterMeta], bucket_bytes: int
) -> list[list[ParameterMeta]]:
    """Cut the manifest into consecutive buckets of whole parameters, in order.

    A bucket takes parameters while their `wire_bytes` fit into `bucket_bytes`; a
    parameter larger than that travels alone. Both sides call this with the same
    arguments, so they agree on every boundary.
    """
    buckets: list[list[ParameterMeta]] = []
    used = 0
    for parameter in parameters:
        if not buckets or used + parameter.wire_bytes > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(parameter)
        used += parameter.wire_bytes
    return buckets


Int64Array: TypeAlias = Any

_WIDTH = 4096


def positions_of(words: int) -> int:
    """Return the smallest length of `positions` for a digest of `words` words."""
    return max(_WIDTH, words // _WIDTH)


def digest(words: Int64Array, positions: Int64Array) -> Int64Array:
    """Return sum(words[i] * (2 * i + 1)) modulo 2**64, at about the speed of memory.

    A changed bit changes the sum, because each multiplier is odd. Exchanged words change it, too.

    words: (N,). positions: 0, 1, 2, ... with at least `positions_of(N)` entries.
    """
    whole = len(words) // _WIDTH * _WIDTH
    rows = words[:whole].reshape(-1, _WIDTH)
    tail = words[whole:]
    # Entry (row, column) has the multiplier 2 * (row * _WIDTH + column) + 1.
    of_columns = (rows.sum(0) * (2 * positions[:_WIDTH] + 1)).sum()
    of_rows = (rows.sum(1) * positions[: len(rows)]).sum() * (2 * _WIDTH)
    of_tail = (tail * (2 * (positions[: len(tail)] + whole) + 1)).sum()
    return of_columns + of_rows + of_tail


class StartWeightUpdate(GroupCall):
    """The manifest of a push.

    version: of the server after the push: higher by at most MOST_VERSION_STEP, or the same if a
        replica does not have the server's version.
    parameters: all parameters of the push, in wire order.
    """

    version: Count
    parameters: Annotated[list[ParameterMeta], Field(fail_fast=True)] = Field(min_length=1)


class AdapterMeta(Wire):
    """A LoRA adapter; the fields are those of peft's `LoraConfig`.

    The metadata of an adapter's safetensors have it as JSON under ADAPTER_KEY.
    """

    r: int = Field(ge=1, le=MOST_RANK)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)
    use_dora: bool = False
    use_rslora: bool = False


ADAPTER_KEY = "adapter"


class MoveMemory(Wire):
    """The body of `/sleep/` and `/wake_up/`; it has no fields."""


class WeightStatus(Wire):
    """The weights after a call. weights_version: of the last finished push."""

    state: WeightState
    weights_version: Count
    server_epoch: str


class SyncReport(Wire):
    """The result of a push.

    seconds: of each phase at the server; `transfer` is one. bytes: payload of one replica.
    """

    status: WeightStatus
    seconds: Annotated[dict[str, Seconds], Field(max_length=64)]
    bytes: Count

    @model_validator(mode="after")
    def _has_a_transfer(self) -> "SyncReport":
        if "transfer" not in self.seconds:
            raise ValueError("the seconds of `transfer` are missing")
        return self


# The `memfd_create` name of the shared memory of an `ipc` learner without a GPU.
HOST_MEMORY_NAME = "rollmatch-weights"


class HostMemory(Wire):
    """Memory of the machine.

    path: a memory file of the learner named `HOST_MEMORY_NAME`, e.g. `/proc/123/fd/45`.
    """

    path: str = Field(pattern="^/proc/[0-9]+/fd/[0-9]+$")


class DeviceMemory(Wire):
    """Data with which CUDA and torch map an allocation of another process, bytes as base64.

    gpu: its UUID; the other fields are the arguments of
    `torch.multiprocessing.reductions.rebuild_cuda_tensor` of the same names.
    """

    gpu: str
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    tensor_offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class SharedMemory(Wire):
    """The two slots of an `ipc` learner, one after the other; each has `slot_bytes`."""

    slot_bytes: int = Field(ge=1, le=MOST)
    memory: HostMemory | DeviceMemory


_POLL_S = 0.01

# Torch reads this when it creates an NCCL group.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

_creation_lock = threading.Lock()


def attempt_key(attempt: str) -> str:
    return f"attempt/{attempt}"


def group_prefix(number: int) -> str:
    return f"group/{number}"


def ready_key(rank: int) -> str:
    return f"ready/{rank}"


def rank_name(rank: int) -> str:
    return "learner (rank 0)" if rank == 0 else f"engine worker (rank {rank})"


class Store(Protocol):
    """The used part of torch's `TCPStore`. A closed store raises RuntimeError."""

    def set(self, key: str, value: str, /) -> object: ...

    def check(self, keys: list[str], /) -> bool: ...


def join_ranks(
    torch: Any,
    store: Store,
    init: InitCommunicator,
    rank: int,
    number: int,
    device: Any,
    given_up: Callable[[], bool] = lambda: False,
) -> Any:
    """Join a process group of torch; return it after all ranks have joined.

    torch: the module, which this package does not import. store: `TCPStore` of the rendezvous.
    number: of the group, which has one sender. device: of its buckets; NCCL: the current device.
    Raises as `meet`.
    """
    distributed, ranks = torch.distributed, init.world_size // init.senders
    timeout = timedelta(seconds=init.timeout_s)
    prefixed = distributed.PrefixStore(group_prefix(number), store)
    meet(prefixed, rank, ranks, init.timeout_s, given_up)
    if init.transport == "nccl":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        with _without_watchdog():
            group = distributed.ProcessGroupNCCL(prefixed, rank, ranks, nccl)
    else:
        gloo = distributed.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        host = address_towards(init.host)
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        group = distributed.ProcessGroupGloo(prefixed, rank, ranks, gloo)
    group.allreduce(torch.zeros(1, device=device)).wait(timeout)
    return group


def meet(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until every rank is ready.

    Raises TimeoutError with the missing ranks after `timeout_s` seconds, and
    ConnectionAbortedError if `given_up` returns true.
    """
    store.set(ready_key(rank), "")
    keys = [ready_key(other) for other in range(world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if given_up():
            raise ConnectionAbortedError("the group was given up")
        if time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([ready_key(other)])]
            raise TimeoutError(f"{', '.join(map(rank_name, missing))}: missing for {timeout_s:g} s")
        time.sleep(_POLL_S)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make NCCL groups that are created inside raise errors from `wait`.

    Otherwise torch's watchdog thread ends the process if another rank is lost.
    """
    with _creation_lock:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            os.environ.pop(_BLOCKING_WAIT)
            if before is not None:
                os.environ[_BLOCKING_WAIT] = before
