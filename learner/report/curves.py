"""The curves of a run: losses, scores, rates, learning rate, lengths."""

from learner.report.charts import Chart, curve, present
from learner.report.run_view import Point, RunView, keys_below, numbers, points

_B = "stage2_ab/channel_b"
# An axis is logarithmic where values differ by such a factor.
_DECADES = 50
_FAMILIES = {
    "A1_text": "text, first forward",
    "A2_text": "text, last forward",
    "A2_coord": "coordinates",
    "B_rollout_text": "text",
    "B_coord": "coordinates",
}


def curves(run: RunView) -> list[Chart]:
    """Those that have something to show."""
    return present(
        _loss(run),
        _parts(run, "A"),
        _parts(run, "B"),
        _scores(run),
        _matching(run),
        _objects(run),
        _lengths(run),
        _rates(run),
        _diagnostics(run),
        _queue(run),
        _learning_rate(run),
        _gradient(run),
    )


def _learning_rate(run: RunView) -> Chart | None:
    series = {"rate": run.series("learning_rate")}
    return curve("learning-rate", "Learning rate", "rate", series, smooth=False)


def _gradient(run: RunView) -> Chart | None:
    norms = run.series("grad_norm")
    return curve(
        "grad-norm",
        "Gradient norm",
        "before it is clipped",
        {"gradient norm": norms},
        log=_of_many_sizes(norms),
    )


def _loss(run: RunView) -> Chart | None:
    series = {f"channel {channel}": run.series("loss", channel) for channel in run.channels}
    return curve("loss", "Loss", "loss", series)


def _parts(run: RunView, channel: str) -> Chart | None:
    """The atoms of a channel's loss, which may be of very different sizes."""
    series = {}
    for key in keys_below(run.steps, f"loss/{channel}"):
        _, family, name = key.split("/")
        series[f"{name} ({_FAMILIES.get(family, family)})"] = run.series(key)
    title = f"Parts of the loss, channel {channel}"
    log = _of_many_sizes([point for points in series.values() for point in points])
    return curve(f"loss-{channel.lower()}", title, "loss", series, log=log)


def _of_many_sizes(points: list[Point]) -> bool:
    """A logarithmic axis can show them, and shows more than another."""
    known = list(numbers(points))
    return bool(known) and min(known) > 0 and max(known) > _DECADES * min(known)


def _scores(run: RunView) -> Chart | None:
    names = {
        "eval/f1": "F1",
        "eval/precision": "precision",
        "eval/recall": "recall",
        "eval/box_f1": "F1 of boxes alone",
        "eval/ap": "AP",
        "eval/ap50": "AP at 0.5",
        "eval/box_ap": "AP of boxes alone",
    }
    series = {name: points(run.evaluations, key) for key, name in names.items()}
    return curve("scores", "Scores of evaluations", "score", series, shares=True)


def _matching(run: RunView) -> Chart | None:
    series = {"matched ground truths": run.series(f"{_B}/match_rate")}
    return curve("match-rate", "Match rate", "share", series, shares=True)


def _rates(run: RunView) -> Chart | None:
    series = {
        "truncated answers": run.series("rollout/parse_truncated_rate"),
        "dropped objects": _share(run, f"{_B}/N_drop_invalid", f"{_B}/N_valid_pred"),
        "false positives": _share(run, f"{_B}/false_positives", f"{_B}/matched"),
    }
    title = "Truncated, dropped, not matched"
    return curve("parse-rates", title, "share", series, shares=True)


def _share(run: RunView, part: str, rest: str) -> list[Point]:
    """part / (part + rest) in the steps where that is more than nothing."""
    return [
        (line["step"], line[part] / (line[part] + line[rest]))
        for line in run.steps
        if line.get(part) is not None and line.get(rest) is not None and line[part] + line[rest]
    ]


def _objects(run: RunView) -> Chart | None:
    names = {
        "matched": "matched",
        "fn_appended": "missed, appended",
        "false_positives": "false positives",
        "N_drop_invalid": "dropped",
    }
    series = {name: run.series(f"{_B}/{key}") for key, name in names.items()}
    return curve("objects", "Objects of a step", "objects", series)


def _lengths(run: RunView) -> Chart | None:
    p99 = run.series("rollout/gen_new_tokens_p99")
    series = {
        "mean": run.series("rollout/gen_new_tokens_mean"),
        "99th percentile": p99,
    }
    if p99:
        limit = float(run.config.rollout_matching.max_new_tokens)
        series["max_new_tokens"] = [(step, limit) for step in sorted({p99[0][0], p99[-1][0]})]
    return curve("lengths", "Lengths of answers", "tokens", series)


def _diagnostics(run: RunView) -> Chart | None:
    names = [key for key in keys_below(run.steps, "coord_diag/") if "acc_" in key or "mass" in key]
    series = {key.removeprefix("coord_diag/"): run.series(key) for key in names}
    title = "Coordinate distributions"
    return curve("coordinates", title, "share", series, shares=True)


def _queue(run: RunView) -> Chart | None:
    below = "stage2_ab/async"
    names = {
        "ready_packs": "packs ready",
        "version_lag": "versions of lag",
        "dropped_stale": "packs dropped as stale",
        "dropped_oldest": "packs dropped for newer ones",
    }
    series = {name: run.series(f"{below}/{key}") for key, name in names.items()}
    return curve("queue", "Asynchronous rollouts", "packs, versions", series)
