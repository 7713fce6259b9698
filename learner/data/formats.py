"""Other formats than the data file: reading and writing.

read_other       a file or folder -> `Source`
write_other      a data file -> a file or folder
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from learner.data.coco import read_coco, to_coco, to_lvis, write_document
from learner.data.conversations import read_conversations, write_swift
from learner.data.detection import Format, OutFormat
from learner.data.files import DataProblem, capped
from learner.data.images import ImageInfo, Watch, image_problem, inspect_all, inspect_header
from learner.data.jsonl import scan
from learner.data.records import Account, Corners, Rule, Scale, Source
from learner.data.voc import NOT_XML, read_voc, write_voc
from learner.data.yolo import read_yolo, write_yolo
from learner.types import GeometryKind, Sample
from shared_contracts.strict_model import shown


def read_other(
    source: Path,
    form: Format,
    images: Path | None = None,
    split: str | None = None,
    scale: Scale | None = None,
    corners: Corners | None = None,
) -> Source:
    """Read a file or folder.

    images: base of image names, if stated. split: of yolo and voc. scale, corners: of coco,
    lvis and conversations; one reader handles all formats of conversations.
    """
    if form == "yolo":
        return read_yolo(source, split)
    if form == "voc":
        return read_voc(source, split, images)
    if form in ("coco", "lvis"):
        return read_coco(source, images, scale, corners)
    return read_conversations(source, images or source.parent, scale, corners)


def write_other(
    source: Path, out: Path, form: OutFormat, images: Path, geometry: GeometryKind, watch: Watch
) -> tuple[list[Sample], Account]:
    """Write a data file in another format; return its samples, which have one image each.

    images: base of image names; yolo and voc get copies of the images.

    Raises ContractErrors: all problems of the data file, each at `file:line`.
    """
    lines = list(scan(source, allow_poly=True))
    problems = [problem for line in lines for problem in line.problems]
    samples, account = [line.sample for line in lines if line.sample is not None], Account()
    problems += _image_faults(samples, account, watch)
    names = _names_of_images(samples)
    if form in ("yolo", "voc"):
        problems += _name_faults(samples, names, xml=form == "voc")
    if problems:
        by_line = sorted(problems, key=lambda one: int(one.where.rpartition(":")[2]))
        raise capped(str(source), by_line)
    if form in ("yolo", "voc", "ms-swift"):
        rule = Rule.POLYGONS if geometry == "bbox_2d" else Rule.BOXES
        for sample in samples:
            others = sum(item.shape.kind != geometry for item in sample.objects)
            account.note(rule, sample.sample_id, others)
    if form == "yolo":
        write_yolo(samples, names, out, polygons=geometry == "poly")
    elif form == "voc":
        write_voc(samples, names, out)
    elif form == "ms-swift":
        write_swift(samples, images, out)
    else:
        write_document((to_lvis if form == "lvis" else to_coco)(samples, images), out)
    return samples, account


def _image_faults(
    samples: Sequence[Sample], account: Account, watch: Watch
) -> Iterator[DataProblem]:
    """Yield faults of the samples' images; only headers are read."""
    paths = [sample.images[0] for sample in samples]
    results = watch(inspect_all(paths, inspect_header), len(paths))
    for sample, (image, result) in zip(samples, results, strict=True):
        if len(sample.images) > 1:
            found = f"the sample has {len(sample.images)} images"
            do = "Give it one; the other formats hold objects of one image."
            yield DataProblem("several images", sample.sample_id, found, do)
        size = (sample.width, sample.height)
        if (problem := image_problem(sample.sample_id, size, image, result)) is not None:
            yield problem
        elif isinstance(result, ImageInfo) and result.reoriented:
            account.note(Rule.REORIENTED, sample.sample_id)


def _names_of_images(samples: Sequence[Sample]) -> list[str]:
    """Return names for one flat folder: the path below the common folder, as `day_a.jpg`."""
    paths = [Path(os.path.normpath(sample.images[0])) for sample in samples]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return ["_".join(path.relative_to(root).parts) for path in paths]


def _name_faults(
    samples: Sequence[Sample], names: Sequence[str], xml: bool
) -> Iterator[DataProblem]:
    """Yield samples with equal label file names, and descriptions that XML cannot contain."""
    first: dict[str, Sample] = {}
    for sample, name in zip(samples, names, strict=True):
        earlier = first.setdefault(Path(name).stem, sample)
        if earlier is not sample:
            found = f"image {sample.images[0]} has the name of that of {earlier.sample_id}"
            do = "Give images names of their own, also without suffix, and one line each."
            yield DataProblem("same name", sample.sample_id, found, do)
        for index, item in enumerate(sample.objects if xml else ()):
            if NOT_XML.search(item.desc):
                found = f"objects[{index}].desc {shown(item.desc)} cannot be written as XML"
                do = "Remove control characters, and space at its ends."
                yield DataProblem("description", sample.sample_id, found, do)
