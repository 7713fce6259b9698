"""What a run reads before it asks anybody: checkpoint, data, images, run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from learner.config.schema import Config
from learner.config.trackers import logins_missing
from learner.data.images import UnreadableImage, look_at_all
from learner.data.jsonl import read_samples
from learner.operate.doctor.findings import Finding, of_error, ok, skipped
from learner.runs.resume import require_run_folder
from learner.training.start_checks import (
    RunInputs,
    check_inputs,
    check_model,
    generates,
    longest_prompt,
)
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors

T = TypeVar("T")

CHECKPOINT, DATA, IMAGES, RUN = "checkpoint", "data", "images", "run"
TRACKERS = "trackers"
# Images that are decoded here, and samples that are measured.
SAMPLED = 64


@dataclass(frozen=True)
class Looked:
    """What was found, and what later checks work with.

    samples: of the training file; none where it cannot be read.
    whole: of a run that could start as far as files go; None otherwise.
    longest_prompt: tokens, of the samples; None where no server is asked or it cannot be measured.
    """

    findings: list[Finding] = field(default_factory=list)
    samples: Sequence[Sample] = ()
    has_checkpoint: bool = True
    whole: RunInputs | None = None
    longest_prompt: int | None = None


def look(config: Config) -> Looked:
    """Check all inputs at once; where that fails, each part by itself, to name each fault."""
    whole, wrong = None, None
    try:
        whole = check_inputs(config)
    except ContractError as error:
        wrong = error
    findings: list[Finding] = []
    has_checkpoint, model = True, config.model.model
    try:
        if whole is None:
            check_model(config)
        findings.append(ok(CHECKPOINT, "has a tokenizer with every coordinate token", str(model)))
    except ContractError as error:
        findings += of_error(CHECKPOINT, error)
        has_checkpoint = False
    named = (config.data.train_jsonl, config.data.val_jsonl)
    files = [file for file in named if file is not None]
    known = [whole.train, whole.val] if whole is not None else [None, None]
    read: dict[Path, Sequence[Sample]] = {}
    for file, samples in zip(files, known, strict=False):
        try:
            read[file] = (
                read_samples(file, allow_poly=config.allow_poly) if samples is None else samples
            )
            findings.append(ok(DATA, f"{len(read[file])} samples", str(file)))
        except ContractError as error:
            findings += of_error(DATA, error)
    if whole is not None and (doubt := config.data.doubt) is not None:
        do = "Keep a part of the samples out of training and validate on it"
        findings.append(Finding(DATA, str(config.data.val_jsonl), "warn", doubt, do))
    if read:
        findings += images([sample for samples in read.values() for sample in samples])
    else:
        findings.append(skipped(IMAGES, "waits for data"))
    if whole is not None:
        steps = config.training.total_steps(len(whole.train))
        goes_on = f", goes on from step {whole.start.step}" if whole.start.goes_on else ""
        findings.append(ok(RUN, f"{steps} steps into {config.training.output_dir}{goes_on}"))
    elif has_checkpoint and len(read) == len(files):
        assert wrong is not None, "it is what made the parts be looked at"
        findings += of_error(RUN, wrong)
    else:
        try:
            require_run_folder(config)
            findings.append(skipped(RUN, "waits for checkpoint and data"))
        except ContractError as error:
            findings += of_error(RUN, error)
    samples, prompt = read.get(config.data.train_jsonl, []), None
    if has_checkpoint and samples and asks_servers(config):
        try:
            prompt = longest_prompt(config, samples)
        except ContractError as error:
            findings += of_error(CHECKPOINT, error)
            has_checkpoint = False
    return Looked(findings, samples, has_checkpoint, whole, prompt)


def asks_servers(config: Config) -> bool:
    return generates(config) and config.rollout_matching.backend != "hf"


def images(samples: Sequence[Sample]) -> list[Finding]:
    """Decode a part of the images, spread over all samples."""
    paths = list(dict.fromkeys(path for sample in samples for path in sample.images))
    chosen = spread(paths, SAMPLED)
    do = "Replace it; `learner data check` finds every such one"
    broken = [
        Finding(IMAGES, str(path), "fail", str(look), do)
        for path, look in look_at_all(chosen)
        if isinstance(look, UnreadableImage)
    ]
    return broken or [ok(IMAGES, f"{len(chosen)} of {len(paths)} decoded")]


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of `items`, evenly spaced, the first among them."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]


def trackers(config: Config, environment: Mapping[str, str], home: Path) -> list[Finding]:
    """Whether the trackers of the run, which are installed, can log in from here."""
    report_to = config.training.report_to
    missing = logins_missing(report_to, environment, home)
    if missing:
        return of_error(TRACKERS, ContractErrors(missing), status="warn")
    return [ok(TRACKERS, ", ".join(report_to))]
