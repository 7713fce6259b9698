"""What the objectives cost, against the model's own forward and backward, in one run.

    .venv/bin/python -m benchmarks.losses [--only NAME ...] [--rounds N] [--out FILE.json]

    toy    a step of 32 scenes on the toy model, both channels
    wide   4,096 tokens with 400 coordinate slots, a vocabulary of 152,704

Nothing is started: one process, all cores. `wide` needs 12 GiB, and two minutes a round.
Prints the table of docs/benchmarks.md.
"""

from contextlib import ExitStack
from pathlib import Path

from benchmarks.command import run
from benchmarks.loss_parts import toy, wide
from benchmarks.loss_parts.measuring import Bench
from shared_contracts.errors import ContractError


def _bench(folder: Path, rounds: int, _: ExitStack) -> Bench:
    return Bench(folder, rounds)


if __name__ == "__main__":
    parts = {"toy": toy.measure, "wide": wide.measure}
    run("losses", __doc__, parts, _bench, rounds=5, errors=(ContractError,))
