"""What the server counts and what it logs of every call (`/metrics/`, SRV-08).

CallRecord    filled while a call runs, by those who know; ends in the metrics and the log
Telemetry     the Prometheus metrics of one server, with a registry of its own
log_call      the access line

Metrics, requests and seconds never hold a prompt, an image or a token of auth.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shared_contracts.errors import ProblemError
from shared_contracts.infer import RolloutEnvelope
from shared_contracts.server_info import Health, ReplicaState, ReplicaStatus
from shared_contracts.weights import SyncReport, WeightState, WeightStatus

access_log = logging.getLogger("rollout_server.access")

# wait       for the end of a weight update
# prepare    images, chat template, tokens
# generate   from the first request handed to an engine to the last answer
Phase = Literal["wait", "prepare", "generate"]

# answered    200, generated for this call
# repeated    200, the answer of an earlier call with the same request id
# refused     4xx
# failed      5xx
# gone        the client closed the connection
Outcome = Literal["answered", "repeated", "refused", "failed", "gone"]

CLIENT_GONE = 499
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class ReplicaLoad:
    """Sequences of one replica: being decoded, and waiting for their turn."""

    index: int
    running: int
    waiting: int


@dataclass
class CallRecord:
    """What is known of one call.

    seconds: by phase; weights_version: (lowest, highest) the answers are stamped with.
    repeated: answered with what an earlier call generated.
    problem: the kind of problem it was refused with.
    """

    route: str
    request_id: str | None = None
    requests: int = 0
    images: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    guard_triggers: int = 0
    weights_version: tuple[int, int] | None = None
    repeated: bool = False
    status: int = CLIENT_GONE
    problem: str | None = None
    seconds: dict[Phase, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Times a `with` block, also one that fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def add_answers(self, envelopes: Sequence[RolloutEnvelope]) -> None:
        stamps = [envelope.coordexp for envelope in envelopes]
        self.generated_tokens += sum(e.response.usage.completion_tokens for e in envelopes)
        self.guard_triggers += sum(len(stamp.repeat_terminated_choices) for stamp in stamps)
        if stamps:
            versions = [version for stamp in stamps for version in stamp.weights_version]
            self.weights_version = (min(versions), max(versions))

    @property
    def outcome(self) -> Outcome:
        if self.status == CLIENT_GONE:
            return "gone"
        if self.status < 400:
            return "repeated" if self.repeated else "answered"
        return "refused" if self.status < 500 else "failed"


class Watched(Protocol):
    """What a scrape looks at (see `pool.Pool`)."""

    def health(self) -> Health: ...
    def replica_statuses(self) -> list[ReplicaStatus]: ...
    def weights_status(self) -> WeightStatus | None: ...
    def loads(self) -> list[ReplicaLoad]: ...


class Telemetry:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._calls = Counter(
            "rollout_calls", "Calls of /infer/ by how they ended.", ["outcome"], registry=registry
        )
        for outcome in get_args(Outcome):
            self._calls.labels(outcome)
        self._in_flight = Gauge(
            "rollout_calls_in_flight", "Calls of /infer/ that are running.", registry=registry
        )
        self._requests = Counter(
            "rollout_requests", "Conversations in answered calls.", registry=registry
        )
        self._images = Counter("rollout_images", "Images in those.", registry=registry)
        self._prompt_tokens = Counter(
            "rollout_prompt_tokens", "Prompt tokens, images expanded.", registry=registry
        )
        self._generated_tokens = Counter(
            "rollout_generated_tokens", "Tokens in answers.", registry=registry
        )
        self._guard_triggers = Counter(
            "rollout_repeat_guard_triggers",
            "Sequences the repeat guard has ended.",
            registry=registry,
        )
        self._refused = Counter(
            "rollout_refused",
            "Calls answered with a problem, by route and kind.",
            ["route", "reason"],
            registry=registry,
        )
        self._phase_seconds = Histogram(
            "rollout_phase_seconds",
            "Seconds a call of /infer/ spends in each phase.",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._pushes = Counter(
            "rollout_weight_pushes", "Weight pushes that were finished.", registry=registry
        )
        self._push_seconds = Histogram(
            "rollout_weight_push_seconds",
            "Seconds of finished weight pushes by phase.",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._push_bytes = Counter(
            "rollout_weight_push_bytes", "Bytes of them, for one replica.", registry=registry
        )

    def watch(self, server: Watched) -> None:
        """Ask `server` for the gauges at every scrape."""
        self.registry.register(_Gauges(server))

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        with self._in_flight.track_inprogress():
            yield

    def count_call(self, record: CallRecord) -> None:
        """Count a call of /infer/ that has ended; what was repeated is not counted twice."""
        self._calls.labels(record.outcome).inc()
        if record.outcome == "answered":
            self._requests.inc(record.requests)
            self._images.inc(record.images)
        self._prompt_tokens.inc(record.prompt_tokens)
        self._generated_tokens.inc(record.generated_tokens)
        self._guard_triggers.inc(record.guard_triggers)
        for phase, seconds in record.seconds.items():
            self._phase_seconds.labels(phase).observe(seconds)

    def count_refusal(self, route: str, kind: str) -> None:
        self._refused.labels(route, kind).inc()

    def count_push(self, report: SyncReport) -> None:
        self._pushes.inc()
        self._push_bytes.inc(report.bytes)
        for phase, seconds in report.seconds.items():
            self._push_seconds.labels(phase).observe(seconds)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, server: Watched) -> None:
        self._server = server

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield _gauge("rollout_ready", "1 while /health/ says 200.", float(self._ready()))
        yield from self._replicas()
        yield from self._weights()

    def _ready(self) -> bool:
        try:
            self._server.health()
        except ProblemError:
            return False
        return True

    def _replicas(self) -> Iterator[GaugeMetricFamily]:
        running = _by_replica("rollout_running_sequences", "Sequences being decoded.")
        waiting = _by_replica("rollout_waiting_sequences", "Sequences waiting to be decoded.")
        for load in self._server.loads():
            running.add_metric([str(load.index)], load.running)
            waiting.add_metric([str(load.index)], load.waiting)
        restarts = _by_replica("rollout_replica_restarts", "Times the engine was built again.")
        state = GaugeMetricFamily(
            "rollout_replica_state", "1 for the state it is in.", labels=["replica", "state"]
        )
        for status in self._server.replica_statuses():
            restarts.add_metric([str(status.index)], status.restarts)
            for name in get_args(ReplicaState):
                state.add_metric([str(status.index), name], float(status.state == name))
        yield from (running, waiting, restarts, state)

    def _weights(self) -> Iterator[GaugeMetricFamily]:
        status = self._server.weights_status()
        if status is None:
            return
        yield _gauge("rollout_weights_version", "Of the weights served.", status.weights_version)
        state = GaugeMetricFamily(
            "rollout_weights_state", "1 for the state they are in.", labels=["state"]
        )
        for name in get_args(WeightState):
            state.add_metric([name], float(status.state == name))
        yield state


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


def _by_replica(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=["replica"])


def log_call(record: CallRecord) -> None:
    """One line of a call that has ended; as JSON its fields stand beside the message."""
    fields: dict[str, object] = {
        "route": record.route,
        "status": record.status,
        "seconds": round(time.monotonic() - record.began, 4),
    }
    if record.problem is not None:
        fields["problem"] = record.problem
    if record.route == "/infer/":
        fields |= _infer_fields(record)
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    access_log.info("%s", text, extra=fields)


def _infer_fields(record: CallRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        f"{phase}_seconds": round(seconds, 4) for phase, seconds in record.seconds.items()
    }
    fields |= {
        "outcome": record.outcome,
        "requests": record.requests,
        "images": record.images,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "guard_triggers": record.guard_triggers,
    }
    if record.weights_version is not None:
        fields["weights_version"] = "-".join(map(str, sorted(set(record.weights_version))))
    if record.request_id is not None:
        fields["request_id"] = record.request_id
    return fields
