"""The replicas: started together, spoken to as one (SRV-01).

start()  builds every engine, in threads         close()  ends their processes
infer()  answers a call (`Rollouts`)             weights  the updates (`WeightUpdates`)
health(), live(), world_size()                   the probes
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_server.engine_types import EngineDead
from rollout_server.infer import Rollouts
from rollout_server.media import MediaLoader
from rollout_server.problems import refusal
from rollout_server.settings import ServerSettings
from rollout_server.weight_updates import WeightUpdates, poisoned
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import Health, Live, ReplicaStatus, WorldSize

if TYPE_CHECKING:
    from rollout_server.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


class Pool:
    """Until `start` is done everything but `live` and `world_size` is refused."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.server_epoch = uuid.uuid4().hex
        self._engines: list[Engine] = []
        self._media = MediaLoader(settings)
        self._rollouts: Rollouts | None = None
        self._weights: WeightUpdates | None = None
        self._heartbeats: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Build the engines side by side; raises what a failing build raises."""
        replicas = range(self.settings.num_replicas)
        builds = [asyncio.to_thread(_build_engine, self.settings, index) for index in replicas]
        outcomes = await asyncio.gather(*builds, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        engines = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        if failures:
            await _shut_down(engines)
            raise failures[0]
        self._weights = WeightUpdates(
            engines,
            self.settings.tensor_parallel_size,
            self.settings.transport,
            self.server_epoch,
        )
        self._rollouts = Rollouts(
            engines,
            str(self.settings.model),
            self._media,
            self.server_epoch,
        )
        self._heartbeats = [asyncio.create_task(_beat(engine)) for engine in engines]
        self._engines = engines

    async def close(self) -> None:
        """End the engines' processes."""
        for heartbeat in self._heartbeats:
            heartbeat.cancel()
        await _shut_down(self._engines)
        await self._media.close()

    @property
    def weights(self) -> WeightUpdates:
        if self._weights is None:
            raise _starting()
        return self._weights

    async def infer(self, call: InferCall) -> list[RolloutEnvelope]:
        """Answer a call; one that comes during a weight update waits for its end."""
        if self._rollouts is None:
            raise _starting()
        await self.weights.wait_until_ready()
        self._require_alive()
        return await self._rollouts.answer(call)

    def health(self) -> Health:
        """Raises the `not-ready` problem that says what is missing."""
        status = self.weights.status
        self._require_alive()
        if status.state == "POISONED":
            raise poisoned()
        return Health(
            state=status.state,
            weights_version=status.weights_version,
            server_epoch=self.server_epoch,
            replicas=[
                ReplicaStatus(
                    index=engine.index,
                    state="serving",
                    detail="",
                    heartbeat_age_s=round(engine.heartbeat_age_s, 3),
                    restarts=0,
                )
                for engine in self._engines
            ],
        )

    def live(self) -> Live:
        ages = [round(engine.heartbeat_age_s, 3) for engine in self._engines]
        return Live(server_epoch=self.server_epoch, heartbeat_age_s=ages)

    def world_size(self) -> WorldSize:
        return WorldSize(world_size=self.settings.num_workers)

    def _require_alive(self) -> None:
        dead = [engine.index for engine in self._engines if not engine.alive]
        if dead:
            where = ", ".join(f"replicas[{index}]" for index in dead)
            raise refusal("not-ready", f"the engine process of {where} is dead", where)


def _build_engine(settings: ServerSettings, index: int) -> "Engine":
    from rollout_server.engine import Engine  # imports vLLM: seconds, so not at parse time

    return Engine.build(settings, index)


async def _shut_down(engines: Sequence["Engine"]) -> None:
    await asyncio.gather(*(asyncio.to_thread(engine.shutdown) for engine in engines))


def _starting() -> Exception:
    return refusal("not-ready", "the engines are starting", "replicas")


async def _beat(engine: "Engine") -> None:
    """Note every `HEARTBEAT_S` that the engine's loop still turns, until it dies."""
    while True:
        try:
            await engine.heartbeat()
        except EngineDead:
            logger.error("replica %d is dead", engine.index)
            return
        await asyncio.sleep(HEARTBEAT_S)
