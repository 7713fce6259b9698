"""What a simulation is given: its setting, the speeds of machines, the lengths of samples.

Speeds come from a small YAML file or from a logged run (see `logged`). The defaults are round
numbers of the order of a 4B model on one data-centre GPU, measured nowhere. Lengths are given as
quantiles, counted in the data, or logged. Every source gives the lengths of a sample at a step as a
pure function, so that a simulation can be repeated exactly. `Setting.varied` is the same run with
other values of some keys (`--vary`):

servers=1,2,4      rollout servers; replicas, tensor_parallel_size: of each
ranks=1,2          learner processes
any key of _KEYS   a key of the training YAML, checked as the YAML is
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, field_validator

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.config.yaml12 import read_document
from learner.data.images import UnreadableImage
from learner.data.lengths import SampleLengths
from learner.data.order import BatchOrder
from learner.training.start_checks import check_processes, check_step_budget
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import Refusal, StrictModel, contract_errors

M = TypeVar("M", bound=StrictModel)


def read_strict(path: Path, model: type[M]) -> M:
    """A YAML file as `model`; ContractErrors names every fault and its line."""
    document = read_document(path)
    try:
        return model.model_validate(document.mapping)
    except ValidationError as error:
        faults = contract_errors(error, model)
    lines = {".".join(map(str, steps)): line for steps, line in document.lines.items()}
    places = [f"{path}:{lines.get(fault.where, 1)} {fault.where}" for fault in faults]
    raise ContractErrors(
        [ContractError(p, f.found, f.do) for p, f in zip(places, faults, strict=True)]
    )


class EngineSpeed(StrictModel):
    """One engine: a replica of a server, or `generate` of transformers."""

    call_s: float = Field(default=0.02, ge=0, description="seconds of a call beside its tokens")
    prefill_tokens_per_s: float = Field(
        default=20_000.0, gt=0, description="prompt tokens a second, images' included"
    )
    step_s: float = Field(default=0.012, gt=0, description="seconds of a decode step, and ...")
    step_per_sequence_s: float = Field(
        default=0.0002, ge=0, description="... what each running sequence adds to it"
    )


class ServerShape(StrictModel):
    """Each of the rollout servers; its world size is `replicas * tensor_parallel_size`."""

    replicas: int = Field(default=1, ge=1, description="engines of each server")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs of each engine")
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="most sequences an engine decodes at once; null: `decode_batch_size` a GPU",
    )


class LearnSpeed(StrictModel):
    """One forward and backward of a pack; in channel A, of one iteration of it."""

    forward_s: float = Field(default=0.1, ge=0, description="seconds of a forward and backward")
    token_s: float = Field(default=0.0001, ge=0, description="seconds for each token in the pack")


class ChannelSpeeds(StrictModel):
    target_s: float = Field(
        default=0.01, ge=0, description="seconds from a sample to its segment, per sample"
    )
    pack_s: float = Field(default=0.0005, ge=0, description="seconds of packing, per sample")
    learn: LearnSpeed = Field(default=LearnSpeed(), description="forwards and backwards")


class LearnerSpeed(StrictModel):
    """One learner process."""

    a: ChannelSpeeds = Field(default=ChannelSpeeds(), description="channel A")
    b: ChannelSpeeds = Field(default=ChannelSpeeds(), description="channel B")
    sync_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds of synchronizing gradients, once a step; with several processes",
    )
    update_s: float = Field(
        default=0.1, ge=0, description="seconds between steps: optimizer update, log, data"
    )


class PushSpeed(StrictModel):
    """New weights to the servers, all of them at once."""

    fixed_s: float = Field(default=0.5, ge=0, description="seconds of a push beside its bytes")
    gigabytes: float = Field(default=8.0, ge=0, description="of weights, 1e9 bytes each")
    gb_per_s: float = Field(default=10.0, gt=0, description="payload a second")

    @property
    def seconds(self) -> float:
        return self.fixed_s + self.gigabytes / self.gb_per_s


class Speeds(StrictModel):
    engine: EngineSpeed = Field(default=EngineSpeed(), description="each engine")
    server: ServerShape = Field(default=ServerShape(), description="each server")
    learner: LearnerSpeed = Field(default=LearnerSpeed(), description="each learner process")
    push: PushSpeed = Field(default=PushSpeed(), description="bringing weights to the servers")


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
            sample = self._data[index]
            try:
                prompt = self._lengths.prompt(sample)
            except UnreadableImage as error:
                raise error.of(sample.sample_id) from error
            target = self._lengths.target(sample)
            self._measured[index] = Tokens(prompt, target - 1, target, target)
        return self._measured[index]


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
        at = of_sample.random()
        target = _quantile(self._file.target, at)
        prompt = _quantile(self._file.prompt, of_sample.random())
        answer = _quantile(self._file.answer, of_step.random())
        corrected = self._file.corrected
        taught = target if corrected is None else _quantile(corrected, at)
        return Tokens(prompt, answer, target, taught)


def _quantile(values: Quantiles, at: float) -> int:
    places: npt.NDArray[np.float64] = np.linspace(0.0, 1.0, len(values))
    return round(float(np.interp(at, places, values)))


_ASYNC = "rollout_matching.async_rollout"
_KEYS = {
    "decode_batch_size": "rollout_matching.decode_batch_size",
    "max_new_tokens": "rollout_matching.max_new_tokens",
    "effective_batch_size": "training.effective_batch_size",
    "packing_buffer": "training.packing_buffer",
    "global_max_length": "global_max_length",
    "b_ratio": "stage2_ab.schedule.b_ratio",
    "n_softctx_iter": "stage2_ab.n_softctx_iter",
    "queue_limit": f"{_ASYNC}.queue_limit",
    "prefetch_target_packs": f"{_ASYNC}.prefetch_target_packs",
    "version_window": f"{_ASYNC}.version_window",
    "sync_every_steps": f"{_ASYNC}.sync_every_steps",
}
_MACHINES = ("servers", "ranks", "replicas", "tensor_parallel_size")

Values = Mapping[str, int | float]


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    servers: how many, each of the shape that `speeds` gives; a run of another backend has none
    or one. ranks: learner processes. steps: the first so many of the run.
    """

    config: Config
    speeds: Speeds
    lengths: Lengths
    servers: int = 1
    ranks: int = 1
    steps: int = 50

    @property
    def order(self) -> BatchOrder:
        """Which samples each step takes, as a run has it."""
        training, data = self.config.training, self.config.data
        batch = training.effective_batch_size
        return BatchOrder(self.lengths.samples, batch, self.ranks, training.seed, data.shuffle)

    @property
    def run_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.training.total_steps(self.lengths.samples)

    @property
    def world_sizes(self) -> list[int]:
        shape = self.speeds.server
        return [shape.replicas * shape.tensor_parallel_size] * self.servers

    def check(self) -> None:
        """Raise ContractError for what `start_checks` would refuse."""
        backend = self.config.rollout_matching.backend
        if backend != "server" and self.servers > 1:
            found = f"{self.servers}, and the backend is {backend}"
            raise ContractError("servers", found, "Leave them out")
        check_processes(self.config, self.ranks)
        check_step_budget(self.config, self.lengths.samples, self.ranks)

    def varied(self, mapping: dict[str, Any], values: Values) -> "Setting":
        """The same with other values. mapping: the training YAML.

        Raises:
            ContractError: values that no run can have.
        """
        config = self.config
        if given := [name for name in values if name in _KEYS]:
            for name in given:
                nested: Any = values[name]
                for key in reversed(_KEYS[name].split(".")):
                    nested = {key: nested}
                mapping = merge(mapping, nested)
            config = parse_config(mapping)
        counts = {name: int(values[name]) for name in _MACHINES if name in values}
        servers, ranks = counts.pop("servers", self.servers), counts.pop("ranks", self.ranks)
        server = self.speeds.server.model_copy(update=counts)
        speeds = self.speeds.model_copy(update={"server": server})
        return replace(self, config=config, speeds=speeds, servers=servers, ranks=ranks)


def declared_servers(config: Config) -> int:
    """As many as a run of the config asks."""
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    return 1 if server is None else len(server.servers)


def declared_shape(config: Config) -> ServerShape:
    """Of its servers, as far as the config says: of a colocated one."""
    rollout = config.rollout_matching
    size = rollout.vllm.tensor_parallel_size if rollout.backend == "colocate" else None
    return ServerShape() if size is None else ServerShape(tensor_parallel_size=size)


def parse_variation(option: str) -> tuple[str, list[int | float]]:
    """`servers=1,2` -> `("servers", [1, 2])`; raises ContractError."""
    name, _, listed = option.partition("=")
    if name not in (*_MACHINES, *_KEYS):
        keys = ", ".join((*_MACHINES, *_KEYS))
        raise ContractError("--vary", f"{name!r} is no key", f"Use one of: {keys}")
    parts = listed.split(",")
    values: list[int | float]
    try:
        values = [float(part) if name == "b_ratio" else int(part) for part in parts]
    except ValueError:
        do = f"Give numbers, e.g. {name}=1,2,4"
        raise ContractError(f"--vary {name}", f"{listed!r}", do) from None
    if name in _MACHINES and min(values) < 1:
        raise ContractError(f"--vary {name}", f"{listed!r}", "Give numbers from 1 on")
    return name, values
