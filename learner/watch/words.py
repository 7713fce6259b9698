"""Numbers and times as short words."""

import math

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float | None) -> str:
    """`48s`, `3m07s`, `2h10m`, `5d03h`."""
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


def number(value: float | None) -> str:
    """Four figures, at most nine characters; what is no finite number is told so."""
    if value is None or not math.isfinite(value):
        return "nan"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        whole = value == int(value)
        return f"{value:.{0 if whole else max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.2e}"
