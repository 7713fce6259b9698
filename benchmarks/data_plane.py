"""The pure stages of the learner against their peers, and conversions of data, in one run.

    .venv/bin/python -m benchmarks.data_plane [--only NAME ...] [--rounds N] [--out FILE.json]

Each part's module says what it compares. Nothing is started: one process, one core.
Prints the table of docs/evidence.md.
"""

import time
from pathlib import Path
from typing import get_args

from PIL import Image

from benchmarks.command import Bench, run
from benchmarks.data_plane_parts import formats, matching, packing, parser, stages
from benchmarks.results import Result
from learner.data.conversion import convert, read_other, write_other, write_records
from learner.data.files import Format, write_lines
from shared_contracts.errors import ContractError

IMAGES, BOXES = 10_000, 10
WRITTEN = [form for form in get_args(Format) if form not in ("jsonl", "sharegpt", "qwen")]


def convert_there_and_back(bench: Bench) -> list[Result]:
    """One round; the slowest format counts. Images are copies of one PNG, on disk."""
    seconds: dict[str, list[float]] = {"to": [], "from": []}
    source = _data_file(bench.folder)
    for form in WRITTEN:
        other, back = bench.folder / form, bench.folder / f"{form}.jsonl"
        start = time.process_time()
        write_other(source, other, form, bench.folder, "bbox_2d")
        middle = time.process_time()
        conversion = convert(read_other(other, form), back)
        write_records(conversion, back)
        assert conversion.objects == IMAGES * BOXES, "every box comes back"
        seconds["to"].append(middle - start)
        seconds["from"].append(time.process_time() - middle)
    what = f"{IMAGES * BOXES:,} boxes of {IMAGES:,} images, data file"
    detail = f"the slowest of {', '.join(WRITTEN)}"
    return [
        Result(f"{what} {way} another format", max(each), tuple(each), 20, False, " s", detail)
        for way, each in seconds.items()
    ]


def _data_file(folder: Path) -> Path:
    Image.new("1", (640, 480)).save(folder / "0.png")
    content = (folder / "0.png").read_bytes()
    lines = []
    for n in range(IMAGES):
        (folder / f"{n}.png").write_bytes(content)
        boxes = ([n % 99 + k, 90 * k, n % 99 + 300, 90 * k + 90] for k in range(BOXES))
        objects = [{"desc": f"class {n % 80}", "bbox_2d": box} for box in boxes]
        lines.append({"images": [f"{n}.png"], "width": 640, "height": 480, "objects": objects})
    write_lines(folder / "data.jsonl", lines)
    return folder / "data.jsonl"


PARTS = {
    "parser": parser.measure,
    "formats": formats.measure,
    "matching": matching.measure,
    "stages": stages.measure,
    "packing": packing.measure,
    "conversion": convert_there_and_back,
}

if __name__ == "__main__":
    run("data_plane", __doc__, PARTS, rounds=7, errors=(ContractError,))
