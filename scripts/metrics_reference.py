"""Write docs/metrics.md from the declaration; with --check, fail when the file is out of date."""

import argparse
import sys
from pathlib import Path

from learner.metrics.declared import GROUPS, TRAINER, Metric

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

INTRO = """\
# The metrics of a run

*Written by `scripts/metrics_reference.py` from `learner/metrics/declared.py`; do not edit.*

Every optimizer step is one line of `metrics.jsonl` in the run folder and one point in TensorBoard,
and so is every evaluation. A number is of its own step alone: nothing is added up, averaged or
carried over between logged steps. Both trainer variants log the same keys;
`stage2_rollout_aligned` runs channel B alone.

With several processes a line is of all of them. How their parts meet follows from the kind:

| kind | over processes |
| --- | --- |
| counter | sum |
| loss | sum; a pack counts by its share of the step's samples |
| seconds, flag, peak | maximum |
| rate | sum of the numerators / sum of the denominators; 0 where both are 0 |
| whole | none: process 0 computes it of all answers together |

Two all-reduces a step do that, of vectors in the order of this page; no step gathers anything, and
no rate is a mean of rates. The losses of a step add up to `loss`.

A key that a step cannot have is not in its line; there is no 0 in its place. A key without a
condition is in the line of every step of its channel, 0 too: all reasons of `strict_drop`, for one.
Losses and coordinate distributions need something to be trained on.

- Nothing here is an overlap of boxes or masks: in training these serve matching alone.
  `bbox_ciou` is a declared loss.
- No object is ever left out because its coordinates could not be found among the tokens: each is
  one token of the vocabulary, known by its id. What merely reads like one is `non_coord_token`.
"""


class Row(tuple[str, str, str, str, str]):
    """key, kind, unit, meaning, when it is logged."""

    def __str__(self) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in self)} |"


def page() -> str:
    """The whole of docs/metrics.md."""
    parts = [INTRO]
    for group in GROUPS:
        rows = [Row((f"`{m.key}`", m.kind, m.unit, m.meaning, _logged(m))) for m in group.metrics]
        parts.append(f"## {group.title}\n\n{_table(rows)}")
    parts[-1] += (
        "\nWhat the rollouts of an evaluation took is logged with it: the keys of *Servers and "
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
