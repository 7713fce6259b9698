"""Other formats than the data file: reading and writing.

read_other       a file or folder -> `Source`
write_other      a data file -> a file or folder
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learner.data import voc, yolo
from learner.data.coco import json_text, read_coco, to_coco, to_lvis
from learner.data.conversations import read_conversations, swift_text
from learner.data.detection import Format, OutFormat
from learner.data.files import DataProblem
from learner.data.images import ImageInfo, image_problems, inspect_all
from learner.data.jsonl import DataFile
from learner.data.records import Account, Rule, Source
from learner.runs.atomic_files import publish_directory, publish_text, writing
from learner.types import GeometryKind, Sample
from shared_contracts.strict_model import shown


def read_other(
    source: Path, form: Format, images: Path | None = None, split: str | None = None
) -> Source:
    """Read a file or folder; one reader handles all formats of conversations.

    images: base of image names, if stated. split: of yolo and voc.
    """
    if form == "yolo":
        return yolo.read_yolo(source, split)
    if form == "voc":
        return voc.read_voc(source, split, images)
    if form in ("coco", "lvis"):
        return read_coco(source, images)
    return read_conversations(source, images or source.parent)


def write_other(
    source: Path, out: Path, form: OutFormat, images: Path, geometry: GeometryKind
) -> Account:
    """Write a data file, with one image a sample, in another format; return the account.

    images: base of image names; yolo and voc get copies of the images.

    Raises ContractErrors: all problems of the data file, each at `file:line`.
    """
    file, account, polygons = DataFile(source, allow_poly=True), Account(), geometry == "poly"
    results = inspect_all(path for sample in file.samples for path in sample.images)
    names = _names_of_images(file.samples)
    for sample in file.samples:
        file.findings += image_problems(sample, results)
        if len(sample.images) > 1:
            found = f"the sample has {len(sample.images)} images"
            do = "Give it one; the other formats hold objects of one image."
            file.findings.append(DataProblem("several images", sample.sample_id, found, do))
        result = results[sample.images[0]]
        if isinstance(result, ImageInfo):
            account.note(Rule.REORIENTED, sample.sample_id, result.reoriented)
        others = sum(item.shape.kind != geometry for item in sample.objects)
        if form in ("yolo", "voc", "ms-swift"):
            account.note(Rule.BOXES if polygons else Rule.POLYGONS, sample.sample_id, others)
    if form in ("yolo", "voc"):
        file.findings += _name_faults(file.samples, names, xml=form == "voc")
    samples = file.valid_samples()
    if form == "yolo":
        _publish_folder(out, samples, names, yolo.IMAGES, yolo.yolo_texts(samples, names, polygons))
    elif form == "voc":
        _publish_folder(out, samples, names, voc.IMAGES, voc.voc_texts(samples, names))
    else:
        if form == "ms-swift":
            text = swift_text(samples, images)
        else:
            text = json_text((to_lvis if form == "lvis" else to_coco)(samples, images))
        out.parent.mkdir(parents=True, exist_ok=True)
        publish_text(out, text)
    account.totals = [(len(samples), "images", ""), (file.objects, "objects", "")]
    return account


def _publish_folder(
    out: Path,
    samples: Sequence[Sample],
    names: Sequence[str],
    images: str,
    texts: Mapping[str, str],
) -> None:
    """Publish a folder atomically: text files by their paths, and copies of the images."""
    with writing(out), publish_directory(out) as part:
        for path, text in texts.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_text(text, encoding="utf-8")
        (part / images).mkdir(parents=True)
        for sample, name in zip(samples, names, strict=True):
            shutil.copyfile(sample.images[0], part / images / name)


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
            if voc.NOT_XML.search(item.desc):
                found = f"objects[{index}].desc {shown(item.desc)} cannot be written as XML"
                do = "Remove control characters, and space at its ends."
                yield DataProblem("description", sample.sample_id, found, do)
