"""One push of full weights to one server, phase by phase.

    connect   POST /init_communicator/    |  join the group as rank 0
    push      POST /start_weight_update/     server pauses and drains
              POST /update_weights/       |  broadcast bucket after bucket
              POST /finish_weight_update/    server rebuilds, resets caches, resumes

Calls beside a bar run at the same time. Every phase has a deadline; a broken phase is
reported with side, address and phase, and closes the group, which the next push forms anew.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.sync.abandonable import run_together
from learner.sync.groups import WeightGroup, join_group
from learner.sync.source import WeightSource
from shared_contracts.errors import RunError
from shared_contracts.weights import (
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
    Transport,
    UpdateWeights,
)

Answer = TypeVar("Answer")


class WeightSyncError(RunError):
    """A weight push broke; the server is poisoned until a full push succeeds."""

    def __init__(self, side: str, address: str, phase: str, reason: object) -> None:
        text = str(reason) or type(reason).__name__
        super().__init__(f"weight sync failed at the {side} ({address}) in phase {phase}: {text}")
        self.side = side
        self.address = address
        self.phase = phase


class WeightPusher:
    """Holds rank 0 of one server's weight group and pushes through it.

    group_port: port of the rendezvous. timeout_s: bounds each phase.
    """

    def __init__(
        self,
        client: RolloutClient,
        group_port: int,
        weights: WeightSource,
        transport: Transport,
        bucket_bytes: int,
    ) -> None:
        self._client = client
        self._port = group_port
        self._weights = weights
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._group: WeightGroup | None = None
        self._ready: CommunicatorReady | None = None

    def connect(self) -> CommunicatorReady:
        """Form the weight group, once.

        Raises:
            WeightSyncError: the server refused or a side did not join in time.
        """
        if self._group is not None and self._ready is not None:
            return self._ready
        body = InitCommunicator(
            host=self._rendezvous_host(),
            port=self._port,
            world_size=1 + self._phase("reach", self._client.world_size),
            transport=self._transport,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._client.timeout_s,
        )
        ready: list[CommunicatorReady] = []
        joined: list[WeightGroup] = []
        given_up = threading.Event()
        try:
            self._together(
                "rendezvous",
                lambda: ready.append(self._client.init_communicator(body)),
                lambda: joined.append(join_group(body, given_up)),
            )
        finally:
            given_up.set()
        self._group, self._ready = joined[0], ready[0]
        return self._ready

    def push(self, version: int) -> SyncReport:
        """Make `version` the server's weights.

        Raises:
            WeightSyncError: names the phase that broke; the group is closed.
        """
        dtype = self.connect().dtype
        assert self._group is not None
        group, started = self._group, time.monotonic()
        parameters = self._weights.metadata(dtype)
        manifest = StartWeightUpdate(version=version, parameters=parameters)
        self._phase("start", lambda: self._client.start_weight_update(manifest))
        self._together(
            "transfer",
            lambda: self._client.update_weights(UpdateWeights(version=version)),
            lambda: group.send(parameters, self._weights.tensors(dtype)),
        )
        report = self._phase(
            "finish",
            lambda: self._client.finish_weight_update(FinishWeightUpdate(version=version)),
        )
        report.seconds["total"] = time.monotonic() - started
        return report

    def abandon(self) -> None:
        """Let go of the group of a server that was lost; the next push forms it anew."""
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def close(self) -> None:
        """Leave the group and tell the server; a server that is gone is no error."""
        if self._group is None:
            return
        self._group.close()
        self._group = None
        with suppress(*SERVER_ERRORS):
            self._client.close_communicator()

    def _phase(self, phase: str, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except SERVER_ERRORS as error:
            raise self._broken("server", phase, error) from error

    def _together(
        self, phase: str, call: Callable[[], object], collective: Callable[[], object]
    ) -> None:
        error = run_together(call, collective, self._client.timeout_s + 60)
        if error is None:
            return
        side = "server" if isinstance(error, SERVER_ERRORS) else "learner"
        raise self._broken(side, phase, error) from error

    def _broken(self, side: str, phase: str, reason: BaseException) -> WeightSyncError:
        self.abandon()
        return WeightSyncError(side, self._client.base_url, phase, reason)

    def _rendezvous_host(self) -> str:
        """IP address of the group's store: the server's with gloo, our own with nccl.

        Our own address is the one from which the server is reached.
        """
        host = urlsplit(self._client.base_url).hostname
        assert host is not None, f"{self._client.base_url} was validated with the config"
        try:
            server = socket.gethostbyname(host)
        except OSError as error:
            raise self._broken("learner", "reach", error) from error
        if self._transport == "gloo":
            return server
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((server, 9))  # UDP: chooses a route, sends nothing
            own: str = probe.getsockname()[0]
            return own
