"""Terminal output of the data commands: tables, findings and accounts."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from learner.data.files import DataProblem
from learner.data.jsonl import DataFile
from learner.data.records import Account, Rule
from shared_contracts.cli import describe, printable

# Table width in characters if stdout is not a terminal.
_PIPE_WIDTH = 160


@dataclass(frozen=True)
class Table:
    """A table for a terminal or an HTML page.

    columns: headings; the prefix `#` marks a column of numbers. sortable: on a page, a click on a
    heading sorts by its column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    sortable: bool = False


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables with titles, separated by blank lines.

    Text is neither rich markup nor terminal control. A pipe gets lines of up to `_PIPE_WIDTH`.
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
    """Return text without rich markup and terminal control characters."""
    return Text(printable(value, lines=True))


def format_problem(problem: DataProblem) -> str:
    """Return the three parts of a problem as text, labelled error or warning."""
    text = describe(problem)
    return text.replace("error:", "warning:", 1) if problem.warning else text


def check_tables(reports: Sequence[DataFile]) -> Iterator[Table]:
    columns = ("file", "#samples", "#objects", "#problems", "#warnings")
    rows = []
    for each in reports:
        warnings = sum(finding.warning for finding in each.findings)
        numbers = (len(each.samples), each.objects, len(each.findings) - warnings, warnings)
        rows.append([str(each.path), *map(str, numbers)])
    yield Table("", columns, rows)
    counts = Counter((f.warning, f.kind) for report in reports for f in report.findings)
    # Problems before warnings, the most frequent first.
    ranked = sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    names = ("problem", "warning")
    rows = [[str(count), names[warning], kind] for (warning, kind), count in ranked]
    if rows:
        yield Table("", ("#times", "", "found"), rows)


def show_account(account: Account, title: str = "") -> None:
    cells = [[str(count), what, became] for count, what, became in account.totals]
    cells += [
        [str(count), rule.what, rule.done, account.first[rule]]
        for rule in Rule
        if (count := account.counts[rule])
    ]
    title = ": ".join(filter(None, (title, account.evidence)))
    print_tables([Table(title, ("#count", "what", "became", "the first"), cells)])
