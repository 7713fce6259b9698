"""The policy that answers: a backend that is never asked with stale weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


class Policy:
    """A backend, the version it holds, and whether training has moved on since (SYNC-07).

    version: of the newest weights the backend has; each push makes the next one.
    repeat_terminate_active: the backend ends answers that repeat themselves.
    journal: what the backend notes of its calls and pushes.
    round_size: requests that are best asked at once, where answers may be waited for while
        something else is done; None: all of them, and nothing else is done.
    tend: looks after the backend's servers, as long as the weights are those it has.
    ask_beside: a `rollout` that pushes nothing; None: the backend's own never does.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        version: int,
        asking: Asking,
        repeat_terminate_active: bool = False,
        journal: Journal | None = None,
        round_size: int | None = None,
        tend: Callable[[], None] | None = None,
        ask_beside: Ask | None = None,
    ) -> None:
        self._backend = backend
        self._asking = asking
        self._journal = journal or Journal()
        self._stale = True
        self._tend = tend
        self._ask_beside = ask_beside or backend.rollout
        self.version = version
        self.repeat_terminate_active = repeat_terminate_active
        self.round_size = round_size

    def mark_updated(self) -> None:
        """The training weights have changed; the next `answer` needs a push first."""
        self._stale = True

    def push(self) -> None:
        """Push the next version."""
        self._backend.push_weights(self.version + 1)
        self.version += 1
        self._stale = False

    def push_if_stale(self) -> None:
        """Push the next version, unless the backend holds the weights already (SYNC-09)."""
        if self._stale:
            self.push()

    def answer(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        """One rollout per sample, in order; sample i is decoded with `seed + i`."""
        assert not self._stale, "push_if_stale comes before answer"
        return self._answer(self._backend.rollout, samples, seed)

    def answer_by_pushed(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        """The same by what was pushed last, though training may have moved on (ASYNC-01).

        Raises PushNeeded.
        """
        return self._answer(self._ask_beside, samples, seed)

    def tend(self) -> None:
        """To be called again and again while other processes are waited for.

        Servers that were started anew get the weights again, for whoever asks them; unless
        training has moved on, and the weights are not those any more.
        """
        if self._tend is not None and not self._stale:
            self._tend()

    def _answer(self, ask: Ask, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        asking = self._asking
        requests = [build_request(sample, asking.prompt, asking.system) for sample in samples]
        config = asking.config.model_copy(update={"seed": seed})
        return ask(requests, config)

    def take_notes(self) -> tuple[dict[str, Any], Payload]:
        """What answers and pushes have taken since the last notes: for the log, and metrics."""
        record, payload = self._journal.take()
        decoding = self._asking.config.model_dump(exclude_defaults=True)
        return {"weights_version": self.version, "decoding": decoding, **record}, payload

    def close(self) -> None:
        self._backend.close()
