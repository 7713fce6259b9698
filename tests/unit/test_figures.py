"""How figures are shown."""

import math

import pytest

from learner.runs.console import counted, duration, fraction, narrow_number, number, score


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0s"), (59.7, "1m00s"), (187, "3m07s"), (7800, "2h10m"), (442_800, "5d03h")],
)
def test_durations_are_said_in_two_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said
    assert duration(math.inf) == duration(None) == "?"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (1.23456, "1.235"),
        (0.0123456, "0.01235"),
        (1.5e-7, "1.50e-07"),
        (123456.0, "1.23e+05"),
        (None, "nan"),
        (math.nan, "nan"),
        (-2.5, "-2.500"),
    ],
)
def test_numbers_fit_a_narrow_column(value: float | None, said: str) -> None:
    assert narrow_number(value) == said
    assert len(said) <= 9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not a number"),
        (0.0, "0"),
        (1920.0, "1,920"),
        (0.98622, "0.9862"),
        (12.3456, "12.35"),
        (12345.6, "12,346"),
        (1e-4, "1.000e-04"),
    ],
)
def test_numbers_are_told_with_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_scores_shares_and_counts_of_nothing_are_told() -> None:
    assert (score(0.78125), score(None)) == ("0.781", "-")
    assert (fraction(1, 3), fraction(1, 3, places=0), fraction(1, 0)) == ("33.3%", "33%", "-")
    assert [counted(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
