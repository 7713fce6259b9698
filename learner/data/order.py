"""Which samples each optimizer step takes, and each process of it (STEP-02).

    step k  ->  `batch` samples of the epoch's order  ->  a contiguous batch for each rank

    BatchOrder              the order, a pure function of the seed
    image_faults(samples)   what the headers of all images show, before anything expensive
    BadSampleLog            `bad_samples.jsonl` of the run folder
    StandIns                the training samples under `data.on_bad_sample: skip`

An epoch has as many whole steps as its samples make; what is left over is not trained on in
that epoch. Any step's samples can be computed at any time, so a run that goes on after it was
killed, or that looks ahead, takes the same ones.

With `stop`, the default, any fault of an image ends the run before it starts. With `skip` another
sample takes the place of a bad one, so a step still consumes as many samples as the YAML says,
every other sample keeps its place, and a resumed run takes the same ones: which sample stands in
depends on the seed, on the place, and on which samples are bad, and on nothing else.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from learner.data.images import (
    Look,
    Seen,
    Watch,
    image_problem,
    look_at_all,
    look_at_header,
    seen_of,
)
from learner.data.lengths import ImageRule
from learner.runs.atomic_files import append_line
from learner.types import Sample
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class BatchOrder:
    """The order of `samples` samples in steps of `batch`, over `ranks` processes.

    seed: of the shuffle; a new order in every epoch. shuffle: false keeps the order of the file.
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
        """Indices of the samples of rank `rank` in step `step`, both from 0."""
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        own = self.batch // self.ranks
        start = in_epoch * self.batch + rank * own
        return list(_order(self, epoch)[start : start + own])


@lru_cache(maxsize=4)
def _order(order: BatchOrder, epoch: int) -> Sequence[int]:
    import numpy as np  # not to check a config

    if not order.shuffle:
        return range(order.samples)
    shuffled: list[int] = (
        np.random.default_rng([order.seed, epoch]).permutation(order.samples).tolist()
    )
    return shuffled


BAD_SAMPLES = "bad_samples.jsonl"


def image_faults(
    samples: Sequence[Sample], rule: ImageRule, watch: Watch
) -> dict[str, ContractError]:
    """By `sample_id`, why a sample cannot be shown; only headers are read, several at a time.

    An image must be there, of a known format and mode, as large as its line says, and of sides
    that the model's processor takes.
    """
    paths = list(dict.fromkeys(path for sample in samples for path in sample.images))
    seen = dict(watch(look_at_all(paths, look_at_header), len(paths)))
    faults = ((sample.sample_id, _fault(sample, seen, rule)) for sample in samples)
    return {sample_id: fault for sample_id, fault in faults if fault is not None}


def image_fault(sample: Sample, rule: ImageRule) -> ContractError | None:
    """Why one sample cannot be shown, if it cannot; its images are decoded."""
    return _fault(sample, {path: seen_of(path) for path in sample.images}, rule)


def _fault(sample: Sample, seen: Mapping[Path, Seen], rule: ImageRule) -> ContractError | None:
    size: tuple[int, int] | None = (sample.width, sample.height)  # of the first image
    for path in sample.images:
        look = seen[path]
        if (problem := image_problem(sample.sample_id, size, path, look)) is not None:
            found, do = problem.found, problem.do.removesuffix(".")
        elif isinstance(look, Look) and rule.tokens(*look.size) is None:
            found = (
                f"image {path} has {look.size[0]}x{look.size[1]} pixels, and the model's "
                f"processor refuses sides of a ratio above {rule.max_aspect}"
            )
            do = "Cut the image, or remove the line"
        else:
            size = None
            continue
        do = f"{do}; data.on_bad_sample: skip trains without it"
        return ContractError(sample.sample_id, found, do)
    return None


class BadSampleLog:
    """Lists each bad sample once: `{"file", "line", "reason"}`, as far as this process knows.

    Every process but the first has a file of its own, `bad_samples.rank1.jsonl` and so on. A run
    that goes on adds to what is there.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        of_rank = f".rank{rank}" if rank else ""
        self._path = (folder / BAD_SAMPLES).with_suffix(f"{of_rank}.jsonl")
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self._listed = set(lines)

    def add(self, fault: ContractError) -> None:
        """fault: `where` is the `sample_id`."""
        file, _, line = fault.where.rpartition(":")
        record = {"file": file, "line": int(line), "reason": fault.found}
        text = json.dumps(record, ensure_ascii=False)
        if text not in self._listed:
            self._listed.add(text)
            append_line(self._path, text)


class StandIns(Sequence[Sample]):
    """Samples of which a good one stands in for each bad one, by place.

    bad: found before the run, by `sample_id`; at least one sample is good.
    look: finds what is wrong with a sample when its turn comes, as its images may have changed
        since, and their headers did not show everything.
    note: takes each fault that was not known before.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        bad: Mapping[str, ContractError],
        seed: int,
        look: Callable[[Sample], ContractError | None],
        note: Callable[[ContractError], None],
    ) -> None:
        self._samples = samples
        self._bad = dict(bad)
        self._seed = seed
        self._look = look
        self._note = note
        self._taken = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> Sample:  # type: ignore[override]  # no slices
        """Raises the ContractError of the sample where no other is good."""
        sample = self._samples[place]
        fault = self._fault(sample)
        if fault is None:
            return sample
        self._taken += 1
        for other in self._others(place):
            if self._fault(other) is None:
                return other
        raise fault

    def take_count(self) -> int:
        """How many samples had a stand-in since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def _others(self, place: int) -> Iterator[Sample]:
        everyone = range(len(self._samples))
        order = random.Random(f"{self._seed} {place}").sample(everyone, len(everyone))
        return (self._samples[index] for index in order)

    def _fault(self, sample: Sample) -> ContractError | None:
        if sample.sample_id not in self._bad and (fault := self._look(sample)) is not None:
            self._bad[sample.sample_id] = fault
            self._note(fault)
        return self._bad.get(sample.sample_id)
