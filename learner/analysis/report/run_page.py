"""`report.html` of a run folder, by `learner report` and at the end of training.

run folder -> lines, evaluations, head      run_view.py
           -> counts, shown answers         answers.py
           -> problems                      findings.py
           -> curves                        plots.py
           -> cards with pictures           gallery.py
           -> one HTML file                 page.py, assets/
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from learner.analysis.report.answers import MOST_AFTER_ERROR, MOST_STEPS, read_answers
from learner.analysis.report.findings import findings
from learner.analysis.report.gallery import gallery
from learner.analysis.report.page import Section, asset, link, publish_page
from learner.analysis.report.plots import Plot, plots
from learner.analysis.report.run_view import (
    REPORT,
    SCORE_NAMES,
    RunEvaluation,
    RunView,
    evaluations_of,
    headline,
    state,
    tiles,
)
from learner.data.show import Table
from learner.runs.console import score, tell
from learner.runs.run_folder import RESOLVED, RUN, RunFolder


def write_report(folder: RunFolder, out: Path | None = None, error: str | None = None) -> Path:
    """Write the page, by default into the folder; return its path.

    error: the error that ended the run, if known.

    Raises ContractError if a log cannot be read.
    """
    out = out or folder.path / REPORT
    run = RunView.of(folder, error)
    tally, answers = read_answers(folder, MOST_STEPS if error is None else MOST_AFTER_ERROR)
    resolution = run.config.rollout_matching.matching.maskiou_resolution
    shown = gallery(answers, tally.answers, resolution, run.replay)
    unreadable = sum(bool(picture["problem"]) for picture in shown["pictures"])
    evaluations, curves = evaluations_of(run), plots(run)
    newest = headline(evaluations, run.config.data.val_jsonl)
    link_of_tile = (newest.link(out) if newest else "") or "#evaluations"
    known = {
        "model": run.config.model.model,
        "data": run.config.data.train_jsonl,
        "rollouts": run.facts.get("rollouts"),
        "commit": run.facts.get("commit"),
    }
    values = {
        "title": run.config.training.run_name,
        "state": state(run),
        "finished": run.ended is not None and run.error is None,
        "tiles": tiles(run, newest, link_of_tile),
        "findings": findings(run, tally, unreadable),
        "facts": {name: str(value) for name, value in known.items() if value},
        "sections": [_evaluations(run, evaluations, newest, out), _curves(curves)],
        "plots": {plot.slug: asdict(plot) for plot in curves},
        "gallery": shown,
        "texts": {
            name: (run.folder.path / name).read_text(encoding="utf-8") for name in (RESOLVED, RUN)
        },
    }
    publish_page(out, [asset("gallery.js"), plotly(), asset("charts.js")], values)
    return out


def plotly() -> str:
    """Return Plotly's script with its licence."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def _evaluations(
    run: RunView, evaluations: Sequence[RunEvaluation], newest: RunEvaluation | None, out: Path
) -> Section:
    rows = []
    for each in reversed(evaluations):
        scores = [score(each.scores[name]) for name in SCORE_NAMES]
        data = each.data.name + ("" if each.held_out else " (trained on)")
        url = each.link(out)
        page = link("answers and tables", url) if url else "not kept"
        rows.append([f"{each.step:,}", *scores, data, page])
    columns = ["#step", *(f"#{name}" for name in SCORE_NAMES), "data", "page"]
    tables = [Table("Newest first", columns, rows)] if rows else []
    lead = (
        "A hit has an IoU of at least 0.5 and the right description. A run keeps the pages of its "
        "evaluations with `rollout_matching.eval_detection.save_answers`."
    )
    if newest is None:
        config = shlex.quote(str(run.folder.path.absolute() / RESOLVED))
        lead = (
            "This run has no evaluation on held-out data. Its match rate is of images that it "
            "trains on. A run evaluates itself with `data.val_jsonl`, `training.eval_strategy` "
            "and `training.eval_steps`. Evaluate a checkpoint with "
            f"`learner eval --config {config} --checkpoint CHECKPOINT --data FILE`"
        )
    return Section("evaluations", "Evaluations", lead, tables=tables)


def _curves(drawn: Sequence[Plot]) -> Section:
    groups: dict[str, list[tuple[str, str]]] = {}
    for plot in drawn:
        groups.setdefault(plot.group, []).append((plot.slug, plot.title))
    lead = (
        "Steps are counted from 1, as in metrics.jsonl and TensorBoard. Drag over a part to look "
        "closer, double-click to see all again, click a name to hide it. Of 40 steps or more, the "
        "strong line is the running mean. docs/metrics.md describes every metric."
    )
    return Section("curves", "Curves", lead if drawn else "No step is logged yet.", plots=groups)


@contextmanager
def reported(folder: Path, console: Console) -> Iterator[None]:
    """Write report.html at the end of the block, also after an error.

    A failure of the report is only a warning.
    """
    try:
        yield
    except Exception as error:
        _write(folder, console, error_text(error))
        raise
    _write(folder, console, None)


def renew(folder: Path, console: Console) -> None:
    """Rewrite the report of a finished run, after a new evaluation.

    For an unfinished or failed run, print the command that writes it.
    """
    if RunView.of(RunFolder.open(folder)).ended is not None:
        _write(folder, console, None)
    else:
        tell(console, f"To update the page of the run: learner report {folder}")


def error_text(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _write(folder: Path, console: Console, error: str | None) -> None:
    try:
        run = RunFolder.open(folder)
        if not run.metrics():
            return
        out = write_report(run, error=error)
    except Exception as problem:  # noqa: BLE001  # a report must not end a run
        line = f"Warning: no report.html: {error_text(problem)}; try learner report {folder}"
    else:
        line = f"Report: {out}"
    tell(console, line)
