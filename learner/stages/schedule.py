"""The channel of an optimizer step (STEP-01)."""

from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

from learner.types import Channel
from shared_contracts.errors import ContractError


def channel_for_step(step: int, b_ratio: str | float | Decimal) -> Channel:
    """Return the channel of optimizer step `step` (from 0).

    "B" iff `floor((step + 1) * b_ratio) > floor(step * b_ratio)`, in exact arithmetic.
    """
    share, of = exact_ratio(b_ratio).as_integer_ratio()
    return "B" if (step + 1) * share // of > step * share // of else "A"


@lru_cache(typed=True)  # 0.1 and Decimal(0.1) are equal and have different decimals
def exact_ratio(b_ratio: str | float | Decimal) -> Fraction:
    """Return `b_ratio` as the written decimal: 0.7 is 7/10, not its nearest double.

    Raises `ContractError` unless it is a number in [0, 1].
    """
    try:
        written = Decimal(str(b_ratio))
    except InvalidOperation:
        written = Decimal("nan")
    if not (written.is_finite() and 0 <= written <= 1):
        raise ContractError(
            "stage2_ab.schedule.b_ratio",
            f"{b_ratio!r} is no number in [0, 1]",
            "Give the share of channel-B steps as a decimal, e.g. 0.5",
        )
    return Fraction(written)
