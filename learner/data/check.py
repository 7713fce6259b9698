"""Problems and warnings of data files, for `learner data check`.

A problem stops a run: a fault of a line (`learner.data.jsonl`), an image that cannot be decoded,
an image whose size differs from its line, or an image too narrow for the model's processor.
A warning does not stop a run. The first two are problems in a file with faulty boxes:

    scale                      the boxes look like fractions, thousandths or pixels
    x, y, width, height        nearly all boxes are plausible as a corner with width and height
    odd description            a description has markup, a line break or an invisible character
    too thin to match          a shape covers no pixel of the matching canvas
    same image in one file     two lines have images with equal bytes
    same image in two files    a training image is also an evaluation image
    target too long            the answer with every object exceeds max_new_tokens
    sample too long            prompt and answer do not fit into a pack
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learner.data.checkpoint import SampleLengths
from learner.data.files import DataProblem
from learner.data.images import (
    ImageResult,
    UnreadableImage,
    image_problems,
    inspect_all,
)
from learner.data.jsonl import MAX_BIN, Box, DataFile, Size, line_of
from learner.data.records import FAULTY, Reading, Scale, find_reading
from learner.stages.matching import covers_a_pixel
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

# Fewest boxes that count as x, y, width, height. Two random corners fit with a probability of 1/4.
_FEWEST = 7
_TO_BINS: dict[Scale, str] = {
    "0..1": f"x becomes {MAX_BIN} * x, y becomes {MAX_BIN} * y",
    "0..1000": f"x becomes {MAX_BIN} * x / 1000, y becomes {MAX_BIN} * y / 1000",
    "pixels": f"x becomes {MAX_BIN} * x / width, y becomes {MAX_BIN} * y / height",
}
# Markup of chat templates and other formats.
_MARKUP = re.compile(r"</?(?:bbox|ref-object|box|ref|quad|image|video|img|tool_call|think)>")

# Digest of an image file -> the first file and sample that show it.
FirstUse = dict[bytes, tuple[DataFile, Sample]]


def _warning(kind: str, where: str, found: str, do: str) -> DataProblem:
    return DataProblem(kind, where, found, do, warning=True)


def check_files(
    paths: Sequence[Path],
    *,
    allow_poly: bool,
    lengths: SampleLengths | None,
    canvas: int,
) -> list[DataFile]:
    """Return the files with findings in line order.

    canvas: side of the matching canvas in pixels.

    Raises ContractError as `DataFile` does.
    """
    files = [DataFile(path, allow_poly=allow_poly) for path in paths]
    samples = [sample for file in files for sample in file.samples]
    results = inspect_all((path for sample in samples for path in sample.images), decode=True)
    rule = None if lengths is None else lengths.rule
    first_use: FirstUse = {}
    for file in files:
        faulty = any(each.kind == "geometry" for each in file.findings)
        file.findings[:0] = _doubts(file.boxes, warning=not faulty)
        for sample in file.samples:
            file.findings += _of_objects(sample, canvas)
            if lengths is not None:
                file.findings += _of_lengths(sample, lengths)
            file.findings += image_problems(sample, results, rule)
            file.findings += _of_same_images(file, sample, results, first_use)
        file.findings.sort(key=line_of)
    return files


def _doubts(boxes: Sequence[tuple[str, Box, Size]], *, warning: bool) -> Iterator[DataProblem]:
    """Yield findings about all boxes, at the first one, if they do not look like corners in bins.

    boxes: location, numbers as in the file, and image size of each.
    """
    if not boxes:
        return
    place, known = boxes[0][0], [(box, size) for _, box, size in boxes]
    beyond = sum(max(box) > MAX_BIN for box, _ in known)
    few = beyond <= FAULTY * len(boxes)
    scale: Scale = "0..999"
    scales: tuple[Scale, ...] = ()
    try:
        found = find_reading(known)
        evidence = found.evidence
        plausible = {"0..999": True, "0..1000": not beyond, "pixels": few and beyond, "0..1": False}
        if not plausible[found.scale]:
            scale, scales = found.scale, (found.scale,)
    except ContractError as error:  # ambiguous
        evidence, scales = error.found, () if few else ("0..1000", "pixels")
    inside = Reading(scale, "xywh").count_inside(known)
    fit = len(boxes) >= _FEWEST and inside >= (1 - FAULTY) * len(boxes)
    if fit and scale != "0..1":  # rounded numbers tell nothing of fractions
        text = f"{inside} of {len(boxes)} boxes are inside of their images as x, y, width, height"
        do = "If they are: write x1, y1, x2, y2, with x2 = x + width and y2 = y + height."
        yield DataProblem("x, y, width, height", place, text, do, warning=warning)
    if scales:
        do = " ".join(f"If they are {scale}: {_TO_BINS[scale]}." for scale in scales)
        text = f"the scale of {len(boxes)} boxes: {evidence}"
        yield DataProblem("scale", place, text, do, warning=warning)


def _of_objects(sample: Sample, canvas: int) -> Iterator[DataProblem]:
    for index, item in enumerate(sample.objects):
        if (odd := odd_text(item.desc)) is not None:
            found = f"objects[{index}].desc {shown(item.desc)} has {odd}"
            do = "Remove it: the model learns to write it, and other programs may read it."
            yield _warning("odd description", sample.sample_id, found, do)
        if not covers_a_pixel(item.shape, canvas):
            found = (
                f"objects[{index}] {item.desc!r} covers no pixel of the canvas on which "
                f"objects are matched: {shown(item.shape.coords)}"
            )
            do = "Widen it or leave it out; no prediction is ever matched to it."
            yield _warning("too thin to match", sample.sample_id, found, do)


def odd_text(description: str) -> str | None:
    """Return the markup or odd character in a description; None if there is none."""
    if (markup := _MARKUP.search(description)) is not None:
        return markup[0]
    for character in description:
        category = unicodedata.category(character)
        if category in ("Cc", "Cf", "Zl", "Zp", "Zs", "Co", "Cn") and character != " ":
            name = unicodedata.name(character, "a control character or line break")
            return f"U+{ord(character):04X} ({name.lower()})"
    return "space at its ends" if description != description.strip() else None


def _of_lengths(sample: Sample, lengths: SampleLengths) -> Iterator[DataProblem]:
    target, limits = lengths.target(sample), lengths.limits
    if target > limits.answer:
        found = (
            f"{len(sample.objects)} objects take {target} tokens, and "
            f"rollout_matching.max_new_tokens is {limits.answer}"
        )
        do = "Raise it, or give fewer objects; longer answers are cut off."
        yield _warning("target too long", sample.sample_id, found, do)
    try:
        prompt = lengths.prompt(sample)
    except DataProblem:  # of an image
        return
    if limits.pack is not None and prompt + target > limits.pack:
        found = (
            f"prompt {prompt} and target {target} tokens, and global_max_length is {limits.pack}"
        )
        do = "Raise it, make the image smaller, give fewer objects, or set training.packing: false."
        yield _warning("sample too long", sample.sample_id, found, do)


def _of_same_images(
    file: DataFile, sample: Sample, results: Mapping[Path, ImageResult], first_use: FirstUse
) -> Iterator[DataProblem]:
    """Yield warnings about images with the bytes of an earlier sample's."""
    for path in dict.fromkeys(sample.images):
        if isinstance(result := results[path], UnreadableImage):
            continue
        first_file, first = first_use.setdefault(result.digest, (file, sample))
        if first is sample:
            continue
        alike = "the same" if sample.objects == first.objects else "other"
        found = f"image {path} is that of {first.sample_id}, with {alike} objects"
        kind, do = "same image in one file", "Keep one of the lines."
        if first_file is not file:
            kind, do = "same image in two files", "Keep it in one of the files."
        yield _warning(kind, sample.sample_id, found, do)
