"""Requests go to the engine with the fewest outstanding tokens, and wait for their turn there."""

import heapq
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.engine_protocol import Load
from rollout_server.serving.infer import Turns, charged, least_loaded


@dataclass
class Engine:
    index: int = 0
    load: Load = field(default_factory=Load)


@pytest.mark.req("SRV-01")
def test_the_least_loaded_engine_is_next_and_equals_are_taken_in_order() -> None:
    engines = [Engine(), Engine(), Engine()]
    with ExitStack() as running:
        chosen = []
        for tokens in (10, 5, 7, 1, 1, 1):
            engine = least_loaded(engines)
            running.enter_context(charged(engine.load, tokens, sequences=2))
            chosen.append(engines.index(engine))
        assert chosen == [0, 1, 2, 1, 1, 1]
        assert [engine.load for engine in engines] == [Load(10, 2), Load(8, 8), Load(7, 2)]


@pytest.mark.req("SRV-01")
@given(st.integers(1, 5), st.lists(st.integers(1, 500), min_size=1))
def test_loads_differ_by_at_most_one_request(replicas: int, costs: list[int]) -> None:
    engines = [Engine() for _ in range(replicas)]
    with ExitStack() as running:
        for cost in costs:
            running.enter_context(charged(least_loaded(engines).load, cost, 1))
        tokens = [engine.load.tokens for engine in engines]
        assert max(tokens) - min(tokens) <= max(costs)
    assert [engine.load for engine in engines] == [Load()] * replicas


def test_a_request_that_fails_is_no_longer_outstanding() -> None:
    load = Load()
    with pytest.raises(RuntimeError), charged(load, 5, 1):
        raise RuntimeError
    assert load == Load()


class Queue:
    """An engine with so many places; it takes what waits as vLLM does: by turn, then as it came."""

    def __init__(self, places: int) -> None:
        self.engine = Engine()
        self.answered: list[str] = []
        self._places = places
        self._running: list[tuple[int, str]] = []
        self._waiting: list[tuple[int, int, str]] = []
        self._came = 0

    def call(self, name: str, requests: int) -> None:
        turns = Turns()
        for _ in range(requests):
            heapq.heappush(self._waiting, (turns.take(self.engine, 1), self._came, name))
            self._came += 1

    def answer(self, requests: int) -> None:
        """Those that run longest end first."""
        for _ in range(requests):
            while self._waiting and len(self._running) < self._places:
                turn, _, name = heapq.heappop(self._waiting)
                self._running.append((turn, name))
            if self._running:
                turn, name = self._running.pop(0)
                with charged(self.engine.load, 1, 1, turn):
                    self.answered.append(name)


@pytest.mark.req("SRV-02")
@given(st.integers(1, 8), st.integers(0, 200))
def test_a_call_of_one_waits_for_one_place(places: int, answered: int) -> None:
    queue = Queue(places)
    queue.call("large", 4096)
    queue.answer(answered)
    queue.call("one", 1)
    queue.answer(places + 1)
    assert queue.answered.index("one") <= answered + places


@pytest.mark.req("SRV-02")
def test_large_calls_share_an_engine() -> None:
    queue = Queue(places=4)
    queue.call("old", 1000)
    queue.answer(100)
    queue.call("new", 1000)
    queue.answer(400)
    assert abs(queue.answered[100:].count("new") - 200) <= 2 * 4


@pytest.mark.req("SRV-02")
def test_calls_that_go_on_coming_never_keep_a_large_one_waiting() -> None:
    """Of one request each, as many as there are places, again and again."""
    queue = Queue(places=4)
    queue.call("large", 50)
    queue.answer(4)
    for _ in range(2000):
        queue.call("one", 1)
        queue.call("one", 1)
        queue.answer(2)
    assert queue.answered.count("large") == 50


def test_a_request_that_fails_moves_no_turn() -> None:
    load = Load()
    with pytest.raises(RuntimeError), charged(load, 5, 1, turn=3):
        raise RuntimeError
    assert load.turn == 0
