"""What a person reads while a program waits: what for, since when, what is known of it."""

import io
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from torch.distributed import HashStore

import learner.commands.run
import learner.distributed.waiting
from learner.analysis.evaluation.scores import evaluate
from learner.config import dump_mapping
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, StorePeers, Timing
from learner.distributed.waiting import reporting_waits, waiting_for
from learner.rollout.backend import ANSWERED, Call, Journal
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.rollout.server import wait_for_one
from learner.runs.console import showing_waits
from learner.training.start_checks import check_inputs
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.small_run import small_config, small_mapping

SOON_S = 0.05
PATIENCE_S = 30.0
SINCE = r" since \d\d:\d\d:\d\d \(\d+ s\)"


class Said:
    """Lines as they come; `wait` returns the first one that has the words."""

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
            assert self._came.wait_for(there, PATIENCE_S), (words, self.lines)
            return there()[0]


@pytest.fixture
def said() -> Iterator[Said]:
    told = Said()
    with reporting_waits(told, SOON_S):
        yield told


def test_a_line_names_what_is_waited_for_since_when_and_what_is_known(said: Said) -> None:
    known = iter(["nothing yet", "half of it"])
    with waiting_for("a push", lambda: next(known, "all")):
        first, second = said.wait("nothing yet"), said.wait("half of it")
    assert re.fullmatch(f"Waiting for a push{SINCE}: nothing yet", first)
    assert re.fullmatch(f"Waiting for a push{SINCE}: half of it", second)
    assert first.partition(" (")[0] == second.partition(" (")[0]
    with waiting_for("another"):
        assert re.fullmatch(f"Waiting for another{SINCE}", said.wait("another"))


def test_of_waits_inside_of_one_another_the_innermost_is_told(said: Said) -> None:
    with waiting_for("all of it"), waiting_for("a part"):
        said.wait("a part")
        said.lines.clear()
        said.wait("a part")
        assert not [line for line in said.lines if "all of it" in line]
    with waiting_for("all of it"):
        said.wait("all of it")


def test_what_takes_no_time_is_not_told() -> None:
    told = Said()
    with reporting_waits(told, PATIENCE_S):
        for _ in range(100):
            with waiting_for("nothing"):
                pass
    assert told.lines == []


def test_unless_told_otherwise_a_line_comes_every_20_seconds() -> None:
    assert learner.distributed.waiting.EVERY_S == 20.0


# --- what a run waits for


def test_training_says_that_it_waits_for_a_server(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(learner.distributed.waiting, "EVERY_S", SOON_S)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "out")
    mapping["stage2_ab"]["schedule"]["b_ratio"] = 0.5
    server = {"servers": [{"base_url": url, "group_port": 51216}], "timeout_s": 1.0}
    mapping["rollout_matching"]["vllm"]["server"] = server
    file = tmp_path / "run.yaml"
    file.write_text(dump_mapping(mapping))
    with pytest.raises(ContractError, match="no healthy answer"):
        learner.commands.run.train(file)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Waiting" in line]
    begins = re.escape(f"Waiting for the rollout server at {url}")
    assert len(lines) > 1
    assert re.match(f"{begins}{SINCE}: .*Connection refused", lines[-1])


def test_loading_is_told(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, said: Said
) -> None:
    from learner.training.train import train_as

    def load(_: object) -> object:
        said.wait("the model to be loaded")
        raise RunError("enough")

    config = small_config(toy_checkpoint, toy_data, tmp_path / "out")
    console = Console(file=io.StringIO())
    with pytest.raises(RunError, match="enough"):
        train_as(SINGLE_PROCESS, config, check_inputs(config), [], console, load)  # type: ignore[arg-type]


def test_another_process_is_told_by_its_number(said: Said) -> None:
    store = HashStore()
    slow = StorePeers(1, 2, lambda: store, Timing(beat=0.01), end=lambda _: None)
    quick = StorePeers(0, 2, lambda: store, Timing(beat=0.01), end=lambda _: None)
    other = threading.Thread(target=slow.all_gather, args=[lambda: said.wait("learner process 1")])
    other.start()
    assert quick.all_gather(lambda: "here")[0] == "here"
    other.join()


class Lost:
    """A server that starts."""

    url = "http://a:1"
    lost: str | None = "connection refused"
    starting, wants_push = True, False


def test_a_server_that_is_lost_is_told_with_the_reason(said: Said) -> None:
    def look() -> list[str]:
        return ["back"] if said.lines else []

    assert wait_for_one(look, [Lost()], PATIENCE_S, lambda _: None) == ["back"]
    line = said.wait("a rollout server to come back")
    assert line.endswith(": http://a:1: connection refused")


class Slow:
    """A backend that answers one by one, and goes on when what it does was told."""

    def __init__(self, journal: Journal, told: Callable[[str], object]) -> None:
        self._journal = journal
        self._told = told

    def rollout(
        self, requests: Sequence[RolloutInferRequest], _: RequestConfig
    ) -> list[RolloutOutput]:
        for index in range(len(requests)):
            self._journal.call(Call("http://a:1", index, 1, None, 1, "timeout"))
            self._journal.call(Call("http://a:1", index, 1, None, 2, ANSWERED))
            self._told(f"{index + 1} of {len(requests)} are there, ")
        return [RolloutOutput([1], [2], "", "stop", False, (1, 1), 0) for _ in requests]

    def push_weights(self, version: int) -> None:
        self._told(f"a push of the weights, version {version}")

    def close(self) -> None: ...


def policy_of(told: Callable[[str], object]) -> Policy:
    journal = Journal()
    return Policy(
        OpenBackend(Slow(journal, told), journal=journal), Asking("", None, RequestConfig())
    )


SAMPLES = [Sample(f"a.jsonl:{n}", (Path("/a.png"),), 64, 64, ()) for n in (1, 2, 3)]


def test_pushes_and_the_first_answers_are_told_and_no_later_ones(said: Said) -> None:
    waited: list[str] = []

    def told(words: str) -> None:
        if len(waited) < 4:
            waited.append(said.wait(words))

    policy = policy_of(told)
    policy.push_if_stale()
    policy.answer(SAMPLES, 0)
    assert re.fullmatch(f"Waiting for a push of the weights, version 1{SINCE}", waited[0])
    counted = r"1 of 3 are there, [\d.]+ a second, \d+s left"
    assert re.fullmatch(f"Waiting for answers{SINCE}: {counted}", waited[1])
    policy.take_notes()
    with waiting_for("a step"):
        said.lines.clear()
        policy.answer(SAMPLES, 0)
        said.wait("a step")
    assert not [line for line in said.lines if "answers" in line]


def test_an_evaluation_counts_its_answers(said: Said, toy_tokenizer: object) -> None:
    policy = policy_of(said.wait)
    policy.push_if_stale()
    done = evaluate(policy, SAMPLES, 0, toy_tokenizer, allow_poly=False, resolution=64)  # type: ignore[arg-type]
    assert len(done.answers) == 3
    policy = policy_of(said.wait)
    policy.push_if_stale()
    policy.answer(SAMPLES, 0)
    policy.take_notes()
    said.lines.clear()
    evaluate(policy, SAMPLES, 0, toy_tokenizer, allow_poly=False, resolution=64)  # type: ignore[arg-type]
    assert said.wait("3 of 3").startswith("Waiting for the answers of an evaluation since ")


# --- where it is shown


@contextmanager
def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Iterator[Callable[[str], object]]:
    """Waits for words on a console; every wait is told soon."""
    monkeypatch.setattr(learner.distributed.waiting, "EVERY_S", SOON_S)
    out = Output()
    with showing_waits(Console(file=out, force_terminal=terminal, width=100)):
        yield out.said.wait


class Output(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.said = Said()

    def write(self, text: str) -> int:
        self.said(text)
        return len(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_as_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    with shown(monkeypatch, terminal=terminal) as wait:
        policy = policy_of(wait)
        policy.push_if_stale()
        policy.answer(SAMPLES, 0)
        last = wait("3 of 3 are there, ")
    assert ("\x1b[" in str(last)) == terminal
