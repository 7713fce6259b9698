"""How many tokens the samples of a run have: given, counted in its data, or logged.

Every source tells the lengths of a sample at a step as a pure function, so that a simulation
is repeated number by number.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from learner.data.images import UnreadableImage
from learner.data.lengths import SampleLengths
from learner.simulate.speeds import read_strict
from learner.types import Sample
from shared_contracts.strict_model import Refusal, StrictModel


class Tokens(NamedTuple):
    """Of one sample. prompt: images included. answer: generated, without its end.

    target: what channel A teaches after the prompt; corrected: what channel B does, the
    prefix of the answer and the objects that it missed.
    """

    prompt: int
    answer: int
    target: int
    corrected: int


class Lengths(Protocol):
    @property
    def samples(self) -> int:
        """In the training data."""

    def of(self, step: int, index: int) -> Tokens:
        """Of sample `index` when step `step` takes it."""


class Pool:
    """Draws from known samples, with replacement.

    known: some of them, whole: what is long together stays together.
    """

    def __init__(self, known: Sequence[Tokens], samples: int, seed: int) -> None:
        self.samples = samples
        self._known = known
        self._seed = seed

    def of(self, step: int, index: int) -> Tokens:
        rng = np.random.default_rng([self._seed, step, index])
        return self._known[int(rng.integers(len(self._known)))]


class OfData:
    """The samples of a data file; a sample is measured when a step takes it.

    Answers are as long as the ground truth's: the model answers as it is taught to.
    """

    def __init__(self, data: Sequence[Sample], lengths: SampleLengths) -> None:
        self.samples = len(data)
        self._data = data
        self._lengths = lengths
        self._measured: dict[int, Tokens] = {}

    def of(self, step: int, index: int) -> Tokens:
        """Raises ContractError for an image that cannot be counted."""
        if index not in self._measured:
            self._measured[index] = self._measure(self._data[index])
        return self._measured[index]

    def _measure(self, sample: Sample) -> Tokens:
        try:
            prompt = self._lengths.prompt(sample)
        except UnreadableImage as error:
            raise error.of(sample.sample_id) from error
        target = self._lengths.target(sample)
        return Tokens(prompt, target - 1, target, target)


Quantiles = list[float]


class LengthsFile(StrictModel):
    """Evenly spaced quantiles, from the least to the most; two or more."""

    samples: int = Field(ge=1, description="in the training data")
    prompt: Quantiles = Field(description="tokens before the answer, those of images included")
    answer: Quantiles = Field(description="tokens of a generated answer")
    target: Quantiles = Field(description="tokens of the ground truth's answer")
    corrected: Quantiles | None = Field(
        default=None, description="tokens channel B teaches; null: as many as the target has"
    )

    @field_validator("prompt", "answer", "target", "corrected")
    @classmethod
    def _ascending(cls, values: Quantiles | None) -> Quantiles | None:
        if values is None:
            return None
        if len(values) < 2 or sorted(values) != values or values[0] < 1:
            raise Refusal(
                f"{values}", "Give two or more ascending numbers from 1 on: evenly spaced quantiles"
            )
        return values


class Drawn:
    """Independent draws from quantiles, linear between them."""

    def __init__(self, file: LengthsFile, seed: int) -> None:
        self.samples = file.samples
        self._file = file
        self._seed = seed

    def of(self, step: int, index: int) -> Tokens:
        """A sample has one prompt and one target; what is answered differs from step to step."""
        of_sample = np.random.default_rng([self._seed, index])
        of_step = np.random.default_rng([self._seed, index, step])
        target = _quantile(self._file.target, at := of_sample.random())
        return Tokens(
            prompt=_quantile(self._file.prompt, of_sample.random()),
            answer=_quantile(self._file.answer, of_step.random()),
            target=target,
            corrected=target
            if self._file.corrected is None
            else _quantile(self._file.corrected, at),
        )


def read_lengths(path: Path, seed: int) -> Drawn:
    """A YAML file of quantiles; ContractErrors names every fault in it."""
    return Drawn(read_strict(path, LengthsFile), seed)


def _quantile(values: Quantiles, at: float) -> int:
    places: npt.NDArray[np.float64] = np.linspace(0.0, 1.0, len(values))
    return round(float(np.interp(at, places, values)))
