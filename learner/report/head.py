"""What stands at the head of the page: what the run is, how far it is, what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from learner.metrics.figures import duration, number, score
from learner.report.run_view import Point, RunView
from learner.resume import METRICS


@dataclass(frozen=True)
class Tile:
    """A number worth large letters. note: what it is the mean of, and the like."""

    name: str
    value: str
    note: str = ""


def state(run: RunView) -> str:
    """One sentence."""
    total = run.total_steps
    steps = f"step {run.last_step:,}" + (f" of {total:,}" if total else "")
    if run.error is not None:
        return f"Ended by an error at {steps}."
    if run.ended is not None:
        began = int(run.facts.get("started_at_step", 0))
        last = f", the last {run.last_step - began:,} of them" if began else ""
        seconds = duration(run.ended["train_runtime"])
        return f"Finished: {run.last_step:,} steps{last} in {seconds}."
    if not run.metrics:
        return "No step is logged yet."
    written = (run.folder.path / METRICS).stat().st_mtime
    when = datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Not finished: {steps}. The last line was logged {when}."


def tiles(run: RunView) -> list[Tile]:
    """Those that are known."""
    found = []
    if run.evaluations:
        last = run.evaluations[-1]
        found = [
            Tile("F1", score(last["eval/f1"]), f"evaluation after step {last['step']:,}"),
            Tile("Precision", score(last.get("eval/precision")), "same evaluation"),
            Tile("Recall", score(last.get("eval/recall")), "same evaluation"),
        ]
    match_rate = "stage2_ab/channel_b/match_rate"
    if series := run.series(match_rate):
        note = _of_last(series) + " with answers"
        found.append(Tile("Match rate", score(run.mean_of_last(match_rate)), note))
    if series := run.series("loss"):
        note = _of_last(series)
        found.append(Tile("Loss", number(run.mean_of_last("loss")), note))
    if series := run.series("time/step_s"):
        value = number(run.mean_of_last("time/step_s"))
        found.append(Tile("Seconds a step", value, _of_last(series)))
    return found


def _of_last(series: Sequence[Point]) -> str:
    count = min(10, len(series))
    return f"mean of the last {count} steps" if count > 1 else "of one step"


def facts(run: RunView) -> dict[str, str]:
    """What the run is."""
    config, known = run.config, run.facts
    versions: dict[str, Any] = known.get("versions", {})
    rollouts = known.get("rollouts")
    shown = {
        "variant": f"{config.custom.trainer_variant}, channel B in {config.b_ratio:%} of the steps",
        "model": str(config.model.model),
        "trained": _tuner(run),
        "answers by": f"{known.get('rollout_backend')}: {rollouts}" if rollouts else "",
        "weights travel": known.get("sync_mode") or "",
        "data": str(config.data.train_jsonl),
        "batch": f"{config.training.effective_batch_size} samples a step",
        "commit": (known.get("commit") or "")[:12],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "python": str(known.get("python", "")),
    }
    return {name: value for name, value in shown.items() if value}


def _tuner(run: RunView) -> str:
    kind = run.config.tuner.train_type
    return {"full": "all weights"}.get(kind, kind)
