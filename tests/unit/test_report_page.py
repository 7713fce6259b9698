"""The page is one file, asks for nothing, and nothing an answer says can do anything in it."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.analysis.report import write_gallery, write_report
from learner.analysis.report.page import inert_json
from learner.analysis.report.run_page import plotly, renew, reported
from learner.commands.look import report as report_command
from learner.runs.run_folder import RunFolder
from shared_contracts.errors import ContractError, RunError
from tests.unit.report_folder import B, MadeRun, answer, call_line, draw_image, step_line

ROOT = Path(__file__).parents[2]
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \'"'


class Page(HTMLParser):
    """What a browser would see of a page, without running it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.data: dict[str, Any] = {}
        self.text = ""
        self._script = ""
        self._inside = ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self._script += data
        elif self._inside != "style":
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
        if tag != "script":
            return
        attributes = self.tags[-1][1]
        if attributes.get("type") == "application/json":
            self.data[attributes["id"] or ""] = json.loads(self._script)
        else:
            self.scripts.append(self._script)
        self._script = ""

    @property
    def policy(self) -> str:
        return next(
            attributes["content"] or ""
            for tag, attributes in self.tags
            if tag == "meta" and "http-equiv" in attributes
        )


def made(path: Path) -> MadeRun:
    """Both channels, a server, answers, an evaluation, an end."""
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 21)]
    lines.append({"step": 20, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    lines.append({"step": 20, "train_runtime": 60.0})
    answers = [answer(f"train.jsonl:{step}", step) for step in range(1, 20, 2)]
    return MadeRun(path, lines, [call_line(step) for step in range(1, 20, 2)], answers)


def report(run: MadeRun) -> Page:
    return Page(write_report(run.write()))


@pytest.mark.req("REPORT-01", "MET-03")
def test_a_report_is_one_file_in_the_run_folder_that_names_nothing_outside(tmp_path: Path) -> None:
    page = report(made(tmp_path))
    assert (tmp_path / "report.html").is_file()
    assert not list(tmp_path.glob("*.part"))
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:")), f"<{tag} {name}={target}>"
    assert page.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "@import" not in (tmp_path / "report.html").read_text().partition("</style>")[0]
    assert page.data["charts-data"].keys() >= {"loss", "steps", "push-1", "tokens", "scores"}
    assert len(page.data["gallery-data"]["cards"]) == 10
    assert "Finished: 20 steps in 1m00s." in page.text


@pytest.mark.req("REPORT-01")
def test_the_policy_allows_the_scripts_of_the_page_and_no_other(tmp_path: Path) -> None:
    page = report(made(tmp_path))
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in page.scripts
    }
    allowed = re.search(r"script-src ([^;]*);", page.policy)
    assert allowed is not None
    assert set(allowed[1].split()) == digests
    assert plotly() in page.scripts


@pytest.mark.req("REPORT-01")
def test_what_an_answer_says_is_text(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.answers = [
        answer(
            f"日本/{EVIL[:60]}.jsonl:1".replace("/", "_"),
            truths=[(EVIL, (1, 2, 3, 4)), ("ловушка", (5, 6, 7, 8))],
            predicted=[(EVIL, (1, 2, 3, 4))],
            dropped=[(EVIL, "key_invalid")],
            text=EVIL,
        )
    ]
    run.facts = {"rollouts": EVIL, "rollout_backend": EVIL, "versions": {EVIL: EVIL}}
    run.sections = {"training": {"run_name": EVIL}}
    plain, page = report(made(tmp_path / "plain")), report(run)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == [tag for tag, _ in plain.tags].count("script")
    assert "img" not in tags
    (card,) = page.data["gallery-data"]["cards"]
    assert card["text"] == EVIL
    assert card["dropped"] == [[EVIL, "key_invalid"]]
    assert [item["desc"] for item in card["objects"]] == [EVIL, EVIL, "ловушка"]
    assert re.fullmatch(r"[\w.-]+", card["slug"])
    assert EVIL in page.text


def test_json_in_a_script_can_neither_end_it_nor_begin_a_comment() -> None:
    shown = inert_json({"a": "</script><!--<script>\u2028\u2029&"})
    assert not set("<>&\u2028\u2029") & set(shown)
    assert json.loads(shown) == {"a": "</script><!--<script>\u2028\u2029&"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        inert_json(float("nan"))


def channel_a_only(path: Path) -> MadeRun:
    only = {"stage2_ab": {"schedule": {"b_ratio": 0.0}}}
    return MadeRun(path, [step_line(step, "A") for step in range(1, 6)], sections=only)


def nothing_yet(path: Path) -> MadeRun:
    return MadeRun(path)


def answers_not_logged(path: Path) -> MadeRun:
    run = made(path)
    run.answers = []
    return run


def hf_backend(path: Path) -> MadeRun:
    calls = [call_line(2, "the learner", pushes=[]), call_line(4, "the learner", pushes=[])]
    return MadeRun(path, [step_line(2)], calls, [answer()], {"rollout_backend": "hf"})


def several_processes(path: Path) -> MadeRun:
    run = made(path)
    run.answers += [answer("train.jsonl:99", 2, rank=rank) for rank in (1, 2)]
    return run


def no_numbers(path: Path) -> MadeRun:
    lines = [step_line(step, loss=None, grad_norm=None) for step in range(1, 60)]
    lines += [{"step": 59, "eval/f1": None, "eval/precision": None}]
    return MadeRun(path, [line | {f"{B}/match_rate": None} for line in lines])


def not_finished(path: Path) -> MadeRun:
    run = made(path)
    run.metrics = run.metrics[:7]
    run.sections = {"training": {"max_steps": 20}}
    return run


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (channel_a_only, "No step asked for answers yet."),
        (nothing_yet, "No step is logged yet."),
        (answers_not_logged, "No answers are logged"),
        (hf_backend, "No weights were pushed to a server."),
        (several_processes, "Look at this first"),
        (no_numbers, "The loss was not a finite number in 59 steps (first: step 1)"),
        (not_finished, "Not finished: step 7 of 20."),
    ],
)
def test_every_kind_of_run_has_a_report(make: Any, told: str, tmp_path: Path) -> None:
    page = report(make(tmp_path))
    assert told in page.text
    assert set(page.data) == {"charts-data", "gallery-data"}


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = not_finished(tmp_path).write()
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 8, "lo')
    assert "Not finished: step 7" in Page(write_report(folder)).text


@pytest.mark.req("REPORT-01")
def test_a_run_of_thousands_of_steps_has_a_page_of_some_megabytes(tmp_path: Path) -> None:
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 6001)]
    calls = [call_line(step) for step in range(1, 6000, 2)]
    out = write_report(MadeRun(tmp_path, lines, calls).write())
    assert out.stat().st_size < 12e6
    page = Page(out)
    assert "the lowest and the highest value of each stretch are drawn" in page.text
    assert "Each bar is the mean of 15 steps." in page.text
    assert "Each bar is the mean of 8 pushes." in page.text


@pytest.mark.req("EVAL-01")
def test_an_evaluation_has_a_gallery_of_its_own(tmp_path: Path) -> None:
    image = draw_image(tmp_path / "a.png", (64, 64), (0, 0, 500, 500))
    answers = [answer(f"val.jsonl:{place}", image=image) for place in range(249)]
    answers.append(answer("val.jsonl:249", predicted=[], pairs=[], image=image, text="\u2028"))
    out = tmp_path / "gallery.html"
    write_gallery(answers, out, f"Evaluation {EVIL}", {"F1": "0.5", "data": EVIL})
    page = Page(out)
    assert len(page.data["gallery-data"]["cards"]) == 200
    assert len(page.data["gallery-data"]["pictures"]) == 1
    assert "200 of 250 answers" in page.text
    assert page.data["gallery-data"]["cards"][0]["text"] == "\u2028"
    assert "img" not in [tag for tag, _ in page.tags]
    assert out.stat().st_size < 500_000
    write_gallery([], out, "Nothing", {})
    assert "No answers are logged." in Page(out).text


def told_by(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`learner report` in a process of its own; the last line is the heavy packages it loaded."""
    program = f"""
import sys
sys.argv = ["learner", "report", *{list(arguments)!r}]
from learner.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.req("REPORT-01")
def test_the_command_writes_the_page_and_needs_no_torch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made(run).write()
    done = told_by(str(run))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Report: {re.escape(str(run))}/report.html \(\d\.\d MB\)", done.stdout)
    assert done.stdout.splitlines()[-1] == "[]"
    assert told_by(str(run), "--out", str(tmp_path / "new" / "other.html")).returncode == 0
    assert (tmp_path / "new" / "other.html").is_file()


@pytest.mark.parametrize(
    ("run", "out", "found"),
    [
        ("no-such-run", None, "it has no run.json"),
        ("run", "page.txt", "page.txt does not end in .html"),
        ("run", "run/run.json/page.html", "cannot be made"),
    ],
)
def test_bad_input_is_refused(run: str, out: str | None, found: str, tmp_path: Path) -> None:
    made(tmp_path / "run").write()
    with pytest.raises(ContractError, match=re.escape(found)):
        report_command(tmp_path / run, tmp_path / out if out else None)
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.req("MET-03")
def test_a_run_writes_its_report_when_it_ends(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    made(tmp_path).write()
    with reported(tmp_path, console):
        assert not (tmp_path / "report.html").exists()
    assert "Finished" in Page(tmp_path / "report.html").text
    assert f"Report: {tmp_path / 'report.html'}" in console.export_text()


@pytest.mark.req("MET-03")
def test_a_run_that_fails_has_a_report_and_its_own_error(tmp_path: Path) -> None:
    not_finished(tmp_path).write()
    with (
        pytest.raises(RunError, match="no server is left"),
        reported(tmp_path, Console(quiet=True)),
    ):
        raise RunError("no server is left\nand more")
    text = Page(tmp_path / "report.html").text
    assert "Ended by an error at step 7 of 20." in text
    assert "The run was ended by an error: no server is left" in text
    assert "and more" not in text


@pytest.mark.req("REPORT-01")
def test_a_new_evaluation_is_on_the_page_of_a_finished_run_alone(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    made(tmp_path / "done").write()
    renew(tmp_path / "done", console)
    assert "Finished" in Page(tmp_path / "done" / "report.html").text
    not_finished(tmp_path / "going").write()
    renew(tmp_path / "going", console)
    assert not (tmp_path / "going" / "report.html").exists()
    assert console.export_text().splitlines() == [
        f"Report: {tmp_path}/done/report.html",
        f"The page of the run has it after: learner report {tmp_path}/going",
    ]


def test_nothing_is_written_of_a_run_that_never_made_a_step(tmp_path: Path) -> None:
    console = Console(record=True)
    nothing_yet(tmp_path).write()
    with pytest.raises(ValueError, match="early"), reported(tmp_path, console):
        raise ValueError("early")
    assert not (tmp_path / "report.html").exists()
    assert console.export_text() == ""


@pytest.mark.parametrize("error", [None, RunError("no server is left")])
def test_a_report_that_fails_is_told_in_a_line_and_fails_no_run(
    error: RunError | None, tmp_path: Path
) -> None:
    console = Console(record=True, width=500)
    not_finished(tmp_path).write()
    (tmp_path / "rollouts" / "step_000002.jsonl").write_text('{"step": 2}\n')
    ends = pytest.raises(RunError, match="no server is left") if error else nullcontext()
    with ends, reported(tmp_path, console):
        if error is not None:
            raise error
    (line,) = console.export_text().splitlines()
    assert line.startswith("Warning: no report.html: ")
    assert "is no logged answer" in line
    assert line.endswith(f"try learner report {tmp_path}")


def test_a_report_is_written_again_over_the_last(tmp_path: Path) -> None:
    folder = RunFolder.open(not_finished(tmp_path).write().path)
    write_report(folder)
    made(tmp_path).write()
    assert "Finished" in Page(write_report(folder)).text
