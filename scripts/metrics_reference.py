"""Write docs/metrics.md from the declaration; with --check, fail when the file is out of date."""

import argparse
import sys
from pathlib import Path

from learner.runs.declared import GROUPS, TRAINER, Metric

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

INTRO = """\
# The metrics of a run

*Written by `scripts/metrics_reference.py` from `learner/runs/declared.py`; do not edit.*

Every optimizer step is one line of `metrics.jsonl` in the run folder and one point in TensorBoard.
So is every evaluation. A number is about its own step only: nothing is added up, averaged or
carried over between logged steps. Both trainer variants log the same keys; `stage2_rollout_aligned`
runs [channel B](method.md#glossary) alone.

With several processes a line is about all of them. The kind of a metric says how their parts are
combined:

| kind | over processes |
| --- | --- |
| counter | sum |
| loss | sum; a pack is weighted by its fraction of the step's samples |
| seconds, flag, peak | maximum |
| rate | sum of the numerators / sum of the denominators; 0 if both are 0 |
| whole | none: process 0 computes it from all answers together |

Two all-reduces per step combine the numbers, in the order of this page. Nothing is gathered, and no
rate is a mean of rates. The losses of a step add up to `loss`.

A key that does not apply to a step is not in its line; it is not logged as 0. A key without a
condition is in the line of every step of its channel, also when it is 0: for example all reasons of
`strict_drop`. Losses and coordinate distributions need something to train on.

- No metric here is an overlap of boxes or masks, because training uses overlaps only for matching.
  `bbox_ciou` is a loss that the config declares.
- No object is left out because its coordinates were not found among the tokens: each coordinate is
  one token of the vocabulary, known by its id. Text that only looks like one counts as
  `non_coord_token`.
"""


class Row(tuple[str, str, str, str, str]):
    """key, kind, unit, meaning, when it is logged."""

    def __str__(self) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in self)} |"


def page() -> str:
    """The whole of docs/metrics.md."""
    parts = [INTRO]
    for title, metrics in GROUPS.items():
        rows = [Row((f"`{m.key}`", m.kind, m.unit, m.meaning, _logged(m))) for m in metrics]
        parts.append(f"## {title}\n\n{_table(rows)}")
    parts[-1] += (
        "\nThe calls and pushes of an evaluation are logged with it: the keys of *Servers and "
        "pushes*\nwith `eval/` in front.\n"
    )
    parts.append(f"## Of the Trainer itself\n\n{_trainer()}")
    return "\n".join(parts)


def _logged(metric: Metric) -> str:
    steps = {("A", "B"): "every step", ("A",): "A", ("B",): "B", (): "every evaluation"}
    return "; ".join(filter(None, [steps[metric.channels], metric.when]))


def _table(rows: list[Row]) -> str:
    head = [
        "| key | kind | unit | meaning | logged in steps of |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *map(str, rows)]) + "\n"


def _trainer() -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in TRAINER.items()]
    return "\n".join(["| key | meaning |", "| --- | --- |", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE} is out of date: run scripts/metrics_reference.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
