"""Simulated engines against what can be said of them in closed form."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from learner.operate.simulate.engines import Asked, Batches, Continuous, Server, Wait
from learner.operate.simulate.inputs import EngineSpeed

SPEED = EngineSpeed(call_s=0.5, prefill_tokens_per_s=100.0, step_s=0.1, step_per_sequence_s=0.01)

pairs = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=12)


def asked(pairs: Sequence[tuple[int, int]]) -> list[Asked]:
    return [Asked(prompt, answer, limit=100) for prompt, answer in pairs]


def seconds_of(env: Environment, work: Wait) -> float:
    env.run(env.process(work))
    return float(env.now)


def served(requests: Sequence[tuple[int, int]], places: int, replicas: int = 1) -> float:
    env = Environment()
    server = Server(env, SPEED, replicas, places)
    return seconds_of(env, server.answer(asked(requests)))


def step_s(running: int) -> float:
    return SPEED.step_s + SPEED.step_per_sequence_s * running


def test_one_sequence_takes_its_call_its_prompt_and_a_step_for_each_token() -> None:
    assert served([(30, 7)], places=1) == pytest.approx(0.5 + 30 / 100 + 7 * step_s(1))


@given(pairs)
@settings(max_examples=100)
def test_sequences_that_all_fit_leave_one_by_one(requests: list[tuple[int, int]]) -> None:
    prompts = sum(prompt for prompt, _ in requests)
    longest = max(answer for _, answer in requests)
    running = (sum(answer > k for _, answer in requests) for k in range(longest))
    expected = 0.5 + prompts / 100 + sum(map(step_s, running))
    assert served(requests, places=len(requests)) == pytest.approx(expected)


@given(pairs)
@settings(max_examples=100)
def test_with_one_place_sequences_run_one_after_the_other(requests: list[tuple[int, int]]) -> None:
    expected = 0.5 + sum(prompt / 100 + answer * step_s(1) for prompt, answer in requests)
    assert served(requests, places=1) == pytest.approx(expected)


def test_a_place_that_is_free_is_taken_by_who_waits_and_its_prompt_holds_up_the_others() -> None:
    both = 10 * step_s(2)
    entered = 20 / 100
    expected = 0.5 + (20 + 20) / 100 + both + entered + 5 * step_s(2) + 15 * step_s(1)
    assert served([(20, 10), (20, 30), (20, 5)], places=2) == pytest.approx(expected)


def test_who_comes_in_the_middle_of_a_step_enters_at_its_end() -> None:
    env = Environment()
    engine = Continuous(env, SPEED, places=2)
    ends: list[float] = []

    def first() -> Wait:
        yield engine.submit(Asked(10, 10, 100))
        ends.append(env.now)

    def second() -> Wait:
        yield env.timeout(0.1 + 2.5 * step_s(1))
        yield engine.submit(Asked(10, 1, 100))
        ends.append(env.now)

    env.process(first())
    env.process(second())
    env.run()
    entered = 0.1 + 3 * step_s(1) + 0.1
    assert ends == pytest.approx([entered + step_s(2), entered + step_s(2) + 6 * step_s(1)])


def test_requests_go_to_the_engine_with_the_fewest_outstanding_tokens() -> None:
    env = Environment()
    server = Server(env, SPEED, replicas=2, places=8)
    env.run(env.process(server.answer(asked([(500, 1), (10, 1), (10, 1), (10, 1)]))))
    assert [engine.use.sequences for engine in server.engines] == [1, 3]


@given(pairs, st.integers(1, 5))
@settings(max_examples=100)
def test_batches_of_transformers_wait_for_their_longest_answer(
    requests: list[tuple[int, int]], rows: int
) -> None:
    env = Environment()
    batches = [requests[i : i + rows] for i in range(0, len(requests), rows)]
    expected = sum(
        0.5
        + len(batch) * max(prompt for prompt, _ in batch) / 100
        + max(answer for _, answer in batch) * step_s(len(batch))
        for batch in batches
    )
    taken = seconds_of(env, Batches(env, SPEED, rows).answer(asked(requests)))
    assert taken == pytest.approx(expected)


def test_an_engine_knows_how_long_it_was_busy_and_with_how_many() -> None:
    env = Environment()
    server = Server(env, SPEED, replicas=1, places=2)
    env.run(env.process(server.answer(asked([(10, 4), (10, 4)]))))
    use = server.engines[0].use
    assert use.busy_s == pytest.approx(20 / 100 + 4 * step_s(2))
    assert use.decoded_s == pytest.approx(2 * 4 * step_s(2))
    assert (use.tokens, use.sequences) == (8, 2)
