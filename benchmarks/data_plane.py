"""The pure stages of the learner against their peers, in one run.

    .venv/bin/python -m benchmarks.data_plane [--only NAME ...] [--rounds N] [--out FILE.json]

Each part's module says what it compares. Nothing is started: one process, one core.
Prints the table of docs/evidence.md.
"""

from benchmarks.command import run
from benchmarks.data_plane_parts import formats, matching, packing, parser, stages
from shared_contracts.errors import ContractError

PARTS = {
    "parser": parser.measure,
    "formats": formats.measure,
    "matching": matching.measure,
    "stages": stages.measure,
    "packing": packing.measure,
}

if __name__ == "__main__":
    run("data_plane", __doc__, PARTS, rounds=7, errors=(ContractError,))
