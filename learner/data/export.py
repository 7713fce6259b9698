"""Samples of a data file that other formats can hold, or all that is in their way.

samples_to_export   reads a data file, and the header of every image
names_of_images     how their copies are called in a data set of its own
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from learner.data.images import UnreadableImage, Watch, look_at_all, look_at_header, size_told
from learner.data.jsonl import DataProblem, capped, scan
from learner.types import Sample

Faults = Callable[[Sequence[Sample]], Iterable[DataProblem]]


@dataclass
class Exported:
    """reoriented: samples whose image EXIF turns or mirrors."""

    samples: list[Sample] = field(default_factory=list)
    reoriented: list[Sample] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return sum(len(sample.objects) for sample in self.samples)

    def count(self, kind: str) -> int:
        return sum(o.shape.kind == kind for sample in self.samples for o in sample.objects)


def samples_to_export(path: Path, watch: Watch, more_faults: Faults) -> Exported:
    """Read a data file whose samples have one image each.

    more_faults: what else of its samples the other format cannot hold.

    Raises ContractErrors: all that is wrong with the file, each as `file:line`.
    """
    export = Exported()
    problems: list[DataProblem] = []
    for line in scan(path, allow_poly=True):
        problems += line.problems
        if line.sample is not None:
            export.samples.append(line.sample)
    paths = [sample.images[0] for sample in export.samples]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for sample, (image, look) in zip(export.samples, looks, strict=True):
        size = (sample.width, sample.height)
        if len(sample.images) > 1:
            found = f"the sample has {len(sample.images)} images"
            do = "Give it one; the other formats hold objects of one image."
            problems.append(DataProblem("several images", sample.sample_id, found, do))
        if isinstance(look, UnreadableImage):
            error = look.of(sample.sample_id)
            problems.append(DataProblem("image", error.where, error.found, error.do))
        elif look.size != size:
            found = size_told(size, image, look)
            do = "Give its size, and see that the boxes were made for this image."
            problems.append(DataProblem("other image size", sample.sample_id, found, do))
        elif look.reoriented:
            export.reoriented.append(sample)
    problems += more_faults(export.samples)
    if problems:
        by_line = sorted(problems, key=lambda one: int(one.where.rpartition(":")[2]))
        raise capped(str(path), by_line)
    return export


def names_of_images(samples: Sequence[Sample], *, flat: bool) -> list[PurePosixPath]:
    """Relative to the folder that has all of them; no two alike unless `name_faults` finds it.

    flat: without folders; those that the name is in are in front of it (`day_a.jpg`).
    """
    paths = [Path(os.path.normpath(sample.images[0])) for sample in samples]
    root = os.path.commonpath([path.parent for path in paths])
    names = []
    for path in paths:
        # Labels of YOLO are where `labels` is written for the last folder `images`.
        parts = [part for part in path.relative_to(root).parts if part != "images"]
        names.append(PurePosixPath("_".join(parts) if flat else "/".join(parts)))
    return names


def name_faults(samples: Sequence[Sample], *, flat: bool) -> Iterator[DataProblem]:
    """Samples whose images, or files of labels, would have one name."""
    if not samples:
        return
    first: dict[PurePosixPath, Sample] = {}
    for sample, name in zip(samples, names_of_images(samples, flat=flat), strict=True):
        before = first.setdefault(name.with_suffix(""), sample)
        if before is not sample:
            yield DataProblem(
                "same name",
                sample.sample_id,
                f"image {sample.images[0]} has the name {name.with_suffix('')} of that of "
                f"{before.sample_id}",
                "Give images names of their own, also without suffix, and one line each.",
            )
