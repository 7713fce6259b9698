"""What commands print: tables that stay whole in a pipe, bars only on a terminal."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import table as rich_table
from rich.console import Console
from rich.progress import track
from rich.text import Text

from learner.data.images import Looks
from learner.data.jsonl import DataProblem
from learner.data.records import Account, Rule
from learner.runs.console import tell
from shared_contracts.cli import describe, printable

if TYPE_CHECKING:  # they load numpy
    from learner.data.check import FileReport
    from learner.data.conversion import Conversion

# Columns of a table that no terminal bounds.
_PIPE_WIDTH = 160
# Seconds between two lines of progress.
_EVERY_S = 10.0


@dataclass(frozen=True)
class Table:
    """A table for a terminal or a page.

    columns: headings; one that begins with `#` holds numbers. sortable: on a page, the heading of
    a column sorts by it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    sortable: bool = False


def watch(looks: Looks, count: int) -> Looks:
    """Show on standard error how far it is: a bar on a terminal, else a line every 10 s."""
    shown = Console(stderr=True)
    if shown.is_terminal:
        yield from track(looks, "Images", total=count, console=shown, transient=True)
        return
    last = time.monotonic()
    for done, look in enumerate(looks, start=1):
        if time.monotonic() - last >= _EVERY_S:
            tell(shown, f"Looked at {done} of {count} images")
            last = time.monotonic()
        yield look


def print_tables(tables: Iterable[Table]) -> None:
    """Tables under their titles, a blank line between them. No text is markup, or steers the
    terminal; in a pipe lines are not broken at 80 columns.
    """
    shown = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for number, table in enumerate(tables):
        if number:
            shown.print()
        if table.title:
            shown.print(Text(printable(table.title), style="bold"))
        has_head = any(column.strip("#") for column in table.columns)
        drawn = rich_table.Table(box=None, pad_edge=False, show_header=has_head)
        for column in table.columns:
            is_number = column.startswith("#")
            drawn.add_column(
                column.removeprefix("#"),
                justify="right" if is_number else "left",
                no_wrap=is_number,
                overflow="fold",
            )
        for row in table.rows:
            drawn.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
        shown.print(drawn)


def plain(value: str) -> Text:
    """Text of the data, in which nothing is markup and nothing steers the terminal."""
    return Text(printable(value, lines=True))


def format_problem(problem: DataProblem) -> str:
    """The text of a problem, in three parts as every error."""
    text = describe(problem)
    return text.replace("error:", "warning:", 1) if problem.warning else text


def kinds(reports: Sequence["FileReport"]) -> list[tuple[str, bool, int]]:
    """(kind, warning, how many), problems first, the most frequent first."""
    counts = Counter((f.kind, f.warning) for report in reports for f in report.findings)
    rows = [(kind, warning, count) for (kind, warning), count in counts.items()]
    return sorted(rows, key=lambda row: (row[1], -row[2], row[0]))


def check_tables(reports: Sequence["FileReport"]) -> Iterator[Table]:
    """Files with their counts and, unless all is well, the kinds of findings."""
    columns = ("file", "#samples", "#objects", "#problems", "#warnings")
    files = []
    for each in reports:
        findings = (each.count(warnings=False), each.count(warnings=True))
        files.append([str(each.path), *map(str, (each.samples, each.objects, *findings))])
    yield Table("", columns, files)
    if found := kinds(reports):
        names = ("problem", "warning")
        rows = [[str(count), names[warning], kind] for kind, warning, count in found]
        yield Table("", ("#times", "", "found"), rows)


def show_conversion(conversion: "Conversion", title: str = "") -> None:
    """What became of every image and annotation, under how the numbers of boxes were read."""
    lines, objects = f"{len(conversion.records)} lines", f"{conversion.objects} objects"
    rows = (conversion.images, "images", lines), (conversion.annotations, "annotations", objects)
    show_account(conversion.account, rows, ": ".join(filter(None, (title, conversion.evidence))))


def show_account(account: Account, rows: Sequence[tuple[int, str, str]], title: str = "") -> None:
    """What was changed or left out, below rows of a count, a thing, and what it became."""
    cells = [[str(count), what, became] for count, what, became in rows]
    cells += [
        [str(count), rule.what, rule.done, account.first[rule]]
        for rule in Rule
        if (count := account.counts[rule])
    ]
    print_tables([Table(title, ("#count", "what", "became", "the first"), cells)])
