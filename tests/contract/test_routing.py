"""Requests go to the engine with the fewest outstanding tokens."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.routing import Load, charged, least_loaded


@dataclass
class Engine:
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
