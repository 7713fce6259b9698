"""The page of a run: of every kind of run, in which the text of answers is inert."""

import html
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from learner.analysis.report.run_page import renew, reported, write_report
from learner.commands.run import report as report_command
from shared_contracts.errors import ContractError, RunError
from tests.unit.report_folder import MadeRun, answer, step_line
from tests.unit.test_learner_cli import command

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \'"'


def made(path: Path) -> MadeRun:
    """Both channels, answers, an evaluation, an end."""
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 21)]
    lines.append({"step": 20, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    lines.append({"step": 20, "train_runtime": 60.0})
    answers = [answer(f"train.jsonl:{step}", step) for step in range(1, 20, 2)]
    return MadeRun(path, lines, answers=answers)


def report(run: MadeRun) -> str:
    return write_report(run.write()).read_text(encoding="utf-8")


@pytest.mark.req("REPORT-01")
def test_text_of_answers_is_never_markup(tmp_path: Path) -> None:
    """tests/integration/test_report_page.py has a browser look at such a page."""
    run = made(tmp_path)
    run.answers = [
        answer(
            f"日本_{EVIL[:60]}.jsonl:1".replace("/", "_"),
            truths=[(EVIL, (1, 2, 3, 4)), ("ловушка", (5, 6, 7, 8))],
            predicted=[(EVIL, (1, 2, 3, 4))],
            dropped=[(EVIL, "key_invalid")],
            text=EVIL,
        )
    ]
    run.facts = {"rollouts": EVIL, "versions": {EVIL: EVIL}}
    run.sections = {"training": {"run_name": EVIL}}
    plain, page = report(made(tmp_path / "plain")), report(run)
    assert page.count("<script") == plain.count("<script")
    assert page.count("<img") == plain.count("<img")
    assert EVIL in html.unescape(page)
    assert "content=\"default-src 'none'; script-src 'sha256-" in html.unescape(page)


B_RATIO_0 = {"stage2_ab": {"schedule": {"b_ratio": 0.0}}}


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            MadeRun(Path(), [step_line(1, "A")], sections=B_RATIO_0),
            "No answers are logged",
        ),
        (MadeRun(Path()), "No step is logged yet."),
        (MadeRun(Path()), "resolved_config.yaml --checkpoint CHECKPOINT --data FILE"),
        (replace(made(Path()), answers=[]), "No answers are logged"),
        (MadeRun(Path(), [step_line(1), step_line(2)]), "Not finished: step 2 of 3. The last line"),
        (made(Path()), "Finished: 20 steps in 1m00s."),
    ],
    ids=["channel A", "nothing", "no evaluation", "no answers", "going on", "over"],
)
def test_every_kind_of_run_has_a_report(run: MadeRun, text: str, tmp_path: Path) -> None:
    assert text in report(replace(run, path=tmp_path))


@pytest.mark.req("REPORT-01")
def test_command_writes_the_page_without_importing_torch(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "new" / "other.html"
    made(run).write()
    done = command("learner.cli", "report", str(run), "--out", str(out))
    assert done.code == 0, done.stderr
    assert not done.heavy & {"torch", "transformers", "vllm"}
    assert out.is_file()


@pytest.mark.parametrize(
    ("run", "out", "found"),
    [
        ("no-such-run", None, "it has no run.json"),
        ("run", "run/run.json/page.html", "cannot be made"),
    ],
)
def test_bad_input_is_refused(run: str, out: str | None, found: str, tmp_path: Path) -> None:
    made(tmp_path / "run").write()
    with pytest.raises(ContractError, match=re.escape(found)):
        report_command(tmp_path / run, tmp_path / out if out else None)
    assert not list(tmp_path.rglob("*.html"))


def going_on(path: Path) -> Path:
    run = made(path)
    run.metrics = run.metrics[:7]
    run.sections = {"training": {"max_steps": 20}}
    return run.write().path


@pytest.mark.req("MET-03")
def test_failed_run_has_a_report_and_raises_its_own_error(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    renew(going_on(tmp_path), console)
    assert not (tmp_path / "report.html").exists(), "only the page of a finished run is renewed"
    assert f"run: learner report {tmp_path}" in console.export_text()
    with pytest.raises(RunError, match="no server is left"), reported(tmp_path, console):
        raise RunError("no server is left\nand more")
    assert not list(tmp_path.glob("*.part"))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Ended by an error at step 7 of 20." in text
    assert "The run was ended by an error: no server is left" in text
    assert "and more" not in text


@pytest.mark.parametrize("error", [None, RunError("no server is left")])
def test_report_that_fails_warns_and_does_not_fail_the_run(
    error: RunError | None, tmp_path: Path
) -> None:
    console = Console(record=True, width=500)
    (going_on(tmp_path) / "rollouts" / "step_000002.jsonl").write_text('{"step": 2}\n')
    ends = pytest.raises(RunError, match="no server is left") if error else nullcontext()
    with ends, reported(tmp_path, console):
        if error is not None:
            raise error
    (line,) = console.export_text().splitlines()
    assert line.startswith("Warning: no report.html: ")
    assert line.endswith(f"try learner report {tmp_path}")
