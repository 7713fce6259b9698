"""Answers of the server's probes (WIRE-06)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.weights import Transport, WeightState

# The environment variable in which both programs look for the server's token.
TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"
# The one that names a file of it, as the secrets of containers and services are files.
TOKEN_FILE_VARIABLE = "ROLLOUT_SERVER_TOKEN_FILE"

# serving       answers calls
# starting      its engine is being built, for the first time or again
# needs-push    built again with the checkpoint's weights, which are no longer the current ones
# dead          its engine is gone; it will be built again
ReplicaState = Literal["serving", "starting", "needs-push", "dead"]


def process_of(server_epoch: str) -> str:
    """The part of an epoch that changes only with the server's process.

    An epoch is that, a dash, and how many replicas the process has lost.
    """
    return server_epoch.rpartition("-")[0]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReplicaStatus(_Wire):
    """How one replica is.

    detail: why it does not serve; empty where it does.
    heartbeat_age_s: seconds since the engine's loop last answered; null without an engine.
    restarts: how often the engine was built again.
    """

    index: int
    state: ReplicaState
    detail: str
    heartbeat_age_s: float | None
    restarts: int


class Health(_Wire):
    """`GET /health/`: 200 when the server can answer `/infer/` now, with every replica."""

    status: Literal["ok"] = "ok"
    state: WeightState
    weights_version: int
    server_epoch: str
    replicas: list[ReplicaStatus]


class Live(_Wire):
    """`GET /live/`: the event loop turns; seconds since each engine last made progress."""

    status: Literal["ok"] = "ok"
    server_epoch: str
    heartbeat_age_s: list[float | None]


class WorldSize(_Wire):
    """`GET /get_world_size/`: engine workers over all replicas."""

    world_size: int


class RepeatTerminateStatus(_Wire):
    """The repeat guard of the server.

    active: it runs inside every engine and passed its self-test there.
    """

    active: bool
    config: RepeatTerminateConfig


class Info(_Wire):
    """`GET /info/`: what this server is. Answered while engines start, too.

    world_size: engine workers over all replicas.
    max_model_len: tokens of a context; null until an engine has told.
    enable_lora: an adapter may be pushed instead of full weights.
    server_epoch: changes when the server was started anew, or one of its replicas was lost.
    weight_group: where the weight group that stands has met, as host:port; null without one.
    weight_group_heard_s: seconds since the learner of that group formed it or last said that it
        lives; null of a group that was formed with `if_none`, until it has said so.
    host: name of the server's machine. gpus: their ids there; none on a CPU or where Ray places.
    gpu_uuids: of the same GPUs, where nvidia-smi told them at the start.
    versions: of this server and of what it stands on, by distribution name.
    """

    model: str
    world_size: int
    replicas: list[ReplicaStatus]
    max_model_len: int | None
    max_num_seqs: int
    enable_lora: bool
    weights_state: WeightState
    weights_version: int
    weight_transport: Transport
    server_epoch: str
    weight_group: str | None = None
    weight_group_heard_s: float | None = None
    host: str = ""
    gpus: list[int] = []
    gpu_uuids: list[str] = []
    repeat_terminate: RepeatTerminateStatus
    versions: dict[str, str]
