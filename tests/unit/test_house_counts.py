"""scripts/house: what it counts, on made-up checkouts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "house"

FOUR_LINES = "def f():\n    a = 1\n    b = 2\n    return a\n"
FIVE_LINES = "async def g():\n    a = 1\n\n    # blank lines and comments count\n    return a\n"
DECORATED = "class A:\n    @property\n    @other\n    def h(self):\n        return 1\n"
NESTED = "def outer():\n    a = 1\n\n    def inner():\n        return 1\n\n    return inner\n"

SOURCES = {
    "shared_contracts/__init__.py": "",
    "shared_contracts/errors.py": "x = 1\n",
    "rollout_server/cli.py": FOUR_LINES,
    "rollout_server/http/app.py": FIVE_LINES,
    "learner/types.py": DECORATED,
    "learner/parsing.py": '"""Names."""\n\nfrom learner.stages import f\n\n__all__ = ["f"]\n',
    "learner/stray.py": "x = 1\n",
    "learner/stages/parsing.py": NESTED,
    "learner/stages/formats/tokens.py": "\n\n",
    "learner/stages/notes.md": "not counted\n",
    "tests/unit/test_f.py": "x = 1\n" * 6,
    "scripts/tool.py": "not counted\n",
}


def made(root: Path) -> Path:
    for name, source in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def house(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def cells(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_is_counted(tmp_path: Path) -> None:
    rows = cells(house(made(tmp_path)).stdout)
    assert rows["lines of product code"] == ["30"]
    assert rows["files of product code"] == ["9"]
    assert rows["files per 1,000 lines"] == ["300.0"]
    # f, h and inner of f, g, h, outer and inner
    assert rows["functions of at most 4 lines"] == ["60 %"]
    assert rows["loose modules of rollout_server and learner"] == ["0 and 1"]
    assert rows["lines of tests"] == ["6"]
    assert rows["lines of tests for one of the product"] == ["0.20"]


def test_each_room_has_a_row(tmp_path: Path) -> None:
    rows = cells(house(made(tmp_path)).stdout)
    assert rows["learner"] == ["3", "11", "1", "100 %"]
    assert rows["learner/stages"] == ["2", "9", "2", "50 %"]
    assert rows["rollout_server/http"] == ["1", "5", "1", "0 %"]
    assert rows["shared_contracts"] == ["2", "1", "0", "0 %"]


def test_a_release_and_today_are_written_between_the_marks(tmp_path: Path) -> None:
    document = made(tmp_path) / "docs" / "architecture.md"
    document.parent.mkdir()
    document.write_text(
        "Before.\n<!-- scripts/house -->\nold\n<!-- end of scripts/house -->\nEnd.\n"
    )
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "learner" / "stray.py").unlink()

    assert house(tmp_path, "--write", "--release", commit).stderr == ""
    text = document.read_text()
    assert text.startswith("Before.\n<!-- scripts/house -->\n\n|  | 0.1.0 | now |\n")
    assert text.endswith("\n<!-- end of scripts/house -->\nEnd.\n")
    assert "old" not in text
    assert cells(text)["lines of product code"] == ["30", "29"]
    assert cells(text)["loose modules of rollout_server and learner"] == ["0 and 1", "0 and 0"]
    house(tmp_path, "--write", "--release", commit)
    assert document.read_text() == text


@pytest.mark.parametrize("text", ["no mark\n", "<!-- scripts/house -->\nno end\n"])
def test_a_document_without_marks_stays_as_it_is(tmp_path: Path, text: str) -> None:
    document = made(tmp_path) / "docs" / "architecture.md"
    document.parent.mkdir()
    document.write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "release")
    done = house(tmp_path, "--write", "--release", "HEAD")
    assert done.returncode == 1
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == [
        "error",
        "found",
        "do",
    ]
    assert document.read_text() == text


def test_a_checkout_without_the_release_is_an_error(tmp_path: Path) -> None:
    done = house(made(tmp_path), "--write")
    assert done.returncode == 1
    assert "found: no commit 20c49400179b" in done.stderr
    assert "do: Fetch the whole history" in done.stderr


def test_the_document_has_the_counts() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    today = house(ROOT).stdout.split("\n\n")[0]
    assert cells(text).keys() >= cells(today).keys() - {"now"}
