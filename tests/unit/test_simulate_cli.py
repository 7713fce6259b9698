"""`learner simulate` on the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_resolved
from learner.config.yaml12 import read_mapping
from learner.operate.simulate.inputs import Drawn, LengthsFile, Speeds, read_strict
from shared_contracts.errors import ContractError
from tests.unit.simulated import simulated_config

LENGTHS = "samples: 64\nprompt: [40, 90]\nanswer: [5, 80]\ntarget: [10, 85]\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(dump_resolved(simulated_config()))
    (tmp_path / "lengths.yaml").write_text(LENGTHS)
    return tmp_path


def simulate(files: Path, *options: str) -> str:
    """What is printed; what the command ends with is raised."""
    base = ["simulate", "--config", str(files / "run.yaml")]
    result = CliRunner().invoke(app, [*base, *options])
    if result.exception is not None:
        raise result.exception
    return result.output


def with_lengths(files: Path, *options: str) -> str:
    return simulate(files, "--lengths", str(files / "lengths.yaml"), *options)


def test_it_prints_a_step_of_each_channel_and_writes_the_same_numbers(files: Path) -> None:
    speeds, out = files / "new" / "speeds.yaml", files / "newer" / "out.json"
    printed = with_lengths(files, "--json", str(out), "--save-speeds", str(speeds))
    report: dict[str, Any] = json.loads(out.read_text())
    assert speeds.is_file()
    for channel in ("A", "B"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"{channel}  ")][:1]
        assert f"{report['channels'][channel]['step_s']:.2f} s" in row
    assert len(report["steps"]) == report["run_steps"] == 12
    assert report["speeds"]["engine"]["step_s"] == 0.012


def test_a_sweep_has_a_row_for_each_combination_and_tells_what_no_run_could_have(
    files: Path,
) -> None:
    options = ("--vary", "servers=1,2", "--vary", "ranks=1,2,3", "--json", str(files / "out.json"))
    printed = with_lengths(files, *options)
    rows = json.loads((files / "out.json").read_text())["rows"]
    assert [row["values"] for row in rows] == [
        {"servers": servers, "ranks": ranks} for servers in (1, 2) for ranks in (1, 2)
    ]
    assert [row["rollout_gpus"] for row in rows] == [1, 1, 2, 2]
    assert "servers=1 ranks=3 is left out: training.effective_batch_size" in printed


def test_servers_of_another_backend_are_not_counted(files: Path) -> None:
    two = [{"base_url": f"http://a:{port}", "group_port": port + 9} for port in (8000, 8001)]
    own = {"rollout_backend": "hf", "vllm": {"server": {"servers": two}}}
    (files / "run.yaml").write_text(dump_resolved(simulated_config(rollout_matching=own)))
    assert "rank 0" in with_lengths(files)


def test_a_varied_key_is_the_one_of_the_training_yaml(files: Path) -> None:
    out = files / "out.json"
    with_lengths(files, "--vary", "b_ratio=0.25,1.0", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    steps = [{name: c["steps"] for name, c in row["channels"].items()} for row in rows]
    assert steps == [{"A": 9, "B": 3}, {"B": 12}]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--vary", "server=1"), "--vary"),
        (("--vary", "servers=1,x"), "--vary servers"),
        (("--vary", "servers=0"), "--vary servers"),
        (("--vary", "queue_limit=0"), "rollout_matching.async_rollout.queue_limit"),
        (("--speeds", "none.yaml"), "none.yaml"),
        (("--speeds", "a.yaml", "--from-run", "b"), "--speeds"),
        (("--from-run", "no_run"), "no_run"),
        (("--json", "{files}/run.yaml"), "--json"),
    ],
)
def test_bad_options_are_told_in_three_parts(
    files: Path, options: tuple[str, ...], where: str
) -> None:
    with pytest.raises(ContractError) as refused:
        with_lengths(files, *(option.format(files=files) for option in options))
    assert refused.value.where == where
    assert refused.value.found
    assert refused.value.do


@pytest.mark.parametrize(
    ("option", "text", "where", "line"),
    [
        ("--speeds", "engine:\n  step_s: 0\n", "engine.step_s", 2),
        ("--speeds", "engine:\n  steps: 1\n", "engine.steps", 2),
        ("--speeds", "push: {gb_per_s: fast}\n", "push.gb_per_s", 1),
        ("--lengths", LENGTHS.replace("[5, 80]", "[80, 5]"), "answer", 3),
        ("--lengths", LENGTHS.replace("[5, 80]", "[5]"), "answer", 3),
        ("--lengths", LENGTHS.replace("samples: 64", "samples: 0"), "samples", 1),
    ],
)
def test_faults_of_its_files_are_told_with_their_line(
    files: Path, option: str, text: str, where: str, line: int
) -> None:
    faulty = files / "faulty.yaml"
    faulty.write_text(text)
    with pytest.raises(ContractError) as refused:
        simulate(files, option, str(faulty))
    assert refused.value.where == f"{faulty}:{line} {where}"


def test_the_page_shows_every_speed_with_its_default(files: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    shown, lengths = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (files / "shown.yaml").write_text(shown)
    (files / "shown_lengths.yaml").write_text(lengths)
    assert read_mapping(files / "shown.yaml") == Speeds().model_dump()
    assert Drawn(read_strict(files / "shown_lengths.yaml", LengthsFile), seed=0).samples > 0


def test_saved_speeds_are_those_that_were_simulated(files: Path) -> None:
    (files / "speeds.yaml").write_text("engine: {step_s: 0.5}\n")
    saved = files / "saved.yaml"
    with_lengths(files, "--speeds", str(files / "speeds.yaml"), "--save-speeds", str(saved))
    assert read_strict(saved, Speeds) == read_strict(files / "speeds.yaml", Speeds) != Speeds()


def test_it_loads_neither_torch_nor_transformers(files: Path) -> None:
    code = (
        "import sys; from learner.cli import main; sys.argv = ['learner', 'simulate', '--config', "
        f"'{files}/run.yaml', '--lengths', '{files}/lengths.yaml']\n"
        "try:\n    main()\n"
        "finally:\n    sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.req("FULL-05")
def test_speeds_that_were_not_measured_are_named_as_such(files: Path) -> None:
    said = "note: the speeds are round numbers that were not measured"
    assert said in with_lengths(files, "--steps", "2")
    speeds = files / "speeds.yaml"
    speeds.write_text("engine: {step_s: 0.5}\n")
    assert said not in with_lengths(files, "--steps", "2", "--speeds", str(speeds))
