"""The scripts of the repository find the faults that they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


RIGHT = """# A page

[here](#a-page) [config](docs/config.md#keys) `docs/config.md:3` `docs/*.md` `training.max_steps: 4`
`learner train --config F`, `--config`, `make test ARGS=x`, `/docs/none.md`, `other.key`
"""
WRONG = """# A page

[gone](none.md) [here](#no-heading) `docs/none.md` `training.max_stepz: 4`
`learner trian F`, `--no-such-option`, `make tset`

```sh
docker run image \\
    rollout-server serve --modle M
```
"""


def test_doc_links_finds_each_name_that_does_not_exist(tmp_path: Path) -> None:
    files = {
        "docs/config.md": "# Keys\n\n`training.max_steps`\n",
        "Makefile": "ARGS ?=\ntest:\n",
        "page.md": RIGHT,
    }
    done = run("doc_links", write(tmp_path, files))
    assert (done.returncode, done.stdout) == (0, "2 documents name only what exists.\n")
    done = run("doc_links", write(tmp_path, {"page.md": WRONG}))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "page.md: none.md: no such file",
        "page.md: #no-heading: no such heading",
        "page.md: docs/none.md: no such file",
        "page.md: training.max_stepz: 4: no such key",
        "page.md: learner trian F: no command trian",
        "page.md: --no-such-option: no program has this option",
        "page.md: make tset: make has no tset",
        "page.md: docker run image      rollout-server serve --modle M: no option --modle",
    ]


RULES = "- `AB-01` First.\n- `AB-02` Second.\n"
SCENARIOS = "Geometry-first, 2 ways (000, 004)\nA second one (002)\nA third (001; RES-06)\n"


def req_table(root: Path, tests: str) -> subprocess.CompletedProcess[str]:
    tests = tests.replace("@req", "@pytest.mark.req").replace("@scen", "@pytest.mark.scenario")
    files = {"docs/requirements.md": RULES, "tests/scenarios.txt": SCENARIOS}
    return run("req_table", write(root, {**files, "tests/test_a.py": tests}))


def test_req_table_lists_tests_and_refuses_rules_and_scenarios_without_one(tmp_path: Path) -> None:
    tests = '@req("AB-01")\ndef test_one(): ...\ndef test_geometry_first_2_ways(): "AB-02"\n'
    done = req_table(tmp_path, tests)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "AB-01       tests/test_a.py::test_one",
        "",
        "1 of 2 rules have a test.",
        "Without a test: AB-02",
        "",
        "Geometry-first, 2 ways  tests/test_a.py::test_geometry_first_2_ways",
        "A third     settled by RES-06",
        "",
        "2 of 3 scenarios have a test.",
        "Without a test: A second one",
    ]


def test_req_table_refuses_unknown_marks(tmp_path: Path) -> None:
    for mark, fault in (
        ('@req("AB-03")', "test_b (line 1): unknown rule AB-03"),
        ('@scen("None")', "test_b (line 1): unknown scenario None"),
        ("@req(RULE)", "test_b (line 1): a mark without a literal"),
    ):
        done = req_table(tmp_path, f"{mark}\ndef test_b(): ...\n")
        assert done.returncode == 1
        assert fault in done.stderr


@pytest.mark.req("ARCH-01", "ARCH-02")
@pytest.mark.scenario(
    "Private rollout helper removal does not break Stage-2 imports",
    "Validation fails when a private rollout helper import is reintroduced",
)
def test_private_imports_finds_a_private_name_of_another_module(tmp_path: Path) -> None:
    own = "import os\nfrom learner.types import Sample as _Sample\nos._exit(0)\n_own = _Sample\n"
    foreign = "from learner import types\nfrom learner._hidden import x\ntypes._secret()\n"
    done = run("private_imports", SCRIPTS.parent)
    assert done.returncode == 0, done.stdout
    done = run("private_imports", write(tmp_path, {"learner/own.py": own}))
    assert done.returncode == 0, done.stdout
    done = run("private_imports", write(tmp_path, {"learner/foreign.py": foreign}))
    assert done.returncode == 1
    assert "private name types._secret is taken" in done.stdout
    assert "private name learner._hidden.x is taken" in done.stdout


def test_leaves_no_process_reports_and_ends_a_daemon() -> None:
    guarded = ("--grace", "0", "bash", "-c")
    done = run("leaves_no_process", *guarded, "echo out; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "")
    daemon = "setsid env -i bash -c 'sleep 297 & sleep 298; :' >/dev/null 2>&1 & disown"
    done = run("leaves_no_process", *guarded, daemon)
    assert done.returncode == 70
    left = [line for line in done.stderr.splitlines() if line.startswith("left behind")]
    assert left
    assert not any(Path("/proc", line.split()[2]).exists() for line in left)
