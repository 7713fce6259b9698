"""The policy that answers: a backend, and the one owner of who may push when (SYNC-07, SYNC-09).

    push()               the next version. Between steps, while nobody asks; all processes at once
    answer()             who lost the weights gets them again first: training waits meanwhile
    answer_by_pushed()   pushes nothing, as training may have moved on; raises PushNeeded
    tend()               who lost the weights gets them again, unless training has moved on

A step says `mark_updated` when it has changed the training weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.config.schema import Config
from learner.metrics import Payload
from learner.rollout.backend import RolloutBackend
from learner.rollout.journal import Journal
from learner.rollout.requests import build_request
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest

Ask = Callable[[Sequence[RolloutInferRequest], RequestConfig], list[RolloutOutput]]


@dataclass(frozen=True)
class Asking:
    """How a sample is asked: the instruction and how the answer is decoded."""

    prompt: str
    system: str | None
    config: RequestConfig


def asking_of(config: Config) -> Asking:
    """As a training YAML says."""
    rollout = config.rollout_matching
    request_config = RequestConfig(
        max_tokens=rollout.max_new_tokens,
        temperature=rollout.decoding.temperature,
        top_p=rollout.decoding.top_p,
        top_k=rollout.decoding.top_k,
        repetition_penalty=rollout.repetition_penalty,
        return_details=True,
    )
    return Asking(config.template.prompt, config.template.system, request_config)


@dataclass(frozen=True)
class OpenBackend:
    """A backend that can be pushed to.

    weights_version: of what it holds now; pushes count on from it.
    repeat_terminate_active: it ends answers that repeat themselves.
    journal: what it notes of its calls and pushes.
    round_size: requests that are best asked at once, of servers that generate while the learner
        trains (STEP-03); None for a backend that does not.
    tend: looks after such servers, as long as the weights are those they have.
    ask_beside: a `rollout` that pushes nothing; None: the backend's own never does.
    """

    backend: RolloutBackend
    weights_version: int = 0
    repeat_terminate_active: bool = False
    journal: Journal = field(default_factory=Journal)
    round_size: int | None = None
    tend: Callable[[], None] | None = None
    ask_beside: Ask | None = None


class Policy:
    """Answers samples by an open backend.

    version: of the newest weights the backend has; each push makes the next one.
    """

    def __init__(self, opened: OpenBackend, asking: Asking) -> None:
        self.version = opened.weights_version
        self._opened = opened
        self._asking = asking
        self._updates: int | None = None  # since the last push; None before the first

    @property
    def repeat_terminate_active(self) -> bool:
        return self._opened.repeat_terminate_active

    @property
    def round_size(self) -> int | None:
        return self._opened.round_size

    def mark_updated(self) -> None:
        """The training weights have changed; the next `answer` needs a push first."""
        if self._updates is not None:
            self._updates += 1

    def is_behind(self, updates: int = 1) -> bool:
        """Whether nothing was pushed yet, or `updates` updates or more were made since."""
        return self._updates is None or self._updates >= updates

    def push(self) -> None:
        """Push the next version."""
        self._opened.backend.push_weights(self.version + 1)
        self.version += 1
        self._updates = 0

    def push_if_stale(self) -> None:
        """Push the next version, unless the backend holds the weights already (SYNC-09)."""
        if self.is_behind():
            self.push()

    def answer(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        """One rollout per sample, in order; sample i is decoded with `seed + i`."""
        assert not self.is_behind(), "push_if_stale comes before answer"
        return self._answer(self._opened.backend.rollout, samples, seed)

    def answer_by_pushed(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        """The same by what was pushed last, though training may have moved on (ASYNC-01).

        Raises PushNeeded.
        """
        ask = self._opened.ask_beside or self._opened.backend.rollout
        return self._answer(ask, samples, seed)

    def tend(self) -> None:
        """To be called again and again while other processes are waited for.

        Servers that were started anew get the weights again, for whoever asks them; unless
        training has moved on, and the weights are not those any more.
        """
        if self._opened.tend is not None and not self.is_behind():
            self._opened.tend()

    def _answer(self, ask: Ask, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        asking = self._asking
        requests = [build_request(sample, asking.prompt, asking.system) for sample in samples]
        config = asking.config.model_copy(update={"seed": seed})
        return ask(requests, config)

    def take_notes(self) -> tuple[dict[str, Any], Payload]:
        """What answers and pushes have taken since the last notes: for the log, and metrics."""
        record, payload = self._opened.journal.take()
        decoding = self._asking.config.model_dump(exclude_defaults=True)
        return {"weights_version": self.version, "decoding": decoding, **record}, payload

    def close(self) -> None:
        self._opened.backend.close()
