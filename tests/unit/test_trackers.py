"""Trackers of a run: names, refusals, reported numbers, failures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from learner.config.schema import Config
from learner.runs.checkpoint import BEGINNING
from learner.training.input_checks import check_inputs
from learner.training.run_log import tracker_callbacks
from learner.training.trainer import training_arguments
from shared_contracts.errors import RunError
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf, metric_lines, run_quietly


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """wandb writes to files here, and is ended after the test."""
    for name, value in {"MODE": "offline", "SILENT": "true", "PROJECT": "shapes"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield tmp_path / "wandb"
    wandb.teardown()


def reporting(config_of: ConfigOf, *trackers: str) -> Config:
    return config_of(training={"report_to": list(trackers)})


@pytest.mark.req("CFG-09")
def test_missing_tracker_is_refused_before_anything_is_loaded(config_of: ConfigOf) -> None:
    with refused("training.report_to[1]", "pip install azureml-sdk"):
        check_inputs(reporting(config_of, "tensorboard", "azure_ml"))


@pytest.mark.slow
@pytest.mark.req("MET-03")
def test_wandb_gets_config_name_and_numbers_of_a_run(config_of: ConfigOf, offline: Path) -> None:
    config = reporting(config_of, "wandb")
    folder = run_quietly(config)
    run = wandb.run
    assert run is not None
    assert (run.name, run.project) == ("small", "shapes")
    assert run.config["rollmatch"]["training"]["effective_batch_size"] == 4
    assert run.config["rollmatch"]["model"]["model"] == str(config.model.model)
    logged = metric_lines(folder)
    key = "loss/A2_coord/bbox_ciou"
    last = [line for line in logged if key in line][-1]
    assert run.summary["train/global_step"] == last["step"] == 3
    assert run.summary[f"train/{key}"] == last[key]
    assert not (folder / "tensorboard").exists(), "it was not named"


def test_several_trackers_are_callbacks_of_several_classes(config_of: ConfigOf) -> None:
    callbacks = tracker_callbacks(reporting(config_of, "tensorboard", "wandb").training, BEGINNING)
    assert len({type(each) for each in callbacks}) == len(callbacks) == 2


@pytest.mark.parametrize("event", ["on_train_begin", "on_log"])
def test_a_tracker_that_breaks_ends_a_run_that_starts_and_is_left_out_of_one_that_goes_on(
    config_of: ConfigOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    event: str,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the tracker is full")

    tracker = type("Breaking", (TrainerCallback,), {"tracker": None, event: broken})
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "codecarbon", tracker)
    config = reporting(config_of, "codecarbon")
    arguments = training_arguments(config, config.training.output_dir)
    (callback,) = tracker_callbacks(config.training, BEGINNING)
    given = (arguments, TrainerState(), TrainerControl())
    if event == "on_train_begin":
        with pytest.raises(RunError, match=r"tracker codecarbon does not start: .* is full"):
            callback.on_train_begin(*given)
        return
    for _ in range(2):
        callback.on_log(*given)
    (text,) = [r.getMessage() for r in caplog.records if r.name == "learner.training.run_log"]
    assert text.startswith("the tracker codecarbon misses numbers of this run")
