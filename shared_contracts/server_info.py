"""Answers of the server's probes (WIRE-06)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared_contracts.weights import WeightState


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReplicaHealth(_Wire):
    index: int
    alive: bool
    detail: str


class Health(_Wire):
    """`GET /health/`: 200 when the server can answer `/infer/` now."""

    status: Literal["ok"] = "ok"
    state: WeightState
    weights_version: int
    server_epoch: str
    replicas: list[ReplicaHealth]


class Live(_Wire):
    """`GET /live/`: the event loop turns; seconds since each engine last made progress."""

    status: Literal["ok"] = "ok"
    server_epoch: str
    heartbeat_age_s: list[float]


class WorldSize(_Wire):
    world_size: int
