"""Bodies of the weight-update calls (section 5 of the contract).

One push, in order; each call answers when its phase is over on every replica:

    POST /init_communicator/     InitCommunicator -> CommunicatorReady   (once)
    POST /start_weight_update/   StartWeightUpdate -> WeightStatus       manifest; pause, drain
    POST /update_weights/        UpdateWeights -> WeightStatus           buckets arrive
    POST /finish_weight_update/  FinishWeightUpdate -> SyncReport        verify, reset, resume
    POST /keep_communicator/     KeepCommunicator -> WeightStatus        (every KEEP_EVERY_S)
    POST /close_communicator/    CloseCommunicator (or nothing) -> WeightStatus

A push sends the full weights of the checkpoint's layout, or with `adapter` a LoRA adapter
over the weights the server was started with. With `trial` it sends some parameters that the
engines hold already: these are received and compared by every worker, and nothing changes.

`/init_communicator/` and `/update_weights/` answer only when the learner has done its
half, so the learner posts them from a thread and meanwhile, with `gloo`,

    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    group = ProcessGroupGloo(PrefixStore(GLOO_STORE_PREFIX, store), 0, world_size, timeout)
    group.barrier()

joins as rank 0 (the server closes the store after the barrier). A store that lacks the key
`attempt_key(attempt)` is one of an earlier call, and is left alone. For each bucket of
`plan_buckets(parameters, bucket_bytes)` broadcasts one uint8 tensor from rank 0. A bucket
is its parameters one after another, each as the bytes of its contiguous tensor followed
by zeros up to `ParameterMeta.wire_bytes`. On a loopback `host` both sides give the group
a device of that host (`ProcessGroupGloo.create_device(hostname=host)`), so nothing
listens elsewhere.

With `ipc`, for a learner on the same machine, the group is formed in the same way and carries
signals only. The bytes of the buckets lie in one buffer of the learner's that every worker
maps: before the first bucket rank 0 broadcasts a `SharedBuffer` (the length of its JSON as
one int64, then the JSON as uint8); then for each bucket all ranks pass a barrier when rank 0
has filled the buffer, and another when every worker has copied the bucket out of it.

With `nccl` the ranks meet at the same store (`shared_contracts.rendezvous`): none of them calls
NCCL before all are ready. Then they join by `nccl_unique_id`, and vLLM's packed broadcast carries
the buckets.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Transport = Literal["gloo", "nccl", "ipc"]
# Those whose ranks form a gloo group.
GLOO_TRANSPORTS: tuple[Transport, ...] = ("gloo", "ipc")

WeightState = Literal["READY", "UPDATING", "POISONED"]

GLOO_STORE_PREFIX = "rollmatch-weights"


def attempt_key(attempt: str) -> str:
    """What the store of the `InitCommunicator` with this `attempt` holds."""
    return f"{GLOO_STORE_PREFIX}/attempt/{attempt}"


# What `memfd_create` calls the buffer of an `ipc` learner without a GPU.
HOST_MEMORY_NAME = "rollmatch-weights"

# A parameter starts on a multiple of this in its bucket, so that it can be viewed in place.
WIRE_ALIGNMENT = 16

DtypeName = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
DTYPE_BYTES: dict[DtypeName, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


# No number goes beyond this, so that 64 bits hold it in every process it reaches.
MOST = 2**62
Count = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# So often the learner of a weight group says that it lives, from `/init_communicator/` on; after so
# long without a sign it counts as gone, and the server breaks the call or the update it is in.
KEEP_EVERY_S = 2.0
GONE_AFTER_S = 10.0

# A push may be so many versions ahead of the server: one that was started anew, at version 0, is
# brought to that of a run which has pushed to others, and no single push uses the numbers up.
MOST_VERSION_STEP = 10**6

MOST_DIMENSIONS = 16
MOST_RANK = 4096


class _Wire(BaseModel):
    # The bound makes pydantic look at the characters: half of a surrogate pair is no text.
    model_config = ConfigDict(extra="forbid", str_max_length=2**30)


class InitCommunicator(_Wire):
    """Form the weight group: learner is rank 0, engine workers are ranks 1...

    host, port: address at the server where the store of the rendezvous opens.
    attempt: of the learner's choice, and another one for every call; it names the group.
    if_none: refused while a group stands or forms, which otherwise is left for this one.
    nccl_unique_id: of the NCCL group, made by the learner (`ncclGetUniqueId`), 128 bytes as
        base64; with `nccl` alone.
    world_size: 1 + all engine workers.
    bucket_bytes: size of one packed bucket; both sides must agree.
    timeout_s: bounds the rendezvous and every collective; a server cuts it to its own
        `max_weight_timeout_seconds`.
    """

    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    attempt: str
    if_none: bool = False
    transport: Transport = "gloo"
    bucket_bytes: int = Field(default=64 * 2**20, ge=1, le=MOST)
    timeout_s: float = Field(default=240.0, gt=0, le=86400)
    nccl_unique_id: str | None = Field(default=None, pattern="^[A-Za-z0-9+/]{171}=$", repr=False)

    @model_validator(mode="after")
    def _nccl_meets_by_its_id(self) -> "InitCommunicator":
        if (self.transport == "nccl") != (self.nccl_unique_id is not None):
            raise ValueError("nccl_unique_id belongs to the transport nccl, which needs it")
        return self


class KeepCommunicator(_Wire):
    """A heartbeat of the learner of a weight group.

    attempt: of the group; refused where another stands.
    """

    attempt: str


class CloseCommunicator(_Wire):
    """Leave the weight group.

    attempt: of the group to leave; another that stands is left alone. None, which must be said:
        whichever.
    """

    attempt: str | None


class CommunicatorReady(_Wire):
    """The weight group has been formed.

    weights_version: the server's; the learner's pushes count on from it.
    dtype: in which the engines hold their weights, and the learner sends them.
    """

    weights_version: Count
    world_size: Count
    transport: Transport
    server_epoch: str
    dtype: DtypeName


class ParameterMeta(_Wire):
    """One parameter as it travels: name as in the checkpoint, torch dtype name."""

    name: str
    dtype: DtypeName
    shape: Annotated[list[Count], Field(fail_fast=True, max_length=MOST_DIMENSIONS)]

    @model_validator(mode="after")
    def _can_be_counted(self) -> "ParameterMeta":
        if self.num_bytes >= MOST:
            raise ValueError("a parameter has less than 2**62 bytes")
        return self

    @property
    def num_bytes(self) -> int:
        """Of the tensor itself."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """`num_bytes`, padded to a multiple of `WIRE_ALIGNMENT`."""
        return math.ceil(self.num_bytes / WIRE_ALIGNMENT) * WIRE_ALIGNMENT


class HostMemory(_Wire):
    """A buffer in the memory of the machine.

    path: a memory file of the learner's named `HOST_MEMORY_NAME`, e.g. `/proc/123/fd/45`.
    """

    path: str = Field(pattern="^/proc/[0-9]+/fd/[0-9]+$")


class DeviceMemory(_Wire):
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


class SharedBuffer(_Wire):
    """Where the learner puts buckets that travel by `ipc`; `bytes` long."""

    bytes: int = Field(ge=1, le=MOST)
    memory: HostMemory | DeviceMemory


def plan_buckets(parameters: Sequence[ParameterMeta], bucket_bytes: int) -> list[range]:
    """Cut the manifest into consecutive buckets of whole parameters, in order.

    A bucket takes parameters while their `wire_bytes` fit into `bucket_bytes`; a
    parameter larger than that travels alone. Both sides call this with the same
    arguments, so they agree on every boundary.
    """
    buckets: list[range] = []
    start, used = 0, 0
    for index, parameter in enumerate(parameters):
        if index > start and used + parameter.wire_bytes > bucket_bytes:
            buckets.append(range(start, index))
            start, used = index, 0
        used += parameter.wire_bytes
    if start < len(parameters):
        buckets.append(range(start, len(parameters)))
    return buckets


class AdapterMeta(_Wire):
    """A LoRA adapter, in peft's words (`LoraConfig`)."""

    r: int = Field(ge=1, le=MOST_RANK)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)
    use_dora: bool = False
    use_rslora: bool = False


class ParameterDigest(_Wire):
    """What `shared_contracts.digests` makes of a parameter.

    columns: those it was made of, ascending; None for all.
    digest: 16 hexadecimal digits.
    """

    name: str
    columns: Annotated[list[Count], Field(fail_fast=True)] | None = None
    digest: str = Field(pattern="^[0-9a-f]{16}$")


class AdapterBase(_Wire):
    """The weights that an adapter is over, or a trial is of, as the learner has them.

    parameters: all of them, as a full push would send them. digests: of some, or of all.
    """

    parameters: Annotated[list[ParameterMeta], Field(fail_fast=True)] = Field(min_length=1)
    digests: Annotated[list[ParameterDigest], Field(fail_fast=True)] = []


class StartWeightUpdate(_Wire):
    """The manifest of a push.

    version: the version the server will have after it; higher than before by at most
        MOST_VERSION_STEP, or the same where a replica does not have the server's version. A
        trial names the one the server has.
    parameters: all that will be sent, in the order it travels.
    adapter: the parameters are those of an adapter over the checkpoint's weights.
    base: beside an adapter or a trial: what the engines must hold, or it is refused. The
        learner sends that of an adapter once for each weight group; a replica that starts anew
        ends the group.
    trial: the parameters are received and compared, and dropped: weights, caches and version
        stay, also where it breaks.
    attempt: of the group that it is to go over, refused where another stands. None, which must be
        said: whichever.
    """

    version: Count
    parameters: Annotated[list[ParameterMeta], Field(fail_fast=True)] = Field(min_length=1)
    adapter: AdapterMeta | None = None
    base: AdapterBase | None = None
    trial: bool = False
    attempt: str | None

    @model_validator(mode="after")
    def _one_kind(self) -> "StartWeightUpdate":
        if self.trial and self.adapter is not None:
            raise ValueError("a trial sends parameters of the checkpoint, and no adapter")
        return self


class UpdateWeights(_Wire):
    """Receive what the manifest of `version` lists. attempt: as in `StartWeightUpdate`."""

    version: Count
    attempt: str | None


class FinishWeightUpdate(_Wire):
    """All parameters were sent: verify them, then serve them.

    digests: of parameters as they were sent; the engines must hold the same.
    attempt: as in `StartWeightUpdate`.
    """

    version: Count
    digests: Annotated[list[ParameterDigest], Field(fail_fast=True)] = []
    attempt: str | None


class MoveMemory(_Wire):
    """The body of `/sleep/` and `/wake_up/`, which has nothing to say."""


class WeightStatus(_Wire):
    """The server's weights after a call; weights_version: of the last push that was finished."""

    state: WeightState
    weights_version: Count
    server_epoch: str


class SyncReport(_Wire):
    """What a push came to.

    seconds: by phase, of the slowest worker: `pause`, `transfer` (waiting for buckets),
        `load`, `verify`, `caches`; transfer and load overlap.
    bytes: payload of one replica.
    verified: parameters whose digest was compared.
    trial: nothing was loaded.
    """

    status: WeightStatus
    seconds: Annotated[dict[str, Seconds], Field(max_length=64)]
    bytes: Count
    verified: Count
    trial: bool = False
