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
    return number


def _plain(number: Decimal) -> float | str:
    return float(number) if len(number.as_tuple().digits) <= _FLOAT_DIGITS else str(number)


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
