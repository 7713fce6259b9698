"""A simulation's outcome as tables, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from rich.table import Table

from learner.data.show import new_table
from learner.metrics.figures import duration, share
from learner.simulate.outcome import PHASES, Outcome
from learner.simulate.vary import Values
from learner.types import Channel

_NONE = "-"


def outcome_tables(outcome: Outcome) -> Iterator[tuple[str, Table]]:
    """Tables with their titles."""
    yield f"The first {len(outcome.steps)} of {outcome.run_steps} steps", _steps(outcome)
    yield "Work", _work(outcome)
    yield "Who generates", _servers(outcome)
    if outcome.asynchronous:
        queue = new_table(*(f"#{name}" for name in _ASYNC))
        queue.add_row(*_of_queue(outcome))
        yield "Rollouts beside training", queue
    yield "The run", _run(outcome)


def _steps(outcome: Outcome) -> Table:
    table = new_table("channel", "#steps", "#step", *(f"#{phase}" for phase in PHASES), "#update")
    for channel in get_args(Channel):
        if steps := outcome.of(channel):
            phases = (outcome.phase_s(channel, phase) for phase in PHASES)
            update = steps[0].update_s
            numbers = (outcome.step_s(channel) or 0.0, *phases, update)
            table.add_row(channel, str(len(steps)), *map(_seconds, numbers))
    return table


def _work(outcome: Outcome) -> Table:
    table = new_table("channel", "#forwards", "#replays", "#samples", "#tokens", "#fill")
    for channel in get_args(Channel):
        if steps := outcome.of(channel):
            room = sum(step.room for step in steps)
            totals = (
                sum(getattr(step, name) for step in steps) / len(steps)
                for name in ("forwards", "replays", "segments", "tokens")
            )
            fill = share(sum(step.tokens for step in steps), room, places=0)
            table.add_row(channel, *(f"{n:.1f}" for n in totals), fill)
    return table


def _servers(outcome: Outcome) -> Table:
    table = new_table("", "#busy", "#sequences at once", "#tokens/s")
    for number, use in enumerate(outcome.servers):
        name = f"server {number}" if outcome.rollout_gpus else f"rank {number}"
        table.add_row(name, f"{use.busy:.0%}", f"{use.running:.1f}", f"{use.tokens_per_s:.0f}")
    table.add_row("learning, mean of the ranks", f"{outcome.learner_busy:.0%}", _NONE, _NONE)
    return table


def _run(outcome: Outcome) -> Table:
    table = new_table(*(f"#{column}" for column in _RUN))
    table.add_row(*_of_run(outcome))
    return table


_RUN = ("GPUs", "A step", "B step", "samples/s", "per GPU", "whole run")


def _of_run(outcome: Outcome) -> list[str]:
    return [
        str(outcome.gpus)
        if outcome.colocated
        else f"{outcome.rollout_gpus}+{outcome.learner_gpus}",
        *(_seconds(outcome.step_s(channel)) for channel in get_args(Channel)),
        f"{outcome.samples_per_s:.2f}",
        f"{outcome.samples_per_s / outcome.gpus:.3f}",
        duration(outcome.run_seconds),
    ]


def sweep_table(rows: Sequence[tuple[Values, Outcome]]) -> Table:
    """One row for each combination of values; servers, learner: how busy they are."""
    names = list(rows[0][0])
    asynchronous = any(outcome.asynchronous for _, outcome in rows)
    table = new_table(
        *(f"#{name}" for name in (*names, *_RUN, "servers", "learner", "fill")),
        *(f"#{name}" for name in _ASYNC if asynchronous),
    )
    for values, outcome in rows:
        busy = [use.busy for use in outcome.servers]
        table.add_row(
            *(f"{values[name]:g}" for name in names),
            *_of_run(outcome),
            share(sum(busy), len(busy), places=0),
            f"{outcome.learner_busy:.0%}",
            f"{outcome.fill:.0%}",
            *(_of_queue(outcome) if asynchronous else ()),
        )
    return table


_ASYNC = ("ready", "skipped B", "stale", "dropped")


def _of_queue(outcome: Outcome) -> list[str]:
    steps = outcome.steps
    return [
        f"{sum(step.ready for step in steps) / len(steps):.1f}",
        str(sum(step.skipped for step in steps)),
        str(sum(step.stale for step in steps)),
        str(sum(step.overflowed for step in steps)),
    ]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Every number of the tables, and each step."""
    channels: Mapping[str, Any] = {
        channel: {
            "steps": len(outcome.of(channel)),
            "step_s": outcome.step_s(channel),
            "phases_s": {phase: outcome.phase_s(channel, phase) for phase in PHASES},
        }
        for channel in get_args(Channel)
        if outcome.of(channel)
    }
    return {
        "channels": channels,
        "run_steps": outcome.run_steps,
        "run_s": outcome.run_seconds,
        "samples_per_s": outcome.samples_per_s,
        "rollout_gpus": outcome.rollout_gpus,
        "learner_gpus": outcome.learner_gpus,
        "learner_busy": outcome.learner_busy,
        "fill": outcome.fill,
        "servers": [asdict(use) for use in outcome.servers],
        "steps": [asdict(step) for step in outcome.steps],
    }


def sources_table(sources: Mapping[str, str]) -> Table:
    """What each speed was fitted from."""
    table = new_table("speed", "from")
    for name, source in sources.items():
        table.add_row(name, source)
    return table


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds:.2f} s"
