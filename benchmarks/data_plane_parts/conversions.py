"""100,000 objects of 10,000 images, from a data file to each other format and back.

What comes back are the same objects, or the benchmark ends. Images are JPEG files of 640 x 480; to
YOLO and VOC they are copied. Times are of the processor, not of the clock.
"""

import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

from benchmarks.results import Result, median_of
from learner.data.conversion import convert, write_records
from learner.data.formats import read_other, write_other
from learner.data.images import Looks
from learner.data.jsonl import read_samples
from learner.data.records import Format
from learner.types import GroundTruthObject

FORMATS: tuple[Format, ...] = ("coco", "lvis", "yolo", "voc")
IMAGES, OBJECTS = 10_000, 10
SIZE = (640, 480)
NAMES = [f"thing {number}" for number in range(80)]
GOAL_S = 20.0


class OtherObjects(Exception):
    """A conversion and its way back lost or moved an object."""


def measure(rounds: int) -> list[Result]:
    """Each round draws objects of its own; the images are the same."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _paint(root / "photos")
        seconds: dict[str, list[float]] = {}
        for seed in range(rounds):
            source = root / f"{seed}.jsonl"
            _draw(source, seed)
            for form in FORMATS:
                there, back = _there_and_back(source, form, root / str(seed))
                name = f"100,000 boxes of {IMAGES:,} images"
                seconds.setdefault(f"{name} to {form}", []).append(there)
                seconds.setdefault(f"{name} from {form}", []).append(back)
    return [median_of(n, all_, GOAL_S, at_least=False, unit=" s") for n, all_ in seconds.items()]


def _paint(folder: Path) -> None:
    folder.mkdir()
    file = io.BytesIO()
    Image.effect_noise(SIZE, 20).convert("RGB").save(file, "JPEG")
    for number in range(IMAGES):
        (folder / f"{number:05d}.jpg").write_bytes(file.getvalue())


def _draw(out: Path, seed: int) -> None:
    chosen = random.Random(seed)
    with out.open("w") as file:
        for number in range(IMAGES):
            objects: dict[tuple[int, ...], dict[str, object]] = {}
            while len(objects) < OBJECTS:
                x, y = chosen.randrange(900), chosen.randrange(900)
                x2, y2 = chosen.randrange(x + 20, 1000), chosen.randrange(y + 20, 1000)
                box = (x, y, x2, y2)
                objects[box] = {"desc": chosen.choice(NAMES), "bbox_2d": box}
            record = {
                "images": [f"photos/{number:05d}.jpg"],
                "width": SIZE[0],
                "height": SIZE[1],
                "objects": list(objects.values()),
            }
            file.write(json.dumps(record) + "\n")


def _there_and_back(source: Path, form: Format, folder: Path) -> tuple[float, float]:
    """Seconds of the processor of both ways."""
    folder.mkdir(exist_ok=True)
    other, back = folder / form, folder / f"{form}.jsonl"
    there = _seconds(partial(_write, source, form, other))
    again = _seconds(partial(_read, other, form, source.parent, back))
    before, after = (_objects(file) for file in (source, back))
    if before != after:
        raise OtherObjects(f"{form}: {source}")
    return there, again


def _seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _write(source: Path, form: Format, out: Path) -> None:
    write_other(source, out, form, source.parent, "bbox_2d", _unwatched)


def _read(source: Path, form: Format, images: Path, out: Path) -> None:
    folder = None if form == "voc" else images
    write_records(convert(read_other(source, form, folder), out, _unwatched), out)


def _objects(file: Path) -> dict[str, tuple[GroundTruthObject, ...]]:
    return {s.images[0].name: s.objects for s in read_samples(file, allow_poly=True)}


def _unwatched(looks: Looks, _: int) -> Looks:
    return looks
