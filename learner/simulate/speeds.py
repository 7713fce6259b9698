"""How fast engines, learner and transport are: a small YAML, or fitted (see `fit`).

The defaults are round numbers of the order of a 4B model on one data-centre GPU; they are
measured nowhere. A plan that matters has its own.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from learner.config.yaml12 import read_document
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import StrictModel, contract_errors


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


def load_speeds(path: Path) -> Speeds:
    """The speeds of a YAML file; ContractErrors names every fault in it."""
    return read_strict(path, Speeds)


M = TypeVar("M", bound=StrictModel)


def read_strict(path: Path, model: type[M]) -> M:
    """A YAML file as `model`; ContractErrors names every fault and its line."""
    document = read_document(path)
    try:
        return model.model_validate(document.mapping)
    except ValidationError as error:
        faults = contract_errors(error, model)
    lines = {".".join(map(str, steps)): line for steps, line in document.lines.items()}
    raise ContractErrors(
        [
            ContractError(
                f"{path}:{lines.get(fault.where, 1)} {fault.where}", fault.found, fault.do
            )
            for fault in faults
        ]
    )
