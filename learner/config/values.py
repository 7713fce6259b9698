"""What several sections use: types of single values, and faults told all at once."""

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError
from pydantic_core import InitErrorDetails

from shared_contracts.strict_model import Refusal, StrictModel, shown

# A float keeps every decimal of up to 15 digits apart from every other (C's DBL_DIG).
_FLOAT_DIGITS = 15
# More than any share needs; exact arithmetic takes memory by the place.
_MOST_PLACES = 30


def _absolute(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise Refusal(f"{shown(value)} is not a path", "Give the path of a file or folder")
    return Path(value).absolute()


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise Refusal(f"{shown(value)} is not a number", "Write a decimal such as 0.5")
    try:
        number = Decimal(repr(value) if isinstance(value, float) else value)
    except InvalidOperation:
        raise Refusal(f"{shown(value)} is not a number", "Write a decimal such as 0.5") from None
    if isinstance(value, float) and len(number.as_tuple().digits) > _FLOAT_DIGITS:
        raise Refusal(
            f"{value!r} has more digits than a YAML number keeps",
            f"Write it with at most {_FLOAT_DIGITS} digits, or in quotes",
        )
    if number.is_finite() and _places(number) > _MOST_PLACES:
        raise Refusal(
            f"{shown(value)} has more than {_MOST_PLACES} places", "Write a decimal such as 0.5"
        )
    return number


def _places(number: Decimal) -> int:
    """Digits on the longer side of the decimal point."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "finite"
    return max(-exponent, number.adjusted())


def _plain(number: Decimal) -> float | str:
    """A float where it is read back as this decimal, else text."""
    near = Decimal(repr(float(number)))
    exact = near == number and len(near.as_tuple().digits) <= _FLOAT_DIGITS
    return float(number) if exact else str(number)


# Relative paths start at the current working directory.
AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]

# The decimal that was written: 0.7 is 7/10.
WrittenDecimal = Annotated[Decimal, BeforeValidator(_decimal), PlainSerializer(_plain)]

Weight = Annotated[float, Field(ge=0)]


class EmptySection(StrictModel):
    """A mapping of the contract that has no keys."""


def refuse_all(refusals: Iterable[Refusal]) -> None:
    """Raise every refusal of a validator at once; nothing happens when there is none.

    pydantic adds the faults of a ValidationError raised in a validator to its own.
    """
    faults = [
        InitErrorDetails(type="value_error", input=None, ctx={"error": refusal})
        for refusal in refusals
    ]
    if faults:
        raise ValidationError.from_exception_data("refused", faults)
