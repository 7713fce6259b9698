"""Which trackers a run may report to, and what they get of it."""

import io
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import wandb
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.config.trackers import Tracker, importable, needs, require_trackers
from learner.data.toy import ToyData
from learner.distributed.peers import SingleProcess
from learner.models.load import load_model
from learner.runs.resume import BEGINNING
from learner.training.run_log import CallLog, ProgressDisplay, tracker_callbacks
from learner.training.start_checks import check_inputs
from learner.training.train import RunParts, build_runner, build_trainer, train
from learner.training.trainer import build_optimizer, training_arguments
from shared_contracts.errors import ContractError, RunError
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.usefixtures("one_thread")

# get_available_reporting_integrations does not look for it.
UNSEEN = {"flyte"}
KUBEFLOW = {"KUBEFLOW_TRAINER_SERVER_URL": "https://controller"}


@pytest.fixture
def mapping(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> dict[str, Any]:
    return small_mapping(toy_checkpoint, toy_data, tmp_path / "run")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """wandb writes to files here, and is ended after the test."""
    for name, value in {"MODE": "offline", "SILENT": "true", "PROJECT": "shapes"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield tmp_path / "wandb"
    wandb.teardown()


def reporting(mapping: dict[str, Any], *trackers: str) -> Config:
    return parse_config(merge(mapping, {"training": {"report_to": list(trackers)}}))


# --- which there are


def test_the_names_are_those_of_transformers() -> None:
    assert set(get_args(Tracker)) == set(INTEGRATION_TO_CALLBACK)


def test_what_is_installed_here_is_what_transformers_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(*next(iter(KUBEFLOW.items())))
    found = set()
    for tracker in get_args(Tracker):
        if all(importable(module) for module in needs(tracker).modules):
            require_trackers([tracker], KUBEFLOW)
            found.add(tracker)
    assert found - UNSEEN == set(get_available_reporting_integrations()) - UNSEEN
    assert {"tensorboard", "wandb"} <= found


@pytest.mark.parametrize(
    ("report_to", "where"),
    [
        (["aim"], "training.report_to[0]"),
        (["none", "wandb"], "training.report_to"),
        (["wandb", "wandb"], "training.report_to"),
        ("wandb", "training.report_to"),
    ],
)
def test_names_that_say_nothing_clear_are_refused(
    mapping: dict[str, Any], report_to: Any, where: str
) -> None:
    with pytest.raises(ContractError) as caught:
        parse_config(merge(mapping, {"training": {"report_to": report_to}}))
    assert caught.value.where == where


@pytest.mark.req("CFG-09")
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_loaded(
    mapping: dict[str, Any],
) -> None:
    absent = "azure_ml"
    assert not importable("azureml.core.run")
    with pytest.raises(ContractError, match="pip install azureml-core") as caught:
        check_inputs(reporting(mapping, "tensorboard", absent))
    assert caught.value.where == "training.report_to[1]"
    with pytest.raises(ContractError, match="this is no TrainJob"):
        require_trackers(["kubeflow"], {})


# --- what they get


def records(folder: Path) -> Iterator[Record]:
    """What wandb wrote offline, whose file is a log of leveldb behind 7 bytes of its own."""
    (file,) = folder.glob("offline-run-*/run-*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.req("MET-03")
def test_a_run_reaches_weights_and_biases_with_its_config_name_and_numbers(
    mapping: dict[str, Any], offline: Path
) -> None:
    config = reporting(mapping, "wandb")
    folder = train(config, check_inputs(config), [], Console(file=io.StringIO()))
    wandb.finish()
    wandb.teardown()  # only with its service's end is the file whole
    seen = list(records(offline))
    (run,) = (record.run for record in seen if record.WhichOneof("record_type") == "run")
    assert (run.display_name, run.project) == ("small", "shapes")
    updates = [item for record in seen for item in record.config.update]
    shown = {item.key: json.loads(item.value_json) for item in updates}
    assert shown["rollmatch"]["training"]["effective_batch_size"] == 4
    assert shown["rollmatch"]["model"]["model"] == str(config.model.model)
    rows = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in seen
        if record.WhichOneof("record_type") == "history"
    ]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in steps] == [1, 2, 3]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "loss/A2_coord/bbox_ciou"
    assert [row[f"train/{key}"] for row in steps] == [line[key] for line in logged if key in line]
    assert not (folder / "tensorboard").exists(), "it was not named"


class Second(SingleProcess):
    rank = 1


@pytest.mark.parametrize(("report_to", "rank"), [("tensorboard", 0), ("tensorboard", 1)])
def test_only_the_first_process_reports(mapping: dict[str, Any], report_to: str, rank: int) -> None:
    config = reporting(mapping, report_to)
    folder = config.training.output_dir
    folder.mkdir()
    inputs, loaded = check_inputs(config), load_model(config)
    optimizer = build_optimizer(loaded.model, config.training)
    peers = Second() if rank else SingleProcess()
    parts = RunParts(config, inputs, loaded, optimizer, None, CallLog(folder), peers)
    display = ProgressDisplay(Console(file=io.StringIO()), "small")
    build_trainer(parts, build_runner(parts), lambda step: {}, display)
    assert (folder / "tensorboard").exists() == (rank == 0)


def test_a_run_may_report_to_nothing(mapping: dict[str, Any]) -> None:
    assert tracker_callbacks(reporting(mapping, "none").training, BEGINNING) == []


# --- when they break


def begun(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The callback of the only tracker, and what Trainer hands to it."""
    (callback,) = tracker_callbacks(config.training, BEGINNING)
    arguments = training_arguments(config, config.training.output_dir)
    given = (arguments, TrainerState(), TrainerControl())
    callback.on_train_begin(*given, model=None)
    return callback, given


def test_a_tracker_that_breaks_later_is_told_of_once_and_the_run_goes_on(
    mapping: dict[str, Any], offline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, given = begun(reporting(mapping, "wandb"))
    wandb.finish()
    with caplog.at_level(logging.WARNING, "learner.training.run_log"):
        callback.on_log(*given, logs={"loss": 1.0})
        callback.on_log(*given, logs={"loss": 2.0})
    (said,) = [r.getMessage() for r in caplog.records if r.name == "learner.training.run_log"]
    assert said.startswith("the tracker wandb misses numbers of this run")


def test_a_tracker_that_does_not_start_ends_the_run_by_name(
    mapping: dict[str, Any], offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(RunError, match=r"(?s)the tracker wandb does not start: .*sideways"):
        begun(reporting(mapping, "wandb"))


def hooks() -> list[str]:
    return [event for event in dir(TrainerCallback) if event.startswith("on_")]


def breaking(event: str) -> type[TrainerCallback]:
    """The callback of a tracker that breaks at one event."""

    def broken(self: TrainerCallback, *given: Any, **named: Any) -> None:
        raise OSError("the tracker is full")

    def made(self: TrainerCallback) -> None:
        self.tracker = None  # type: ignore[attr-defined]  # as codecarbon's

    return type("Breaking", (TrainerCallback,), {"__init__": made, event: broken})


@pytest.mark.parametrize("event", hooks())
def test_whatever_event_a_tracker_breaks_at_it_is_told_by_its_name(
    mapping: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    event: str,
) -> None:
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "codecarbon", breaking(event))
    config = reporting(mapping, "codecarbon")
    (callback,) = tracker_callbacks(config.training, BEGINNING)
    arguments = training_arguments(config, config.training.output_dir)
    given = (arguments, TrainerState(), TrainerControl())
    if event in ("on_init_end", "on_train_begin"):
        with pytest.raises(RunError, match=r"the tracker codecarbon does not start: .* is full"):
            getattr(callback, event)(*given)
        return
    with caplog.at_level(logging.WARNING, "learner.training.run_log"):
        for other in hooks():
            getattr(callback, other)(*given)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "learner.training.run_log"]
    assert said.startswith("the tracker codecarbon misses numbers of this run")


def test_tensorboard_is_guarded_as_the_others_are(
    mapping: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    callback, given = begun(reporting(mapping, "tensorboard"))
    given[1].is_world_process_zero = True

    class Full:
        def add_scalar(self, *given: Any) -> None:
            raise OSError("No space left on device")

    callback.tb_writer = Full()
    with caplog.at_level(logging.WARNING, "learner.training.run_log"):
        callback.on_log(*given, logs={"loss": 1.0})
    (said,) = [r.getMessage() for r in caplog.records if r.name == "learner.training.run_log"]
    assert said.startswith("the tracker tensorboard misses numbers")
