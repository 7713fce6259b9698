"""The pure stages of the learner against their peers, in one run.

    .venv/bin/python -m benchmarks.data_plane [--only NAME ...] [--rounds N] [--out FILE.json]

Each part's module says what it compares. Nothing is started: one process, one core.
Prints the table of docs/benchmarks.md.
"""

from contextlib import ExitStack
from pathlib import Path

from benchmarks.command import run
from benchmarks.data_plane_parts import (
    configs,
    conversions,
    formats,
    matching,
    packing,
    parser,
    stages,
)
from shared_contracts.errors import ContractError

PARTS = {
    "parser": parser.measure,
    "formats": formats.measure,
    "matching": matching.measure,
    "stages": stages.measure,
    "packing": packing.measure,
    "configs": configs.measure,
    "conversions": conversions.measure,
}


def _rounds(_: Path, rounds: int, __: ExitStack) -> int:
    return rounds


if __name__ == "__main__":
    run("data_plane", __doc__, PARTS, _rounds, rounds=7, errors=(ContractError,))
