"""What a run reads before it asks anybody: checkpoint, data, images, run folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from learner.config.schema import Config
from learner.data.images import UnreadableImage, look_at_all
from learner.data.jsonl import read_samples
from learner.doctor.findings import Finding, of_error, ok, skipped
from learner.preflight import RunInputs, check_checkpoint, check_inputs
from learner.types import Sample
from shared_contracts.errors import ContractError

T = TypeVar("T")

CHECKPOINT, DATA, IMAGES, RUN = "checkpoint", "data", "images", "run"
# Images that are decoded here, and samples that are measured.
SAMPLED = 64


@dataclass(frozen=True)
class Looked:
    """What was found, and what later checks work with.

    samples: of the training file; none where it cannot be read.
    whole: of a run that could start as far as files go; None otherwise.
    """

    findings: list[Finding] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    has_checkpoint: bool = True
    whole: RunInputs | None = None


def look(config: Config) -> Looked:
    """Everything at once where it holds; else each part by itself, to name what does not."""
    try:
        whole = check_inputs(config)
    except ContractError as error:
        return _by_parts(config, error)
    named = [(config.data.train_jsonl, whole.train), (config.data.val_jsonl, whole.val)]
    files = [(Path(file), samples) for file, samples in named if file is not None]
    findings = [_checkpoint(config), *(_data(file, samples) for file, samples in files)]
    findings += images([*whole.train, *whole.val])
    findings.append(ok(RUN, _run(config, whole)))
    return Looked(findings, whole.train, True, whole)


def images(samples: Sequence[Sample]) -> list[Finding]:
    """Decode a part of the images, spread over all samples."""
    paths = list(dict.fromkeys(path for sample in samples for path in sample.images))
    chosen = spread(paths, SAMPLED)
    broken = [
        ContractError(str(path), str(look), "Replace it; `learner data check` finds every such one")
        for path, look in look_at_all(chosen)
        if isinstance(look, UnreadableImage)
    ]
    findings = [finding for error in broken for finding in of_error(IMAGES, error)]
    read = len(chosen) - len(broken)
    return findings or [ok(IMAGES, f"{read} of {len(paths)} decoded")]


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spaced, the first among them."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]


def _by_parts(config: Config, error: ContractError) -> Looked:
    findings: list[Finding] = []
    has_checkpoint = True
    try:
        check_checkpoint(Path(config.model.model))
        findings.append(_checkpoint(config))
    except ContractError as wrong:
        findings += of_error(CHECKPOINT, wrong)
        has_checkpoint = False
    train, val = config.data.train_jsonl, config.data.val_jsonl
    files = [Path(file) for file in (train, val) if file is not None]
    read: dict[Path, list[Sample]] = {}
    for file in files:
        try:
            read[file] = read_samples(file, allow_poly=config.allow_poly)
            findings.append(_data(file, read[file]))
        except ContractError as wrong:
            findings += of_error(DATA, wrong)
    if read:
        findings += images([sample for samples in read.values() for sample in samples])
    else:
        findings.append(skipped(IMAGES, "waits for data"))
    if not has_checkpoint or len(read) < len(files):
        findings.append(skipped(RUN, "waits for checkpoint and data"))
    else:
        findings += of_error(RUN, error)
    return Looked(findings, read.get(Path(train), []), has_checkpoint)


def _checkpoint(config: Config) -> Finding:
    return ok(CHECKPOINT, "has a tokenizer with every coordinate token", str(config.model.model))


def _data(file: Path, samples: Sequence[Sample]) -> Finding:
    return ok(DATA, f"{len(samples)} samples", str(file))


def _run(config: Config, whole: RunInputs) -> str:
    steps = config.training.total_steps(len(whole.train))
    goes_on = f", goes on from step {whole.start.step}" if whole.start.goes_on else ""
    return f"{steps} steps into {config.training.output_dir}{goes_on}"
