"""Problems and warnings of data files, for `learner data check`.

A problem stops a run: a fault of a line (`learner.data.jsonl`), an image that cannot be decoded,
an image whose size differs from its line, or an image too narrow for the model's processor.
A warning does not stop a run:

    fractions                  no coordinate of the file is above 1
    pixels                     all coordinates are plausible as pixels of their images
    x, y, width, height        all boxes are plausible as a corner with width and height
    odd description            a description has markup, a line break or an invisible character
    too thin to match          a shape covers no pixel of the matching canvas
    same image in one file     two lines have images with equal bytes
    same image in two files    a training image is also an evaluation image
    target too long            the answer with every object exceeds max_new_tokens
    sample too long            prompt and answer do not fit into a pack
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.data.boxes import find_scale
from learner.data.formats import require_jsonl
from learner.data.images import ImageResults, UnreadableImage, Watch, image_problem, inspect_all
from learner.data.jsonl import FROM_PIXELS, MAX_BIN, DataProblem, bounding_box, scan
from learner.data.lengths import SampleLengths
from learner.stages.matching import covers_a_pixel
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

# Highest probability at which "all boxes fit as x, y, width, height" counts as no coincidence.
_UNLIKELY = 1e-4
# Probability that a two-corner box is valid as x, y, width, height, for uniform corners.
_QUARTER = 0.25
# Markup of chat templates and other formats.
_MARKUP = re.compile(r"</?(?:bbox|ref-object|box|ref|quad|image|video|img|tool_call|think)>")


def _warning(kind: str, where: str, found: str, do: str) -> DataProblem:
    return DataProblem(kind, where, found, do, warning=True)


@dataclass
class FileReport:
    """samples, objects: counts over the valid lines."""

    path: Path
    samples: int = 0
    objects: int = 0
    findings: list[DataProblem] = field(default_factory=list)

    def count(self, *, warnings: bool) -> int:
        return sum(problem.warning == warnings for problem in self.findings)


def check_files(
    paths: Sequence[Path],
    *,
    allow_poly: bool,
    lengths: SampleLengths | None,
    canvas: int,
    watch: Watch,
) -> list[FileReport]:
    """Return a report for each file, with findings in line order.

    canvas: side of the matching canvas in pixels.

    Raises ContractError for a missing, unreadable or empty file, and for one of another format.
    """
    reports: list[FileReport] = []
    uses: dict[Path, list[tuple[FileReport, Sample]]] = {}
    for path in paths:
        require_jsonl(path)
        report, samples = FileReport(path), []
        for line in scan(path, allow_poly=allow_poly):
            report.findings += line.problems
            if (sample := line.sample) is not None:
                samples.append(sample)
                report.findings += _of_sample(sample, lengths, canvas)
                for image in dict.fromkeys(sample.images):
                    uses.setdefault(image, []).append((report, sample))
        report.samples, report.objects = len(samples), sum(len(s.objects) for s in samples)
        report.findings += _doubts(samples)
        reports.append(report)
    _check_images(uses, watch(inspect_all(list(uses)), len(uses)))
    for report in reports:
        report.findings.sort(key=lambda each: int(each.where.rpartition(":")[2]))
    return reports


def _doubts(samples: Sequence[Sample]) -> Iterator[DataProblem]:
    """Yield at most one warning, at the first object, if coordinates do not look like bins."""
    objects = [(item.shape, sample) for sample in samples for item in sample.objects]
    if not objects:
        return
    boxes = [bounding_box(shape) for shape, _ in objects]
    scale, _ = find_scale(boxes, [(sample.width, sample.height) for _, sample in objects])
    where = objects[0][1].sample_id
    if scale == "0..1":
        found = f"no coordinate of {len(objects)} objects is above 1: fractions of the image"
        do = f"Multiply them by {MAX_BIN}: bin k is k/{MAX_BIN} of the width or height."
        yield _warning("fractions", where, found, do)
    elif scale == "pixels":
        found = f"the {len(objects)} objects are plausible as pixels of their images"
        do = f"If they are pixels: {FROM_PIXELS}. Look at them with `learner data look --out`."
        yield _warning("pixels", where, found, do)
    elif _QUARTER ** len(boxes) < _UNLIKELY and all(
        x1 + x2 <= MAX_BIN and y1 + y2 <= MAX_BIN for x1, y1, x2, y2 in boxes
    ):
        found = f"all {len(boxes)} boxes are inside of their images as x, y, width, height"
        do = "If they are: write x1, y1, x2, y2, with x2 = x + width and y2 = y + height."
        yield _warning("x, y, width, height", where, found, do)


def _of_sample(sample: Sample, lengths: SampleLengths | None, canvas: int) -> Iterator[DataProblem]:
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
    if lengths is not None:
        yield from _of_lengths(sample, lengths)


def odd_text(description: str) -> str | None:
    """Return the markup or odd character in a description; None if there is none."""
    if (markup := _MARKUP.search(description)) is not None:
        return markup[0]
    for character in description:
        category = unicodedata.category(character)
        if category in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn"):
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
    except ContractError as error:
        yield DataProblem("image too narrow", error.where, error.found, error.do)
        return
    except UnreadableImage:  # reported with the other images
        return
    if limits.pack is not None and prompt + target > limits.pack:
        found = (
            f"prompt {prompt} and target {target} tokens, and global_max_length is {limits.pack}"
        )
        do = "Raise it, make the image smaller, give fewer objects, or set training.packing: false."
        yield _warning("sample too long", sample.sample_id, found, do)


def _check_images(uses: dict[Path, list[tuple[FileReport, Sample]]], results: ImageResults) -> None:
    """Add problems of images, and warnings about equal images, to the reports."""
    first_use: dict[bytes, tuple[FileReport, Sample]] = {}
    for path, result in results:
        for report, sample in uses[path]:
            size = (sample.width, sample.height) if path == sample.images[0] else None
            if (problem := image_problem(sample.sample_id, size, path, result)) is not None:
                report.findings.append(problem)
            if isinstance(result, UnreadableImage):
                continue
            first_report, first = first_use.setdefault(result.digest, (report, sample))
            if first is sample:
                continue
            alike = "the same" if sample.objects == first.objects else "other"
            found = f"image {path} is that of {first.sample_id}, with {alike} objects"
            kind, do = "same image in one file", "Keep one of the lines."
            if first_report is not report:
                kind, do = "same image in two files", "Keep it in one of the files."
            report.findings.append(_warning(kind, sample.sample_id, found, do))
