"""What a benchmark found, held against its goal, as rows of docs/evidence.md."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

HEADER = "| what | measured | spread | goal | | detail |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Result:
    """One measured figure.

    values: of each round; `measured` stands for them all.
    at_least: whether the goal is a lower bound.
    detail: what else a reader wants to know, such as both sides of a ratio.
    """

    name: str
    measured: float
    values: tuple[float, ...]
    goal: float
    at_least: bool
    unit: str = ""
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal

    @property
    def row(self) -> str:
        spread = f"{_figure(min(self.values))} .. {_figure(max(self.values))}"
        bound = ">=" if self.at_least else "<="
        cells = (
            self.name,
            f"{_figure(self.measured)}{self.unit}",
            spread if len(self.values) > 1 else "one run",
            f"{bound} {self.goal:g}{self.unit}",
            "met" if self.met else "missed",
            self.detail,
        )
        return f"| {' | '.join(cells)} |"


def median_of(
    name: str,
    values: Sequence[float],
    goal: float,
    at_least: bool,
    unit: str = "",
    detail: str = "",
) -> Result:
    return Result(name, statistics.median(values), tuple(values), goal, at_least, unit, detail)


def table(results: Sequence[Result]) -> str:
    return "\n".join([HEADER, *(result.row for result in results)])


def read_json(path: Path) -> list[Result]:
    """What `write_json` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    names = [field.name for field in fields(Result)]
    return [
        Result(**{name: row[name] for name in names} | {"values": tuple(row["values"])})
        for row in rows
    ]


def write_json(results: Sequence[Result], path: Path) -> None:
    rows = [asdict(result) | {"met": result.met} for result in results]
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    return (
        f"{value:.2f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 100
        else f"{value:.0f}"
    )
