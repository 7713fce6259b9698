"""A step in one line of text, for a log and for a terminal without a cursor."""

from typing import Any

PHASES = ("rollout", "target", "pack", "learn", "push")


def step_line(step: int, total: int | None, logs: dict[str, Any]) -> str:
    """logs: what was logged of the step."""
    seconds = " ".join(f"{p} {logs[f'time/{p}_s']:.2f}s" for p in PHASES if f"time/{p}_s" in logs)
    rate = logs.get("rollout/per_second")
    tail = f", {rate:.1f} rollouts/s" if rate else ""
    loss = "not finite" if logs["loss"] is None else f"{logs['loss']:.4f}"
    return f"step {step}/{total or '?'} channel {channel_of(logs)} loss {loss} {seconds}{tail}"


def channel_of(logs: dict[str, Any]) -> str:
    return "B" if logs.get("step/channel_b") else "A"
