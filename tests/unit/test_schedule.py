"""Channel of a step (STEP-01)."""

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.stages.schedule import channel_for_step
from shared_contracts.errors import ContractError


def channels(b_ratio: str | float | Decimal, steps: range) -> str:
    return "".join(channel_for_step(step, b_ratio) for step in steps)


@pytest.mark.req("STEP-01", "ARCH-02")
@pytest.mark.scenario(
    "b_ratio=0.5 alternates deterministically by optimizer step",
    "Scheduling policy changes are isolated from trainer orchestration",
)
@pytest.mark.parametrize(
    ("b_ratio", "expected"),
    [
        (0.5, "ABABABABAB"),
        (1, "BBBBBBBBBB"),
        (0.7, "ABBABBABBB"),
        (Decimal("0.1"), "AAAAAAAAAB"),
    ],
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
    with pytest.raises(ContractError) as error:
        channel_for_step(0, b_ratio)
    assert error.value.where == "stage2_ab.schedule.b_ratio"
    assert repr(b_ratio) in error.value.found
