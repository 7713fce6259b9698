"""Bodies of the weight-update calls (section 5 of the contract).

One push, in order; each call answers when its phase is over on every replica:

    POST /init_communicator/     InitCommunicator -> CommunicatorReady   (once)
    POST /start_weight_update/   StartWeightUpdate -> WeightStatus       pause, drain
    POST /update_weights/        UpdateWeights -> WeightStatus           buckets arrive
    POST /finish_weight_update/  FinishWeightUpdate -> SyncReport        rebuild, reset, resume
    POST /close_communicator/    -> WeightStatus
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Transport = Literal["gloo", "nccl", "ipc"]
WeightState = Literal["READY", "UPDATING", "POISONED"]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InitCommunicator(_Wire):
    """Form the weight group: learner is rank 0, engine workers are ranks 1...

    host, port: address of the rendezvous store. With `gloo` the server opens it there;
        with `nccl` the learner does (vLLM's trainer side owns the store).
    world_size: 1 + all engine workers.
    bucket_bytes: size of one packed bucket; both sides must agree.
    timeout_s: bounds the rendezvous and every collective.
    """

    host: str
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    transport: Transport = "gloo"
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    timeout_s: float = Field(default=240.0, gt=0)


class CommunicatorReady(_Wire):
    world_size: int
    transport: Transport
    server_epoch: str


class ParameterMeta(_Wire):
    """One parameter as it travels: name as in the checkpoint, torch dtype name."""

    name: str
    dtype: str
    shape: list[int]


class StartWeightUpdate(_Wire):
    """version: the version the server will have after this push."""

    version: int = Field(ge=0)


class UpdateWeights(_Wire):
    parameters: list[ParameterMeta] = Field(min_length=1)


class FinishWeightUpdate(_Wire):
    version: int = Field(ge=0)


class WeightStatus(_Wire):
    state: WeightState
    weights_version: int
    server_epoch: str


class SyncReport(_Wire):
    """seconds: by phase (pause, transfer, finish); bytes: payload of one replica."""

    status: WeightStatus
    seconds: dict[str, float]
    bytes: int
