"""The formats beside the data file: which of them a file or folder has, and both ways.

detect_format    by what the file or folder holds
read_other       -> `Source`
write_other      a data file -> a file or folder
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from learner.data.coco import read_coco, to_coco, to_lvis, write_document
from learner.data.conversations import read_conversations, records, write_swift
from learner.data.images import Look, Watch, image_problem, look_at_all, look_at_header
from learner.data.jsonl import DataProblem, brief, capped, read_text, scan
from learner.data.records import Account, Corners, Format, Rule, Scale, Source
from learner.data.voc import NOT_XML, read_voc, write_voc
from learner.data.yolo import DATA_YAML, read_yolo, write_yolo
from learner.types import GeometryKind, Sample
from shared_contracts.errors import ContractError

_DO = "Name the format with --from, and see docs/data.md for what each looks like"


def detect_format(path: Path) -> Format:
    """Return the format of a file or folder by what it holds; raises ContractError if by none."""
    if path.is_dir():
        if (path / DATA_YAML).is_file():
            return "yolo"
        if any(path.glob("Annotations/*.xml")) or any(path.glob("*.xml")):
            return "voc"
        raise ContractError(str(path), "the folder has neither data.yaml nor XML files", _DO)
    if path.suffix in (".yaml", ".yml"):
        return "yolo"
    if path.suffix == ".json":
        text = read_text(path, _DO)
        if '"category_id"' in text or '"categories"' in text:
            return "lvis" if '"neg_category_ids"' in text else "coco"
    where, record = next(records(path), (str(path), None))
    record = record if isinstance(record, dict) else {}
    objects = record.get("objects")
    if isinstance(objects, dict):
        return "ms-swift"
    if record.keys() & {"messages", "conversations"}:
        return "sharegpt"
    listed = objects if isinstance(objects, list) else []
    described = any("desc" in each for each in listed if isinstance(each, dict))
    if described or record.keys() & {"width", "height"}:
        return "jsonl"
    if record.keys() & {"image", "images"}:
        return "qwen"
    found = f"the first record has the keys {brief(sorted(record))}, which are of no known format"
    raise ContractError(where, found, _DO)


def read_other(
    source: Path,
    form: Format,
    images: Path | None = None,
    split: str | None = None,
    scale: Scale | None = None,
    corners: Corners | None = None,
) -> Source:
    """Return what a file or folder holds.

    images: the folder that image names start at, if it is stated. split: of yolo and voc. scale,
    corners: of conversations, whose formats differ in what a record calls its turns and boxes.
    """
    if form == "yolo":
        return read_yolo(source, split)
    if form == "voc":
        return read_voc(source, split, images)
    if form in ("coco", "lvis"):
        return read_coco(source, images or source.parent)
    return read_conversations(source, images or source.parent, scale, corners)


def write_other(
    source: Path, out: Path, form: Format, images: Path, geometry: GeometryKind, watch: Watch
) -> tuple[list[Sample], Account]:
    """Write a data file whose samples have one image each in another format; returns the samples.

    images: the folder that image names start at; yolo and voc have copies of the images.

    Raises ContractErrors: all that is wrong with the data file, each as `file:line`.
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
    """Faults of the samples' images, of which only the headers are read."""
    paths = [sample.images[0] for sample in samples]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for sample, (image, look) in zip(samples, looks, strict=True):
        if len(sample.images) > 1:
            found = f"the sample has {len(sample.images)} images"
            do = "Give it one; the other formats hold objects of one image."
            yield DataProblem("several images", sample.sample_id, found, do)
        size = (sample.width, sample.height)
        if (problem := image_problem(sample.sample_id, size, image, look)) is not None:
            yield problem
        elif isinstance(look, Look) and look.reoriented:
            account.note(Rule.REORIENTED, sample.sample_id)


def _names_of_images(samples: Sequence[Sample]) -> list[str]:
    """Names in one folder; those of folders are in front (`day_a.jpg`), as far as they differ."""
    paths = [Path(os.path.normpath(sample.images[0])) for sample in samples]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return ["_".join(path.relative_to(root).parts) for path in paths]


def _name_faults(
    samples: Sequence[Sample], names: Sequence[str], xml: bool
) -> Iterator[DataProblem]:
    """Samples whose files of labels would have one name, and descriptions that XML cannot hold."""
    first: dict[str, Sample] = {}
    for sample, name in zip(samples, names, strict=True):
        before = first.setdefault(Path(name).stem, sample)
        if before is not sample:
            found = f"image {sample.images[0]} has the name of that of {before.sample_id}"
            do = "Give images names of their own, also without suffix, and one line each."
            yield DataProblem("same name", sample.sample_id, found, do)
        for index, item in enumerate(sample.objects if xml else ()):
            if NOT_XML.search(item.desc):
                found = f"objects[{index}].desc {brief(item.desc)} cannot be written as XML"
                do = "Remove control characters, and space at its ends."
                yield DataProblem("description", sample.sample_id, found, do)
