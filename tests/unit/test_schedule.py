"""The channel of a step (STEP-01), and its samples: each of an epoch once, by one rank."""

from decimal import Decimal
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.data.order import BatchOrder
from learner.stages.schedule import channel_for_step
from learner.training.trainer import BatchLoader
from learner.types import Sample
from tests.unit.refusals import refused


def channels(b_ratio: str | float | Decimal, steps: range) -> str:
    return "".join(channel_for_step(step, b_ratio) for step in steps)


@pytest.mark.req("STEP-01", "ARCH-02")
@pytest.mark.scenario(
    "b_ratio=0.5 alternates deterministically by optimizer step",
    "Scheduling policy changes are isolated from trainer orchestration",
)
@pytest.mark.parametrize(
    ("b_ratio", "expected"),
    [(0.5, "ABABABABAB"), (1, "BBBBBBBBBB"), (0.7, "ABBABBABBB"), (Decimal("0.1"), "AAAAAAAAAB")],
)
def test_channels_of_the_first_steps(b_ratio: float, expected: str) -> None:
    assert channels(b_ratio, range(10)) == expected


@pytest.mark.req("STEP-01")
@pytest.mark.scenario("b_ratio edge cases are deterministic")
@given(st.integers(0, 10**15), st.integers(0, 1000))
@example(10**15, 0)
@example(10**15, 1000)
def test_the_ratio_is_the_decimal_that_was_written_at_any_step(step: int, permille: int) -> None:
    expected = (step + 1) * permille // 1000 > step * permille // 1000
    assert (channel_for_step(step, permille / 1000) == "B") is expected
    assert (channel_for_step(step, f"{permille}e-3") == "B") is expected


@pytest.mark.req("STEP-01")
@pytest.mark.parametrize("b_ratio", [-0.1, 1.0001, "nan", "inf", "half", ""])
def test_a_ratio_outside_of_0_to_1_is_refused(b_ratio: str | float) -> None:
    with refused("stage2_ab.schedule.b_ratio", repr(b_ratio)):
        channel_for_step(0, b_ratio)


def epoch(order: BatchOrder, number: int) -> list[list[list[int]]]:
    first = number * order.steps_per_epoch
    steps = range(first, first + order.steps_per_epoch)
    return [[order.rank_batch(step, rank) for rank in range(order.ranks)] for step in steps]


@st.composite
def orders(draw: st.DrawFn) -> BatchOrder:
    ranks, own = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    samples = ranks * own * draw(st.integers(1, 5)) + draw(st.integers(0, ranks * own - 1))
    return BatchOrder(samples, ranks * own, ranks, draw(st.integers(0, 2**32)), draw(st.booleans()))


@pytest.mark.req("STEP-02")
@given(orders(), st.integers(0, 3))
def test_an_epoch_takes_every_sample_of_its_whole_steps_once(order: BatchOrder, of: int) -> None:
    batches = [batch for step in epoch(order, of) for batch in step]
    taken = [index for batch in batches for index in batch]
    assert {len(batch) for batch in batches} == {order.batch // order.ranks}
    assert len(taken) == len(set(taken)) == order.samples // order.batch * order.batch
    assert set(taken) <= set(range(order.samples))
    if not order.shuffle:
        assert taken == list(range(len(taken)))


@pytest.mark.req("STEP-02", "RES-14")
@given(orders(), st.integers(0, 50))
def test_a_step_has_the_same_batch_for_any_number_of_ranks(order: BatchOrder, step: int) -> None:
    alone = BatchOrder(order.samples, order.batch, 1, order.seed, order.shuffle)
    batches = [order.rank_batch(step, rank) for rank in range(order.ranks)]
    assert [index for batch in batches for index in batch] == alone.rank_batch(step, 0)


@pytest.mark.req("STEP-02")
def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def taken(seed: int, number: int) -> list[int]:
        order = BatchOrder(60, 6, 2, seed, shuffle=True)
        return [i for step in epoch(order, number) for batch in step for i in batch]

    assert taken(1, 0) == taken(1, 0)
    assert len({tuple(taken(seed, number)) for seed in (1, 2) for number in range(3)}) == 6


@pytest.mark.req("RUN-01", "RUN-02")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_gives_its_ranks_batches_and_again_those_that_are_left(rank: int) -> None:
    from accelerate import skip_first_batches  # as the Trainer does, which takes seconds

    samples = [Sample(str(number), (), 1, 1, ()) for number in range(17)]
    order = BatchOrder(17, 4, 2, seed=3, shuffle=True)
    loader = BatchLoader(samples, order, rank)
    loader.set_epoch(1)
    batches = [[sample.sample_id for sample in batch] for batch in loader]
    assert batches == [[str(i) for i in order.rank_batch(step, rank)] for step in range(4, 8)]
    assert len(loader) == 4

    left = skip_first_batches(loader, 3)
    again = [[sample.sample_id for sample in batch] for batch in islice(left, 4)]
    assert again == batches[3:]
