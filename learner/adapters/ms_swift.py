"""A plugin of ms-swift 4.6 that has `swift sft` run a training YAML of ours (RUN-02).

    ROLLMATCH_CONFIG=train.yaml swift sft --external_plugins learner/adapters/ms_swift.py \\
        --model CHECKPOINT --model_type rollmatch --tuner_type rollmatch --dataset rollmatch

What it registers, each in the table that ms-swift keeps for it:

    model type   our loading of weights, with transformers' own forward
    template     samples stay as they are: no tokens, no resized images
    data set     one row per sample of data.train_jsonl
    tuner        the model as it is; the YAML's tuner is put on by the trainer
    trainer      for the task `causal_lm`, which is what `swift sft` does: `StepTrainer`

ms-swift parses its command, loads, prepares and keeps its records as ever; the step, the losses,
the logs and the checkpoints are those of `learner train`. Only `swift sft` imports this file.
"""

import os
import sys
from functools import partial
from typing import Any, cast

from datasets import Dataset
from rich.console import Console
from swift.dataset import DatasetMeta, register_dataset
from swift.dataset.dataset_meta import BaseDatasetLoader
from swift.model import ModelLoader, ModelMeta, register_model
from swift.template import Template, TemplateMeta, register_template
from swift.trainers import TrainerFactory
from swift.tuner_plugin import PeftTuner, tuners_map
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, TrainerState
from transformers.utils.logging import disable_progress_bar

from learner.adapters.swift_command import NAME, check_command, config_path
from learner.config import load_config
from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import LoadedModel, load_weights, prepared, weight_dtype
from learner.runs.atomic_files import expect_full_disks_in_threads
from learner.runs.console import tell
from learner.training.input_checks import RunInputs, check_inputs, generates
from learner.training.server_checks import reach_servers
from learner.training.train import train_as
from shared_contracts.cli import run_cli
from shared_contracts.machine import BY_BUS, CUDA_ORDER


class _Run:
    """The run of the YAML, read when ms-swift imports this file."""

    config: Config
    inputs: RunInputs

    def read(self) -> None:
        os.environ[CUDA_ORDER] = BY_BUS  # as in `run_program`
        self.config = load_config(config_path(os.environ))
        check_command(sys.argv[1:], self.config, os.environ)
        self.inputs = check_inputs(self.config)


_RUN = _Run()


class Weights(ModelLoader):
    """Loads as `learner train` does."""

    def get_model(self, *_: Any, **__: Any) -> PreTrainedModel:
        return load_weights(_RUN.config)


class RawSamples(Template):
    """Encodes nothing: what tokens a sample becomes is the step's affair."""

    def encode(self, inputs: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return inputs

    def print_inputs(self, inputs: dict[str, Any]) -> None:
        """There is nothing encoded to show."""


class TrainJsonl(BaseDatasetLoader):
    """A row for each sample of `data.train_jsonl`, which was read and checked before."""

    def __init__(self, **_: Any) -> None:
        """Nothing is converted, so there is nothing to set."""

    def load(self, *_: Any, **__: Any) -> Dataset:
        return Dataset.from_list([{"sample_id": sample.sample_id} for sample in _RUN.inputs.train])


class TunerOfTheYaml(PeftTuner):
    """Leaves the model to the trainer, which seeds the run before it makes adapters."""

    @staticmethod
    def prepare_model(args: Any, model: nn.Module) -> nn.Module:
        return model


class SwiftTrainer:
    """What `swift sft` takes for its trainer: a run of `StepTrainer` over ms-swift's model.

    args: ms-swift's, for its own records alone.
    state: `StepTrainer`'s, once it has trained.
    """

    def __init__(self, model: PreTrainedModel, args: Any, **_: Any) -> None:
        self.args = args
        self.state = TrainerState()
        self._model = model

    def train(self, resume_from_checkpoint: None) -> None:
        """Run the YAML, which says itself where it goes on."""
        run_cli(self._train)

    def _train(self) -> None:
        config, inputs, console = _RUN.config, _RUN.inputs, Console()
        if over := inputs.finished(config.training):
            tell(console, over)
            return
        disable_progress_bar()
        expect_full_disks_in_threads()
        clients = []
        if generates(config):
            clients = reach_servers(config, os.environ, inputs.answered, partial(tell, console))
        self.state = train_as(SINGLE_PROCESS, config, inputs, clients, console, self._loaded).state

    def _loaded(self, config: Config) -> LoadedModel:
        # That of ms-swift's own inference would be saved with the checkpoints.
        own = cast(GenerationConfig, self._model.origin_generation_config)
        self._model.generation_config = own
        return prepared(config, self._model)


def _register() -> None:
    """Each name in the table that ms-swift has for its kind."""
    dtype = weight_dtype(_RUN.config)
    data = str(_RUN.config.data.train_jsonl)
    register_model(
        ModelMeta(NAME, [], Weights, template=NAME, torch_dtype=dtype, is_multimodal=True)
    )
    register_template(TemplateMeta(NAME, [], ["{{QUERY}}"], None, template_cls=RawSamples))
    register_dataset(DatasetMeta(dataset_name=NAME, dataset_path=data, loader=TrainJsonl))
    tuners_map[NAME] = TunerOfTheYaml
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{SwiftTrainer.__name__}"


run_cli(_RUN.read)
_register()
