"""Lines on the terminal, and formats of their numbers."""

import math
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from learner.types import AnswerFault


def tell(console: Console, line: str | Text) -> None:
    """Print a line without line breaks, markup or emoji codes."""
    console.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)


# Metrics of answers that were not read, or only in part.
_UNREAD = (*get_args(AnswerFault), "invalid_rollout")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_DIGITS = 4


def duration(seconds: float | None) -> str:
    """Format seconds: `48s`, `3m07s`, `2h10m`, `5d03h`; `?` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h"


def score(value: float | None) -> str:
    """Format a value in [0, 1] with three decimals; `-` for None."""
    return "-" if value is None else f"{value:.3f}"


def fraction(part: float, whole: float, places: int = 1) -> str:
    """Format `part / whole` in percent; `-` if `whole` is 0."""
    return f"{part / whole:.{places}%}" if whole else "-"


def counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def number(value: float | None) -> str:
    """Format a number with four digits and thousands separators."""
    if value is None:
        return "not a number"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e15:
        places = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{places}f}"
    return f"{value:.3e}"


PHASES = ("rollout", "target", "pack", "learn", "push")


def step_line(step: int, total: int | None, logs: dict[str, Any]) -> str:
    seconds = " ".join(f"{p} {logs[f'time/{p}_s']:.2f}s" for p in PHASES if f"time/{p}_s" in logs)
    rate = logs.get("rollout/per_second")
    tail = f", {rate:.1f} rollouts/s" if rate else ""
    return f"step {step}/{total or '?'} {channel_and_loss(logs)} {seconds}{tail}"


def channel_and_loss(logs: dict[str, Any]) -> str:
    loss = "not finite" if logs["loss"] is None else f"{logs['loss']:.4f}"
    counts = {name: logs.get(f"stage2_ab/channel_b/{name}") for name in _UNREAD}
    unread = ", ".join(f"{count:.0f} {name}" for name, count in counts.items() if count)
    return f"channel {channel_of(logs)} loss {loss}{unread and f' (answers: {unread})'}"


def channel_of(logs: dict[str, Any]) -> str:
    return "B" if logs.get("step/channel_b") else "A"
