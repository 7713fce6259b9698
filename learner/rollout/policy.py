"""The policy: answers by a backend, and the decision when to push (SYNC-07, SYNC-09).

    push()               the next version, between requests; all processes at once
    answer()             first pushes again to servers that lost the weights; training waits
    stream()             the same in chunks; one is answered while the one before is used
    answer_by_pushed()   pushes nothing, because the weights may have changed; raises PushNeeded
    repush_restarted()   pushes again to servers that lost the weights, if these did not change

A step calls `mark_updated` when it has changed the training weights.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from learner.config.schema import Config
from learner.data.jsonl import build_request
from learner.distributed.waiting import waiting_for
from learner.rollout.backend import RolloutBackend
from learner.runs.metrics import Payload
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest


@dataclass(frozen=True)
class RequestSettings:
    """The prompt of every request, and the decoding of answers.

    evaluation: the decoding of evaluations; None: `config`.
    """

    prompt: str
    system: str | None
    config: RequestConfig
    evaluation: RequestConfig | None = None


def request_settings(config: Config) -> RequestSettings:
    """Return the instruction and the decoding of a training YAML."""
    rollout = config.rollout_matching
    request_config = RequestConfig(
        max_tokens=rollout.max_new_tokens,
        temperature=rollout.decoding.temperature,
        top_p=rollout.decoding.top_p,
        top_k=rollout.decoding.top_k,
        repetition_penalty=rollout.repetition_penalty,
        return_details=True,
        logprobs=rollout.logprobs,
    )
    evaluation = None
    if rollout.eval_detection.greedy:
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
        evaluation = request_config.model_copy(update=greedy)
    return RequestSettings(
        config.template.prompt, config.template.system, request_config, evaluation
    )


class Policy:
    """Answers of samples by a backend, and its pushes.

    Nothing is trained within a block of `backend.serving()`, which has a push with its answers.
    """

    def __init__(self, backend: RolloutBackend, settings: RequestSettings) -> None:
        self.backend = backend
        self._settings = settings
        self._updates: int | None = None  # since the last push; None before the first
        self._has_answered = False

    @property
    def version(self) -> int:
        """The version of the newest weights of the backend; each push makes the next one."""
        return self.backend.version.newest

    def mark_updated(self) -> None:
        """Note that the training weights have changed: the next `answer` needs a push first."""
        if self._updates is not None:
            self._updates += 1

    def is_behind(self, updates: int = 1) -> bool:
        """Return whether nothing was pushed yet, or at least `updates` updates were made since."""
        return self._updates is None or self._updates >= updates

    def push(self) -> None:
        """Push the next version."""
        version = self.version + 1
        with waiting_for(f"a push of the weights, version {version}"):
            self.backend.push_weights(version)
        self.backend.version.record(version)
        self._updates = 0

    def push_if_stale(self) -> None:
        """Push the next version, unless the backend holds the weights already (SYNC-09)."""
        if self.is_behind():
            self.push()

    def answer(
        self, samples: Sequence[Sample], seed: int, *, evaluating: bool = False
    ) -> list[RolloutOutput]:
        """Return one rollout per sample, in order; sample i is decoded with `seed + i`."""
        assert not self.is_behind(), "push_if_stale comes before answer"
        with self._naming_first_wait(len(samples)):
            return self.backend.rollout(*self._requests(samples, seed, evaluating))

    def stream(
        self, samples: Sequence[Sample], seed: int
    ) -> Generator[list[RolloutOutput], None, None]:
        """Yield what `answer` returns, in consecutive parts: a single one without `streams`."""
        assert not self.is_behind(), "push_if_stale comes before stream"
        with closing(self.backend.stream(*self._requests(samples, seed))) as chunks:
            with self._naming_first_wait(len(samples)):
                first = next(chunks, None)
            if first is not None:
                yield first
                yield from chunks

    def answer_by_pushed(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        """Do the same with the weights that were pushed last, also if they are old (ASYNC-01).

        Raises PushNeeded.
        """
        with self._naming_first_wait(len(samples)):
            return self.backend.rollout_asynchronous(*self._requests(samples, seed))

    def repush_restarted(self) -> None:
        """Push again to restarted servers, if the training weights have not changed since.

        Called repeatedly while this process waits for others.
        """
        if not self.is_behind():
            self.backend.repush_restarted()

    def _decoding(self, evaluating: bool) -> RequestConfig:
        return (evaluating and self._settings.evaluation) or self._settings.config

    def _requests(
        self, samples: Sequence[Sample], seed: int, evaluating: bool = False
    ) -> tuple[list[RolloutInferRequest], RequestConfig]:
        prompt, system = self._settings.prompt, self._settings.system
        requests = [build_request(sample, prompt, system) for sample in samples]
        return requests, self._decoding(evaluating).model_copy(update={"seed": seed})

    @contextmanager
    def _naming_first_wait(self, count: int) -> Iterator[None]:
        """Name the wait for the first of `count` answers; later waits are those of the step."""
        if self._has_answered:
            yield
            return
        with waiting_for("answers", self.progress(count)):
            yield
        self._has_answered = True

    def progress(self, count: int) -> Callable[[], str]:
        """Return a function that describes the progress of `count` requested answers."""
        before = self.backend.journal.answered
        return lambda: f"{self.backend.journal.answered - before} of {count} are there"

    def take_notes(self, *, evaluating: bool = False) -> tuple[dict[str, Any], Payload]:
        """Return the notes of answers and pushes since the last call: for the log, and metrics."""
        record, payload = self.backend.journal.take()
        decoding = self._decoding(evaluating).model_dump(exclude_defaults=True)
        return {"weights_version": self.version, "decoding": decoding, **record}, payload

    def close(self) -> None:
        self.backend.close()
