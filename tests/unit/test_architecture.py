"""The drawing in docs/architecture.md against the imports in the code."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("learner", "rollout_server", "shared_contracts")


def drawn_arrows() -> Iterator[tuple[str, str, str]]:
    """(package, from, to) of every thin arrow; package is "" outside the subgraphs."""
    drawing = DOCUMENT.read_text().split("```mermaid")[1].split("```")[0]
    package = ""
    for raw in drawing.splitlines():
        line = re.sub(r"\[.*?\]", "", raw.strip()).replace("server_cli", "cli")
        if line.startswith("subgraph"):
            package = line.split()[1]
        elif line == "end":
            package = ""
        elif "-->" in line:
            names = [name.strip() for name in line.split("-->")]
            yield from ((package, a, b) for a, b in pairwise(names))


def package_of(room: str) -> str:
    return next(
        p for p in PACKAGES if (ROOT / p / room).is_dir() or (ROOT / p / f"{room}.py").is_file()
    )


def files_of(package: str, room: str) -> list[Path]:
    folder = ROOT / package / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imported_by(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }


@pytest.mark.req("ARCH-01")
def test_every_drawn_arrow_is_an_import() -> None:
    arrows = list(drawn_arrows())
    assert len(arrows) > 30
    for package, source, target in arrows:
        home = package or package_of(source)
        wanted = target if target in PACKAGES else f"{home}.{target}"
        imported = set().union(*(imported_by(file) for file in files_of(home, source)))
        assert any(m == wanted or m.startswith(f"{wanted}.") for m in imported), (source, target)


def test_every_room_of_the_learner_is_in_the_text() -> None:
    text = DOCUMENT.read_text()
    for path in (ROOT / "learner").iterdir():
        if path.name.startswith("_"):
            continue
        assert re.search(rf"\b{path.stem}\b", text), path.name
