"""A learner process of a test. It runs one config after the other.

    torchrun ... -m tests.integration.process_run OUT CONFIG ...

After each, writes OUT/STEM-RANK.pt (STEM: of CONFIG): whole `weights`, `rates` (learning rates by
parameter), `pushed` (what it would push), `gathered` (dtypes of a layer's weight in forwards).
"""

import io
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.config import load_config
from learner.config.schema import Config
from learner.distributed.peers import Peers
from learner.distributed.process_group import open_peers
from learner.models.load import LoadedModel, load_model
from learner.objectives import logit_stats
from learner.rollout.sync.weights import GatheredWeights
from learner.training.input_checks import check_inputs, learner_processes
from learner.training.train import train_as
from learner.training.trainer import StepTrainer

# The head works on several chunks of each pack, as at full size: 16 rows of the toy vocabulary.
CHUNK_ELEMENTS = 16 * 1342


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(trainer: StepTrainer, rank: int) -> dict[str, object]:
    model, optimizer = trainer.model, trainer.optimizer
    assert model is not None
    assert optimizer is not None
    gathered = GatheredWeights(model, sends=rank == 0)
    gathered.gather("float32")
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "weights": {name: whole(w).detach().clone() for w, name in names.items()},
        "rates": {names[p]: g["lr"] for g in optimizer.param_groups for p in g["params"]},
        "pushed": dict(gathered.tensors("float32")) if rank == 0 else {},
    }


def run(peers: Peers, config_file: Path, out: Path) -> None:
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it in the run before
    config = load_config(config_file)
    gathered: set[torch.dtype] = set()

    def load(config: Config) -> LoadedModel:
        loaded = load_model(config)
        layer = next(m for m in loaded.model.modules() if isinstance(m, nn.Linear))
        layer.register_forward_hook(lambda own, *_: gathered.add(own.weight.dtype))
        return loaded

    inputs, console = check_inputs(config), Console(file=io.StringIO())
    trainer = train_as(peers, config, inputs, [], console, load)
    state = state_of(trainer, peers.rank) | {"gathered": gathered}
    torch.save(state, out / f"{config_file.stem}-{peers.rank}.pt")


def main() -> None:
    out, *configs = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    logit_stats.HEAD_ELEMENTS = CHUNK_ELEMENTS
    with open_peers(learner_processes(os.environ)) as peers:
        for config in configs:
            run(peers, config, out)


if __name__ == "__main__":
    main()
