"""The command line of a benchmark of several parts.

python -m benchmarks.NAME [--only PART ...] [--rounds N] [--out FILE.json]
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks.results import Result, table, write_json

Bench = TypeVar("Bench")
Parts = Mapping[str, Callable[[Bench], list[Result]]]


def run(
    name: str,
    description: str,
    parts: Parts[Bench],
    make_bench: Callable[[Path, int, ExitStack], Bench],
    rounds: int,
    errors: tuple[type[Exception], ...],
    parents: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Run the parts that were asked for, in order, and print the table of docs/benchmarks.md.

    make_bench: from a new folder, the rounds, and where what has been started is ended.
    rounds: of each part unless told otherwise.
    errors: what ends the run with a message; the results until then are printed.
    parents: with more options.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
    )
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="write the results as JSON, too")
    options = parser.parse_args()
    # Either signal, also where the shell ignores Ctrl-C for us, ends what has been started.
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
    parts: list[Callable[[Bench], list[Result]]],
    make_bench: Callable[[Path, int, ExitStack], Bench],
    rounds: int,
) -> Iterator[Result]:
    """The results of the parts, each as soon as it is there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = make_bench(folder, rounds, stack)
        for part in parts:
            yield from part(bench)
