"""Everything that is wrong or doubtful in data files, beyond what reading them shows.

Problems, which stop a run, are those of `learner.data.jsonl` and images that cannot be decoded,
have another size than the line says or are too narrow for the model's processor. Warnings, with
which a run goes on:

    fractions                  no coordinate of the file is above 1
    pixels                     all of its coordinates would do as pixels of their images
    x, y, width, height        all of its boxes would do as a corner with width and height
    odd description            it has markup, a line break or an invisible character
    same file twice            as for training and for validation
    too thin to match          it covers no pixel of the canvas on which objects are matched
    same image in one file     two lines show it; files are compared by their bytes
    same image in two files    what is trained on is also evaluated on
    target too long            an answer that names every object is longer than may be generated
    sample too long            prompt and answer do not fit into a pack
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from learner.data.images import Looks, UnreadableImage, Watch, look_at_all, size_told
from learner.data.jsonl import (
    FROM_PIXELS,
    MAX_BIN,
    CoversAPixel,
    DataProblem,
    bounding_box,
    brief,
    scan,
)
from learner.data.lengths import SampleLengths, TokenLimits
from learner.types import Sample
from shared_contracts.errors import ContractError


@dataclass
class FileReport:
    """samples, objects: of the lines that can be read."""

    path: Path
    samples: int = 0
    objects: int = 0
    findings: list[DataProblem] = field(default_factory=list)

    def count(self, *, warnings: bool) -> int:
        return sum(problem.warning == warnings for problem in self.findings)


# All objects of a file lie in such a corner of their images by chance, and not as pixels.
_UNLIKELY = 0.01
# Share of boxes of two corners that do as x, y, width, height, if corners are spread evenly.
_QUARTER = 0.25
# Text in a description that chat templates or other formats read as something else.
_MARKUP = re.compile(r"</?(?:bbox|ref-object|box|ref|quad|image|video|img|tool_call|think)>")


@dataclass
class _Coordinates:
    """What the coordinates of a file are like, over its objects.

    where: the first sample with an object.
    inside: whether every object, its bins taken for pixels, lies inside of its image.
    chance: of `inside` for bins, if lower right corners are spread evenly over their images.
    sizes: objects that stay inside of their image if the last two numbers are width and height.
    """

    where: str = ""
    objects: int = 0
    largest: int = 0
    inside: bool = True
    chance: float = 1.0
    sizes: int = 0

    def add(self, sample: Sample) -> None:
        for item in sample.objects:
            self.where = self.where or sample.sample_id
            left, top, right, bottom = bounding_box(item.shape)
            self.objects += 1
            self.sizes += left + right <= MAX_BIN and top + bottom <= MAX_BIN
            self.largest = max(self.largest, *item.shape.coords)
            self.inside &= right <= sample.width and bottom <= sample.height
            self.chance *= min(sample.width / MAX_BIN, 1) * min(sample.height / MAX_BIN, 1)

    def doubt(self) -> DataProblem | None:
        """Coordinates that look like something else than bins, if they do."""
        if self.objects and self.largest <= 1:
            found = f"no coordinate of {self.objects} objects is above 1: fractions of the image"
            do = f"Multiply them by {MAX_BIN}: bin k is k/{MAX_BIN} of the width or height."
            return DataProblem("fractions", self.where, found, do, warning=True)
        if self.inside and self.chance < _UNLIKELY:
            found = f"all of {self.objects} objects lie where they would as pixels of their images"
            do = f"If they are pixels: {FROM_PIXELS}. Look at them with `learner data look --out`."
            return DataProblem("pixels", self.where, found, do, warning=True)
        if self.sizes == self.objects and _QUARTER**self.objects < _UNLIKELY**2:
            found = f"all of {self.objects} boxes stay in their images as x, y, width, height"
            do = "If they are: write x1, y1, x2, y2, with x2 = x + width and y2 = y + height."
            return DataProblem("x, y, width, height", self.where, found, do, warning=True)
        return None


class _Use(NamedTuple):
    """A line that shows an image; `size` where it says how large its image is."""

    file: int
    sample_id: str
    size: tuple[int, int] | None
    objects_hash: int


def check_files(
    paths: Sequence[Path],
    *,
    allow_poly: bool,
    lengths: SampleLengths | None,
    covers_a_pixel: CoversAPixel,
    watch: Watch,
) -> list[FileReport]:
    """A report of each file, its findings in the order of the lines.

    covers_a_pixel: of the canvas on which objects are matched.

    Raises ContractError for a file that is not there, cannot be read or is empty.
    """
    reports = []
    uses: dict[Path, list[_Use]] = {}
    for index, path in enumerate(paths):
        report = FileReport(path)
        reports.append(report)
        before = (one for one in paths[:index] if one.is_file() and path.is_file())
        twice = next((one for one in before if one.samefile(path)), None)
        coordinates = _Coordinates()
        for sample in _read(report, allow_poly):
            report.findings += _of_sample(sample, lengths, covers_a_pixel)
            coordinates.add(sample)
            if twice is None:  # else every image is in two files
                size: tuple[int, int] | None = (sample.width, sample.height)  # of the first image
                for image in sample.images:
                    use = _Use(index, sample.sample_id, size, hash(sample.objects))
                    uses.setdefault(image, []).append(use)
                    size = None
        if twice is not None:
            report.findings.append(
                DataProblem(
                    "same file twice",
                    f"{path}:1",
                    f"it is the same file as {twice}",
                    "Keep a part of the samples out of training and validate on it.",
                    warning=True,
                )
            )
        if (doubt := coordinates.doubt()) is not None:
            report.findings.append(doubt)
    looks = watch(look_at_all(list(uses)), len(uses))
    for use, problem in _of_images(uses, looks):
        reports[use.file].findings.append(problem)
    for report in reports:
        report.findings.sort(key=lambda each: int(each.where.rpartition(":")[2]))
    return reports


def kinds(reports: Sequence[FileReport]) -> list[tuple[str, bool, int]]:
    """(kind, warning, how many), problems first, the most frequent first."""
    counts = Counter((f.kind, f.warning) for report in reports for f in report.findings)
    rows = [(kind, warning, count) for (kind, warning), count in counts.items()]
    return sorted(rows, key=lambda row: (row[1], -row[2], row[0]))


def _read(report: FileReport, allow_poly: bool) -> Iterator[Sample]:
    for line in scan(report.path, allow_poly=allow_poly):
        report.findings += line.problems
        if line.sample is not None:
            report.samples += 1
            report.objects += len(line.sample.objects)
            yield line.sample


def _of_sample(
    sample: Sample, lengths: SampleLengths | None, covers_a_pixel: CoversAPixel
) -> Iterator[DataProblem]:
    for index, item in enumerate(sample.objects):
        if (odd := odd_text(item.desc)) is not None:
            yield DataProblem(
                "odd description",
                sample.sample_id,
                f"objects[{index}].desc {brief(item.desc)} has {odd}",
                "Remove it: the model learns to write it, and other programs may read it.",
                warning=True,
            )
        if not covers_a_pixel(item.shape):
            yield DataProblem(
                "too thin to match",
                sample.sample_id,
                f"objects[{index}] {item.desc!r} covers no pixel of the canvas on which "
                f"objects are matched: {brief(item.shape.coords)}",
                "Widen it or leave it out; no prediction is ever matched to it.",
                warning=True,
            )
    if lengths is not None and lengths.limits is not None:
        yield from _of_lengths(sample, lengths, lengths.limits)


def odd_text(description: str) -> str | None:
    """What a description has that no name of an object should have, if it has any."""
    if (markup := _MARKUP.search(description)) is not None:
        return markup[0]
    for character in description:
        category = unicodedata.category(character)
        if category in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn"):
            name = unicodedata.name(character, "a control character or line break")
            return f"U+{ord(character):04X} ({name.lower()})"
    return "space at its ends" if description != description.strip() else None


def _of_lengths(
    sample: Sample, lengths: SampleLengths, limits: TokenLimits
) -> Iterator[DataProblem]:
    target = lengths.target(sample)
    if target > limits.answer:
        yield DataProblem(
            "target too long",
            sample.sample_id,
            f"{len(sample.objects)} objects take {target} tokens, and "
            f"rollout_matching.max_new_tokens is {limits.answer}",
            "Raise it, or give fewer objects; answers end before they have named all of them.",
            warning=True,
        )
    try:
        prompt = lengths.prompt(sample)
    except ContractError as error:
        yield DataProblem("image too narrow", error.where, error.found, error.do)
        return
    except UnreadableImage:  # told with the other images
        return
    if limits.pack is not None and prompt + target > limits.pack:
        yield DataProblem(
            "sample too long",
            sample.sample_id,
            f"prompt {prompt} and target {target} tokens, and global_max_length is {limits.pack}",
            "Raise it, make the image smaller, give fewer objects, or set training.packing: false.",
            warning=True,
        )


def _of_images(uses: dict[Path, list[_Use]], looks: Looks) -> Iterator[tuple[_Use, DataProblem]]:
    seen: dict[bytes, _Use] = {}
    for path, look in looks:
        for use in uses[path]:
            if isinstance(look, UnreadableImage):
                found, do = f"image {path} {look}", "Replace it, or remove the line."
                yield use, DataProblem("unreadable image", use.sample_id, found, do)
                continue
            if use.size is not None and use.size != look.size:
                found = size_told(use.size, path, look)
                do = "Give its size, and see that the boxes were made for this image."
                yield use, DataProblem("other image size", use.sample_id, found, do)
            first = seen.setdefault(look.digest, use)
            if first.sample_id == use.sample_id:
                continue
            alike = use.objects_hash == first.objects_hash
            leak = use.file != first.file
            yield (
                use,
                DataProblem(
                    f"same image in {'two files' if leak else 'one file'}",
                    use.sample_id,
                    f"image {path} is that of {first.sample_id}, with "
                    f"{'the same' if alike else 'other'} objects",
                    "Keep it in one of the files." if leak else "Keep one of the lines.",
                    warning=True,
                ),
            )
