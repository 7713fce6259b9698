"""One short training run, shared by the tests of everything that reads a run folder."""

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from learner.config import dump_mapping, load_mapping, merge, parse_config
from learner.data.toy import ToyData
from tests.unit.small_run import metric_lines, small_mapping

if TYPE_CHECKING:
    from learner.analysis.evaluation.scores import ScoredAnswer

STEPS = 3


@dataclass(frozen=True)
class TrainedRun:
    """A finished run. folder: `training.output_dir`. config: its YAML. printed: by `train`."""

    folder: Path
    config: Path
    printed: str

    def lines(self, key: str) -> list[dict[str, Any]]:
        return metric_lines(self.folder, key)

    def answers(self, step: int) -> "list[ScoredAnswer]":
        from learner.analysis.evaluation.folder import read_answers

        return read_answers(self.folder / "evaluations" / f"step_{step:06d}")

    def copy(self, folder: Path) -> "TrainedRun":
        run = shutil.copytree(self.folder, folder / "run")
        config = folder / "run.yaml"
        mapping = load_mapping(self.config)
        config.write_text(dump_mapping(merge(mapping, {"training": {"output_dir": str(run)}})))
        return TrainedRun(run, config, self.printed)


def trained(config: Path, **training: Any) -> TrainedRun:
    from learner.training.input_checks import check_inputs  # seconds, which pure tests do without
    from learner.training.train import train

    parsed = parse_config(merge(load_mapping(config), {"training": training}))
    console = Console(file=io.StringIO(), width=400)
    folder = train(parsed, check_inputs(parsed), [], console)
    assert isinstance(console.file, io.StringIO)
    return TrainedRun(folder, config, console.file.getvalue())


def write_config(folder: Path, model: Path, data: ToyData, /, **sections: Any) -> Path:
    """Steps of both channels, answered by the learner; each is evaluated and saved."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 1}
    own = {
        "training": {"max_steps": STEPS, "save_steps": 1, **evaluation},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {
            "rollout_backend": "hf",
            "max_new_tokens": 12,
            "decode_batch_size": 4,
            "eval_detection": {"enabled": True, "save_answers": True},
        },
    }
    config = folder / "run.yaml"
    mapping = small_mapping(model, data, folder / "run", **merge(own, sections))
    config.write_text(dump_mapping(mapping))
    return config


@pytest.fixture(scope="session")
def trained_run(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> TrainedRun:
    """Read only; `copy` is for tests that change it."""
    folder = tmp_path_factory.mktemp("trained_run")
    return trained(write_config(folder, toy_checkpoint, toy_data))
