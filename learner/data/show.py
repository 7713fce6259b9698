"""What `learner data` prints: tables that stay whole in a pipe, bars only on a terminal."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table
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


def _console() -> Console:
    """Of standard output; in a pipe it does not break lines at 80 columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def watch(looks: Looks, count: int, every_s: float = 10.0) -> Looks:
    """Show on standard error how far it is: a bar on a terminal, else a line every `every_s`."""
    shown = Console(stderr=True)
    if shown.is_terminal:
        return track(looks, "Images", total=count, console=shown, transient=True)
    return _print_progress(looks, count, shown, every_s)


def _print_progress(looks: Looks, count: int, shown: Console, every_s: float) -> Looks:
    last = time.monotonic()
    for done, look in enumerate(looks, start=1):
        if time.monotonic() - last >= every_s:
            tell(shown, f"Looked at {done} of {count} images")
            last = time.monotonic()
        yield look


def new_table(*columns: str) -> Table:
    """A plain table; columns that begin with `#` hold numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        number = column.startswith("#")
        table.add_column(
            column.removeprefix("#"),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
        )
    return table


def print_tables(tables: Iterable[tuple[str, Table]]) -> None:
    """Tables under their titles, a blank line between them."""
    shown = _console()
    for number, (title, table) in enumerate(tables):
        if number:
            shown.print()
        if title:
            shown.print(Text(printable(title), style="bold"))
        shown.print(table)


def plain(value: object) -> Text:
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


def check_tables(reports: Sequence["FileReport"]) -> Iterator[tuple[str, Table]]:
    """Files with their counts and, unless all is well, the kinds of findings."""
    files = new_table("file", "#samples", "#objects", "#problems", "#warnings")
    for report in reports:
        files.add_row(
            plain(report.path),
            *(str(n) for n in (report.samples, report.objects)),
            *(str(report.count(warnings=warnings)) for warnings in (False, True)),
        )
    yield "", files
    if found := kinds(reports):
        table = new_table("#times", "", "found")
        for kind, warning, count in found:
            table.add_row(str(count), "warning" if warning else "problem", kind)
        yield "", table


def show_conversion(conversion: "Conversion", title: str = "") -> None:
    """What became of every image and annotation, under how the numbers of boxes were read."""
    lines, objects = f"{len(conversion.records)} lines", f"{conversion.objects} objects"
    rows = (conversion.images, "images", lines), (conversion.annotations, "annotations", objects)
    show_account(conversion.account, rows, ": ".join(filter(None, (title, conversion.evidence))))


def show_account(account: Account, rows: Sequence[tuple[int, str, str]], title: str = "") -> None:
    """What was changed or left out, below rows of a count, a thing, and what it became."""
    table = new_table("#count", "what", "became", "the first")
    for count, what, became in rows:
        table.add_row(str(count), what, became)
    for rule in Rule:
        if count := account.counts[rule]:
            table.add_row(str(count), rule.what, rule.done, plain(account.first[rule]))
    print_tables([(title, table)])
