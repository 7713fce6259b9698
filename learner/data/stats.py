"""What is in data files, as numbers; `stats_tables` and `stats_plot` show them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learner.coords import decode_bin
from learner.data.images import UnreadableImage
from learner.data.lengths import SampleLengths, TokenLimits
from learner.data.shapes import bounding_box
from learner.types import GeometryKind, Sample

FloatArray = npt.NDArray[np.float64]

# Sides of the squares that part small, medium and large objects in COCO's evaluation.
COCO_SIDES = (32, 96)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of each sample. prompt: those of images included; None where it is not known."""

    target: FloatArray
    images: FloatArray
    prompt: FloatArray | None
    limits: TokenLimits | None


@dataclass(frozen=True)
class DataStats:
    """S samples with N objects in all.

    objects: of each sample (S).
    sides: width and height of each object's bounding box in pixels (N x 2).
    centres: of those boxes in [0, 1] of the image (N x 2).
    image_sizes: width and height as the lines give them, once for each sample.
    """

    images: int
    objects: FloatArray
    geometries: Counter[GeometryKind]
    descriptions: Counter[str]
    sides: FloatArray
    centres: FloatArray
    image_sizes: Counter[tuple[int, int]]
    tokens: TokenCounts | None

    @property
    def areas(self) -> FloatArray:
        """Of the bounding boxes, in square pixels (N)."""
        areas: FloatArray = self.sides[:, 0] * self.sides[:, 1]
        return areas

    @property
    def aspects(self) -> FloatArray:
        """Width over height of the bounding boxes that have both."""
        solid = self.sides[(self.sides > 0).all(axis=1)]
        aspects: FloatArray = solid[:, 0] / solid[:, 1]
        return aspects


def collect(samples: Sequence[Sample], lengths: SampleLengths | None) -> DataStats:
    """Count everything; tokens where `lengths` are given.

    Raises ContractError for an image whose tokens cannot be counted.
    """
    placed = [(bounding_box(o.shape), s) for s in samples for o in s.objects]
    boxes = np.array([box for box, _ in placed], dtype=np.float64).reshape(-1, 4) * decode_bin(1)
    images = np.array([(s.width, s.height) for _, s in placed], dtype=np.float64).reshape(-1, 2)
    return DataStats(
        images=sum(len(sample.images) for sample in samples),
        objects=np.array([len(sample.objects) for sample in samples], dtype=np.float64),
        geometries=Counter(o.shape.kind for sample in samples for o in sample.objects),
        descriptions=Counter(o.desc for sample in samples for o in sample.objects),
        sides=(boxes[:, 2:] - boxes[:, :2]) * images,
        centres=(boxes[:, 2:] + boxes[:, :2]) / 2,
        image_sizes=Counter((sample.width, sample.height) for sample in samples),
        tokens=None if lengths is None else _tokens(samples, lengths),
    )


def _tokens(samples: Sequence[Sample], lengths: SampleLengths) -> TokenCounts:
    return TokenCounts(
        target=_measured(lengths.target, samples),
        images=_measured(lengths.images, samples),
        prompt=_measured(lengths.prompt, samples) if lengths.knows_prompt else None,
        limits=lengths.limits,
    )


def _measured(measure: Callable[[Sample], int], samples: Sequence[Sample]) -> FloatArray:
    lengths = np.empty(len(samples))
    for index, sample in enumerate(samples):
        try:
            lengths[index] = measure(sample)
        except UnreadableImage as error:
            raise error.of(sample.sample_id) from error
    return lengths
