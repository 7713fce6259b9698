"""Samples of each optimizer step and of each process (STEP-02).

An epoch has `samples // batch` steps; the remaining samples are not used in that epoch. A resumed
run and a prefetch compute the same samples, as the order depends on the seed alone.

With `data.on_bad_sample: stop`, the default, a bad image ends the run before it starts. With
`skip`, a replacement sample takes the place of each bad one; batch size and all other places stay
the same. The replacement depends only on the seed, the place, and the set of bad samples.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from learner.data.images import (
    ImageResult,
    ImageRule,
    image_problems,
    inspect_all,
    inspect_image,
)
from learner.runs.atomic_files import append_line
from learner.types import Sample
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class BatchOrder:
    """The order of `samples` samples in steps of `batch`, over `ranks` processes.

    seed: of the shuffle, which differs in each epoch. shuffle: False keeps the file order.
    """

    samples: int
    batch: int
    ranks: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.batch % self.ranks == 0, "checked with the step budget"
        assert self.steps_per_epoch > 0, "checked with the step budget"

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch

    def rank_batch(self, step: int, rank: int) -> list[int]:
        """Return sample indices of a rank in a step; both count from 0."""
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        own = self.batch // self.ranks
        start = in_epoch * self.batch + rank * own
        return list(_order(self, epoch)[start : start + own])


@lru_cache(maxsize=4)
def _order(order: BatchOrder, epoch: int) -> Sequence[int]:
    import numpy as np  # not to check a config

    if not order.shuffle:
        return range(order.samples)
    generator = np.random.default_rng([order.seed, epoch])
    return list(map(int, generator.permutation(order.samples)))


BAD_SAMPLES = "bad_samples.jsonl"


def image_faults(samples: Sequence[Sample], rule: ImageRule) -> dict[str, ContractError]:
    """Return the faults of samples' images by `sample_id`; only headers are read.

    An image must exist, have a known format and mode, have the size of its line, and an aspect
    ratio that the model's processor accepts.
    """
    results = inspect_all(path for sample in samples for path in sample.images)
    faults = ((sample.sample_id, _fault(sample, results, rule)) for sample in samples)
    return {sample_id: fault for sample_id, fault in faults if fault is not None}


def image_fault(sample: Sample, rule: ImageRule) -> ContractError | None:
    """Return the fault of a sample's images, or None; decodes them."""
    return _fault(sample, {path: inspect_image(path, decode=True) for path in sample.images}, rule)


def _fault(
    sample: Sample, results: Mapping[Path, ImageResult], rule: ImageRule
) -> ContractError | None:
    for problem in image_problems(sample, results, rule):
        do = f"{problem.do.removesuffix('.')}; data.on_bad_sample: skip trains without it"
        return ContractError(sample.sample_id, problem.found, do)
    return None


class BadSampleLog:
    """A JSONL file of this process's bad samples, each once: `{"file", "line", "reason"}`.

    Rank k > 0 writes `bad_samples.rank{k}.jsonl`. A resumed run appends to its file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        of_rank = f".rank{rank}" if rank else ""
        self._path = (folder / BAD_SAMPLES).with_suffix(f"{of_rank}.jsonl")
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self._listed = set(lines)

    def add(self, fault: ContractError) -> None:
        file, _, line = fault.where.rpartition(":")
        record = {"file": file, "line": int(line), "reason": fault.found}
        text = json.dumps(record, ensure_ascii=False)
        if text not in self._listed:
            self._listed.add(text)
            append_line(self._path, text)


class ReplacedSamples(Sequence[Sample]):
    """Samples with a good sample in the place of each bad one.

    bad: known faults by `sample_id`; at least one sample is good.
    find_fault: decodes a sample's images when it is used; headers do not show every fault.
    report: receives each new fault.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        bad: Mapping[str, ContractError],
        seed: int,
        find_fault: Callable[[Sample], ContractError | None],
        report: Callable[[ContractError], None],
    ) -> None:
        self._samples = samples
        self._bad = dict(bad)
        self._seed = seed
        self._find_fault = find_fault
        self._report = report
        self._replaced = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> Sample:  # type: ignore[override]  # no slices
        """Return the sample or its replacement; raises its ContractError if all are bad."""
        sample = self._samples[place]
        fault = self._fault(sample)
        if fault is None:
            return sample
        self._replaced += 1
        indices = range(len(self._samples))
        for index in random.Random(f"{self._seed} {place}").sample(indices, len(indices)):
            if self._fault(self._samples[index]) is None:
                return self._samples[index]
        raise fault

    def take_replaced(self) -> int:
        replaced, self._replaced = self._replaced, 0
        return replaced

    def _fault(self, sample: Sample) -> ContractError | None:
        if sample.sample_id not in self._bad and (fault := self._find_fault(sample)) is not None:
            self._bad[sample.sample_id] = fault
            self._report(fault)
        return self._bad.get(sample.sample_id)
