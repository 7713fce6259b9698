"""Prometheus metrics of a server (`GET /metrics/`).

Calls update the counters; a scrape sets the gauges.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared_contracts.infer import RolloutEnvelope
from shared_contracts.server_info import Info, ReplicaState
from shared_contracts.weights import SyncReport, WeightState

# wait       for the end of a weight update
# prepare    images, chat template, tokens
# generate   a request is in an engine
# The first sequences of a call run while others are prepared: these seconds count in both phases.
Phase = Literal["wait", "prepare", "generate"]

# answered    200, generated for this call
# repeated    200, generated for an earlier call with the same request id
# refused     4xx
# failed      5xx, or a stream that ended with an error
# gone        the client closed the connection
Outcome = Literal["answered", "repeated", "refused", "failed", "gone"]

INFER, CHAT = "/infer/", "/v1/chat/completions/"
# The routes that generate.
GENERATING = (INFER, CHAT)

# Status in the log of a call whose client closed the connection; it is never sent.
CLIENT_GONE = 499


@dataclass
class CallRecord:
    """route: with its trailing slash. began: of `time.monotonic`.

    weights_version: (lowest, highest) of the answers. seconds: by phase. problem: the kind of a
    refusal, or of the error that ended a stream.
    """

    route: str
    began: float = field(default_factory=time.monotonic)
    request_id: str | None = None
    requests: int = 0
    images: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    guard_triggers: int = 0
    weights_version: tuple[int, int] | None = None
    seconds: dict[Phase, float] = field(default_factory=dict)
    repeated: bool = False
    status: int = CLIENT_GONE
    problem: str | None = None
    _blocks: dict[Phase, int] = field(default_factory=dict)
    _since: dict[Phase, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the seconds of a `with` block, even if it fails, to those of the phase.

        Seconds of overlapping blocks of one phase count once.
        """
        blocks = self._blocks[name] = self._blocks.get(name, 0) + 1
        if blocks == 1:
            self._since[name] = time.monotonic()
        try:
            yield
        finally:
            self._blocks[name] -= 1
            if not self._blocks[name]:
                spent_s = time.monotonic() - self._since[name]
                self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

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
        if self.status < 400 and self.problem is not None:
            return "failed"
        if self.status < 400:
            return "repeated" if self.repeated else "answered"
        return "refused" if self.status < 500 else "failed"


# Of `/infer/` alone: vLLM reads the body of a chat completion. Field of a `CallRecord` -> counter.
COUNTS = {
    "requests": ("rollout_requests", "Conversations that /infer/ answered."),
    "images": ("rollout_images", "Images in them."),
    "prompt_tokens": ("rollout_prompt_tokens", "Prompt tokens, images expanded."),
    "generated_tokens": ("rollout_generated_tokens", "Tokens in answers."),
    "guard_triggers": ("rollout_repeat_guard_triggers", "Sequences the repeat guard has ended."),
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Telemetry:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self._calls = counter(
            "rollout_calls",
            "Calls of /infer/ and of chat completions by how they ended.",
            ["outcome"],
        )
        for outcome in get_args(Outcome):
            self._calls.labels(outcome)
        self.in_flight = gauge("rollout_calls_in_flight", "Running calls.")
        self._counts = {name: counter(*COUNTS[name]) for name in COUNTS}
        self._refused = counter(
            "rollout_refused",
            "Calls answered with a problem, by route and kind.",
            ["route", "reason"],
        )
        self._phase_seconds = seconds(
            "rollout_phase_seconds",
            "Seconds that /infer/ and chat completions spend in each phase.",
            ["phase"],
        )
        self._pushes = counter("rollout_weight_pushes", "Weight pushes that were finished.")
        self._push_seconds = seconds(
            "rollout_weight_push_seconds", "Seconds of finished weight pushes by phase.", ["phase"]
        )
        self._push_bytes = counter("rollout_weight_push_bytes", "Bytes of them, for one replica.")
        replica, state = ["replica"], ["state"]
        self._ready = gauge("rollout_ready", "1 while /health/ answers 200.")
        self._running = gauge("rollout_running_sequences", "Sequences being decoded.", replica)
        self._waiting = gauge(
            "rollout_waiting_sequences", "Sequences waiting to be decoded.", replica
        )
        self._restarts = gauge(
            "rollout_replica_restarts", "Times the engine was built again.", replica
        )
        self._replica_state = gauge(
            "rollout_replica_state", "1 for the state it is in.", [*replica, *state]
        )
        self._version = gauge("rollout_weights_version", "Of the weights served.")
        self._weights_state = gauge("rollout_weights_state", "1 for the state they are in.", state)

    def count_call(self, record: CallRecord) -> None:
        """Count a finished call, with the kind of its problem."""
        if record.problem is not None:
            self._refused.labels(record.route, record.problem).inc()
        if record.route in GENERATING:
            self._calls.labels(record.outcome).inc()
            for phase, seconds in record.seconds.items():
                self._phase_seconds.labels(phase).observe(seconds)

    def count_answers(self, record: CallRecord) -> None:
        """Count generated answers, once even if several calls receive them."""
        for name, count in self._counts.items():
            count.inc(getattr(record, name))

    def count_push(self, report: SyncReport) -> None:
        self._pushes.inc()
        self._push_bytes.inc(report.bytes)
        for phase, seconds in report.seconds.items():
            self._push_seconds.labels(phase).observe(seconds)

    def exposition(self, info: Info, is_ready: bool, sequences: Mapping[int, int]) -> bytes:
        """Return all metrics in Prometheus' text format.

        sequences: outstanding ones of each live replica, which decodes `max_num_seqs` at once.
        """
        self._ready.set(is_ready)
        self._version.set(info.weights_version)
        for name in get_args(WeightState):
            self._weights_state.labels(name).set(info.weights_state == name)
        for gauge in (self._running, self._waiting):
            gauge.clear()
        for index, number in sequences.items():
            self._running.labels(index).set(min(number, info.max_num_seqs))
            self._waiting.labels(index).set(max(number - info.max_num_seqs, 0))
        for replica in info.replicas:
            self._restarts.labels(replica.index).set(replica.restarts)
            for name in get_args(ReplicaState):
                self._replica_state.labels(replica.index, name).set(replica.state == name)
        return generate_latest(self.registry)
