"""A plugin with which `swift sft` of ms-swift 4.6 runs a training YAML (RUN-02).

    ROLLMATCH_CONFIG=train.yaml swift sft --external_plugins learner/adapters/ms_swift.py \\
        --model CHECKPOINT --model_type rollmatch --tuner_type rollmatch --dataset rollmatch

It adds an entry to five tables of ms-swift:

    model type   loads weights as `learner train` does
    template     returns samples unchanged: no tokens, no resized images
    data set     one row per sample of data.train_jsonl
    tuner        returns the model unchanged; the trainer applies the YAML's tuner
    trainer      `SwiftTrainer` for the task `causal_lm`, the only one of `swift sft`

ms-swift parses its command, loads the model and writes its own records. Steps, losses, logs and
checkpoints are those of `learner train`. Only `swift sft` imports this file.
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
    """The run of the YAML; `read` is called when ms-swift imports this file."""

    config: Config
    inputs: RunInputs

    def read(self) -> None:
        os.environ[CUDA_ORDER] = BY_BUS  # as in `run_program`
        self.config = load_config(config_path(os.environ))
        check_command(sys.argv[1:], self.config, os.environ)
        self.inputs = check_inputs(self.config)


_RUN = _Run()
run_cli(_RUN.read)


class Weights(ModelLoader):
    def get_model(self, *_: Any, **__: Any) -> PreTrainedModel:
        return load_weights(_RUN.config)


class RawSamples(Template):
    def encode(self, inputs: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return inputs

    def print_inputs(self, inputs: dict[str, Any]) -> None:
        """Print nothing."""


class TrainJsonl(BaseDatasetLoader):
    """A row for each sample of `data.train_jsonl`, which `check_inputs` has read."""

    def __init__(self, **_: Any) -> None:
        """Ignore the settings of ms-swift."""

    def load(self, *_: Any, **__: Any) -> Dataset:
        return Dataset.from_list([{"sample_id": sample.sample_id} for sample in _RUN.inputs.train])


class TunerOfTheYaml(PeftTuner):
    """Returns the model unchanged: the trainer seeds the run before it adds adapters."""

    @staticmethod
    def prepare_model(args: Any, model: nn.Module) -> nn.Module:
        return model


class SwiftTrainer:
    """The trainer of `swift sft`: a run of `StepTrainer` with the model that ms-swift loaded.

    args: ms-swift's, for its own records alone. state: `StepTrainer`'s after training.
    """

    def __init__(self, model: PreTrainedModel, args: Any, **_: Any) -> None:
        self.args = args
        self.state = TrainerState()
        self._model = model

    def train(self, resume_from_checkpoint: None) -> None:
        """Run the YAML; its `training.resume` decides where to start."""
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
        # ms-swift has set one for its own inference, which checkpoints would contain.
        own = cast(GenerationConfig, self._model.origin_generation_config)
        self._model.generation_config = own
        return prepared(config, self._model)


_DTYPE, _DATA = weight_dtype(_RUN.config), str(_RUN.config.data.train_jsonl)
register_model(ModelMeta(NAME, [], Weights, template=NAME, torch_dtype=_DTYPE, is_multimodal=True))
register_template(TemplateMeta(NAME, [], ["{{QUERY}}"], None, template_cls=RawSamples))
register_dataset(DatasetMeta(dataset_name=NAME, dataset_path=_DATA, loader=TrainJsonl))
tuners_map[NAME] = TunerOfTheYaml
TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{SwiftTrainer.__name__}"
