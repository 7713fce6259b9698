"""Samples that differ in all that a pack has to keep apart: images, answers, lengths."""

from pathlib import Path

import numpy as np
from PIL import Image

from learner.types import GroundTruthObject, Sample, Shape


def box(desc: str, *bins: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("bbox_2d", bins))


def mixed_samples(folder: Path) -> list[Sample]:
    """Images of four sizes: one, two and none to a sample, and two, one and no objects."""
    wide, square, small, tall = (
        _noise(folder / f"{width}x{height}.png", width, height)
        for width, height in ((96, 64), (64, 64), (32, 48), (48, 128))
    )
    cat, dog = box("red ellipse", 10, 20, 300, 400), box("blue triangle", 500, 510, 700, 999)
    return [
        Sample("two objects", (square,), 64, 64, (cat, dog)),
        Sample("two images", (wide, small), 96, 64, (box("kite", 0, 31, 62, 93),)),
        Sample("no image", (), 64, 64, (box("ghost", 250, 260, 750, 760),)),
        Sample("no object", (tall,), 48, 128, ()),
    ]


def _noise(path: Path, width: int, height: int) -> Path:
    pixels = np.random.default_rng([width, height]).integers(0, 255, (height, width, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path
