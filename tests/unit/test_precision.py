"""Mixed precision: products in 16 bits, weights and reductions in 32 (FULL-03)."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import LoadedModel, load_model
from learner.training.input_checks import check_inputs
from learner.training.train import train_as
from learner.training.trainer import StepTrainer
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.req("FULL-03")


class Seen:
    """The types of a run's products, and of what each forward returns to the losses.

    proved: of the logits of the check of packing, which runs before (PACK-04).
    """

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.returned: set[torch.dtype] = set()
        self.proved: set[torch.dtype] = set()

    def load(self, config: Config) -> LoadedModel:
        loaded = load_model(config)
        for module in loaded.model.modules():
            if isinstance(module, nn.Linear) and module.out_features < 1000:
                module.register_forward_hook(lambda _, __, found: self.products.add(found.dtype))
        loaded.model.register_forward_hook(self._note)
        return loaded

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output.logits, Tensor):
            self.proved.add(output.logits.dtype)
            return
        parts = [part for part in output.logits if isinstance(part, Tensor)]
        tensors = [part for part in parts if part.is_floating_point()]
        assert tensors
        self.returned |= {tensor.dtype for tensor in tensors}


def trained(config: Config, seen: Seen) -> StepTrainer:
    console = Console(file=io.StringIO())
    return train_as(SINGLE_PROCESS, config, check_inputs(config), [], console, seen.load)


@pytest.mark.req("PACK-04")
def test_a_run_in_16_bits_trains_float32_weights_by_float32_statistics(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    seen = Seen()
    short = {"max_steps": 1, "save_strategy": "no"}
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run", training=short)
    config = parse_config(merge(small, {"model": {"torch_dtype": "bfloat16"}}))
    trainer = trained(config, seen)
    assert seen.products == {torch.bfloat16}
    assert seen.returned == {torch.float32}
    assert seen.proved == {torch.bfloat16}
    assert trainer.model is not None
    assert trainer.optimizer is not None
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    moments = [v for state in trainer.optimizer.state.values() for v in state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert trainer.accelerator.mixed_precision == "no"
    assert not hasattr(trainer.model, "_original_forward"), "accelerate has wrapped it"
