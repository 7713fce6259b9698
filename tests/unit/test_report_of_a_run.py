"""Training leaves its report, whether it ends by itself or by an error."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import LoadedModel, load_model
from learner.training.start_checks import check_inputs
from learner.training.train import train, train_as
from shared_contracts.errors import RunError
from tests.unit.small_run import small_config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.req("MET-03", "REPORT-01")]


def chart(page: str, name: str) -> dict[str, Any]:
    data = re.search(r'id="charts-data">(.*?)</script>', page)
    assert data is not None
    found: dict[str, Any] = json.loads(data[1])[name]
    return found


def test_a_run_leaves_its_report(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> None:
    config = small_config(toy_checkpoint, toy_data, tmp_path / "run")
    told = io.StringIO()
    folder = train(config, check_inputs(config), [], Console(file=told))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Finished: 3 steps in " in page
    assert len(chart(page, "loss")["data"][0]["y"]) == 3
    assert f"Report: {folder}/report.html" in told.getvalue()


def test_a_run_that_an_error_ended_leaves_the_report_of_its_steps(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = small_config(toy_checkpoint, toy_data, folder)

    def breaks(*_: Any) -> None:
        log = folder / "metrics.jsonl"
        if log.is_file() and len(log.read_text().splitlines()) == 2:
            raise RunError("the accelerator is gone")

    def load(config: Config) -> LoadedModel:
        loaded = load_model(config)
        loaded.model.register_forward_pre_hook(breaks)
        return loaded

    with pytest.raises(RunError, match="the accelerator is gone"):
        train_as(SINGLE_PROCESS, config, check_inputs(config), [], Console(quiet=True), load)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Ended by an error at step 2 of 3." in page
    assert "The run was ended by an error: the accelerator is gone" in page
    assert len(chart(page, "loss")["data"][0]["y"]) == 2
