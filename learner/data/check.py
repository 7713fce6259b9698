"""Everything that is wrong or doubtful in data files, beyond what reading them shows.

Problems, which stop a run, are those of `learner.data.jsonl` and images that cannot be decoded,
have another size than the line says or are too narrow for the model's processor. Warnings, with
which a run goes on:

    too thin to match          it covers no pixel of the canvas on which objects are matched
    same image in one file     two lines show it; files are compared by their bytes
    same image in two files    what is trained on is also evaluated on
    target too long            an answer that names every object is longer than may be generated
    sample too long            prompt and answer do not fit into a pack
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from learner.data.findings import Finding
from learner.data.images import Look, Looks, UnreadableImage, Watch, look_at_all, size_told
from learner.data.jsonl import scan
from learner.data.lengths import SampleLengths, TokenLimits
from learner.data.lines import brief
from learner.data.shapes import CoversAPixel
from learner.types import Sample
from shared_contracts.errors import ContractError


@dataclass
class FileReport:
    """samples, objects: of the lines that can be read."""

    path: Path
    samples: int = 0
    objects: int = 0
    findings: list[Finding] = field(default_factory=list)

    def count(self, *, warnings: bool) -> int:
        return sum(finding.warning == warnings for finding in self.findings)


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
        for sample in _read(report, allow_poly):
            report.findings += _of_sample(sample, lengths, covers_a_pixel)
            _note_images(uses, index, sample)
    looks = watch(look_at_all(list(uses)), len(uses))
    for use, finding in _of_images(uses, looks):
        reports[use.file].findings.append(finding)
    for report in reports:
        report.findings.sort(key=_line_number)
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


def _line_number(finding: Finding) -> int:
    return int(finding.where.rpartition(":")[2])


def _note_images(uses: dict[Path, list[_Use]], file: int, sample: Sample) -> None:
    """width and height are those of the first image."""
    size: tuple[int, int] | None = (sample.width, sample.height)
    for image in sample.images:
        use = _Use(file, sample.sample_id, size, hash(sample.objects))
        uses.setdefault(image, []).append(use)
        size = None


def _of_sample(
    sample: Sample, lengths: SampleLengths | None, covers_a_pixel: CoversAPixel
) -> Iterator[Finding]:
    for index, item in enumerate(sample.objects):
        if not covers_a_pixel(item.shape):
            yield Finding(
                "too thin to match",
                sample.sample_id,
                f"objects[{index}] {item.desc!r} covers no pixel of the canvas on which "
                f"objects are matched: {brief(item.shape.coords)}",
                "Widen it or leave it out; no prediction is ever matched to it.",
                warning=True,
            )
    if lengths is not None and lengths.limits is not None:
        yield from _of_lengths(sample, lengths, lengths.limits)


def _of_lengths(sample: Sample, lengths: SampleLengths, limits: TokenLimits) -> Iterator[Finding]:
    target = lengths.target(sample)
    if target > limits.answer:
        yield Finding(
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
        yield Finding("image too narrow", error.where, error.found, error.do)
        return
    except UnreadableImage:  # told with the other images
        return
    if limits.pack is not None and prompt + target > limits.pack:
        yield Finding(
            "sample too long",
            sample.sample_id,
            f"prompt {prompt} and target {target} tokens, and global_max_length is {limits.pack}",
            "Raise it, make the image smaller, give fewer objects, or set training.packing: false.",
            warning=True,
        )


def _of_images(uses: dict[Path, list[_Use]], looks: Looks) -> Iterator[tuple[_Use, Finding]]:
    seen: dict[bytes, _Use] = {}
    for path, look in looks:
        for use in uses[path]:
            if isinstance(look, UnreadableImage):
                yield use, _unreadable(use, path, look)
                continue
            if use.size not in (None, look.size):
                yield use, _other_size(use, path, look)
            first = seen.setdefault(look.digest, use)
            if first.sample_id != use.sample_id:
                yield use, _seen_before(use, path, first)


def _unreadable(use: _Use, path: Path, why: UnreadableImage) -> Finding:
    return Finding(
        "unreadable image",
        use.sample_id,
        f"image {path} {why}",
        "Replace it, or remove the line.",
    )


def _other_size(use: _Use, path: Path, look: Look) -> Finding:
    assert use.size is not None
    return Finding(
        "other image size",
        use.sample_id,
        size_told(use.size, path, look),
        "Give its size, and see that the boxes were made for this image.",
    )


def _seen_before(use: _Use, path: Path, first: _Use) -> Finding:
    same = "the same objects" if use.objects_hash == first.objects_hash else "other objects"
    leak = use.file != first.file
    return Finding(
        f"same image in {'two files' if leak else 'one file'}",
        use.sample_id,
        f"image {path} is that of {first.sample_id}, with {same}",
        "Keep it in one of the files." if leak else "Keep one of the lines.",
        warning=True,
    )
