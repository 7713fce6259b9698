"""Lines about waits: what is waited for, since when, and what is known."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed import HashStore

from learner.distributed.process_group import GroupPeers, Timing
from learner.distributed.waiting import reporting_waits, waiting_for
from learner.rollout.backend import ANSWERED, Call, RolloutBackend
from learner.rollout.policy import Policy, RequestSettings
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.ranks_in_threads import gloo_groups

SOON_S = 0.02
_LIMIT_S = 60.0
SINCE = r" since \d\d:\d\d:\d\d \(\d+ s\)"


class Lines:
    """The lines; `wait` returns the first one with these words."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._came:
            self.lines.append(line)
            self._came.notify_all()

    def wait(self, words: str) -> str:
        def there() -> list[str]:
            return [line for line in self.lines if words in line]

        with self._came:
            assert self._came.wait_for(there, _LIMIT_S), (words, self.lines)
            return there()[0]


@pytest.fixture
def output() -> Iterator[Lines]:
    lines = Lines()
    with reporting_waits(lines, SOON_S):
        yield lines


def test_line_names_the_wait_its_start_and_what_is_known(output: Lines) -> None:
    known = iter(["nothing yet", "half of it"])
    with waiting_for("a push", lambda: next(known, "all")):
        first, second = output.wait("nothing yet"), output.wait("half of it")
    assert re.fullmatch(f"Waiting for a push{SINCE}: nothing yet", first)
    assert re.fullmatch(f"Waiting for a push{SINCE}: half of it", second)
    assert first.partition(" (")[0] == second.partition(" (")[0]
    with waiting_for("another"):
        assert re.fullmatch(f"Waiting for another{SINCE}", output.wait("another"))


def test_innermost_of_nested_waits_is_reported(output: Lines) -> None:
    with waiting_for("all of it"):
        with waiting_for("a part"):
            output.wait("a part")
            assert not [line for line in output.lines if "all of it" in line]
        output.wait("all of it")


def test_wait_for_another_process_is_reported_with_its_number(output: Lines) -> None:
    store = HashStore()
    groups = gloo_groups(store, 2)
    quick, slow = (GroupPeers(r, 2, store, groups[r], Timing(beat=0.01)) for r in range(2))
    other = threading.Thread(
        target=slow.all_gather, args=[lambda: output.wait("late: learner process 1")]
    )
    other.start()
    assert quick.all_gather(lambda: "here")[0] == "here"
    other.join()


class Slow(RolloutBackend):
    """Waits for a line about each push, and about the first answer of the first call.

    lines: those.
    """

    def __init__(self, wait: Callable[[str], str]) -> None:
        super().__init__()
        self._wait = wait
        self.lines: list[str] = []

    def rollout(
        self, requests: Sequence[RolloutInferRequest], _: RequestConfig
    ) -> list[RolloutOutput]:
        self.journal.call(Call("http://a:1", 0, 1, None, 1, "timeout"))
        self.journal.call(Call("http://a:1", 0, 1, None, 2, ANSWERED))
        if len(self.lines) < 2:
            self.lines.append(self._wait("1 of 3 are there"))
        return [RolloutOutput([1], [2], "", "stop", False, (1, 1), 0) for _ in requests]

    def push_weights(self, version: int) -> None:
        self.lines.append(self._wait(f"version {version}"))

    def close(self) -> None: ...


def test_pushes_and_the_first_answers_are_reported_and_no_later_ones(output: Lines) -> None:
    samples = [Sample(f"a.jsonl:{n}", (Path("/a.png"),), 64, 64, ()) for n in (1, 2, 3)]
    backend = Slow(output.wait)
    policy = Policy(backend, RequestSettings("", None, RequestConfig()))
    policy.push_if_stale()
    policy.answer(samples, 0)
    pushed, answered = backend.lines
    assert re.fullmatch(f"Waiting for a push of the weights, version 1{SINCE}", pushed)
    assert re.fullmatch(f"Waiting for answers{SINCE}: 1 of 3 are there", answered)
    policy.take_notes()
    with waiting_for("a step"):
        output.wait("a step")
        output.lines.clear()
        policy.answer(samples, 0)
        output.wait("a step")
    assert not [line for line in output.lines if "answers" in line]
