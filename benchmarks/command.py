"""The command line of a benchmark of several parts.

python -m benchmarks.NAME [--only PART ...] [--rounds N] [--out FILE.json]
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Result, table, write_json


@dataclass
class Bench:
    """What each part gets: a new folder, the rounds, and the stack that ends what it starts."""

    folder: Path
    rounds: int
    stack: ExitStack


def run(
    name: str,
    description: str | None,
    parts: Mapping[str, Callable[[Any], list[Result]]],
    rounds: int,
    errors: tuple[type[Exception], ...],
    make_bench: Callable[[Path, int, ExitStack], Bench] = Bench,
) -> None:
    """Run the parts of `--only`, in order, and print the table of docs/evidence.md.

    rounds: the default of `--rounds`.
    errors: end the run with their message; the results until then are printed.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="write the results as JSON, too")
    options = parser.parse_args()
    # Either signal, also where the shell ignores Ctrl-C, ends what has been started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results: list[Result] = []
    failure = None
    try:
        results.extend(_measure([parts[part] for part in options.only], make_bench, options.rounds))
    except errors as error:
        failure = f"error: {error}"
    except KeyboardInterrupt:
        failure = "stopped"
    finally:
        print(f"\n`python -m benchmarks.{name} {' '.join(sys.argv[1:])}`:\n\n{table(results)}")
        if options.out:
            write_json(results, options.out)
    sys.exit(failure)


def _measure(
    parts: list[Callable[[Any], list[Result]]],
    make_bench: Callable[[Path, int, ExitStack], Bench],
    rounds: int,
) -> Iterator[Result]:
    """The results of the parts, each as soon as it is there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = make_bench(folder, rounds, stack)
        for part in parts:
            yield from part(bench)
