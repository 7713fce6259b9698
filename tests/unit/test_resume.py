"""Where a run starts, what is refused, and that a resumed run equals an uninterrupted one."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import pytest
from rich.console import Console
from safetensors.torch import load_file

from learner.commands import run as run_command
from learner.config import dump_resolved, merge
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.runs.checkpoint import (
    BEGINNING,
    Checkpoints,
    RunFacts,
    Start,
    data_digest,
    find_start,
    log_sizes,
    truncate_logs,
)
from learner.runs.run_folder import RESOLVED
from learner.training.input_checks import check_inputs
from learner.training.run_log import open_run_folder
from learner.training.train import train, train_as
from shared_contracts.errors import ContractError, ContractErrors, RunError
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf

STEPS = 4
WRITER = """
import sys; from pathlib import Path
from learner.runs.run_folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True); sys.stdin.read()
"""

OWN = {
    "training": {
        "max_steps": STEPS,
        "save_steps": 1,
        "lr_scheduler_type": "constant",
        "effective_batch_size": 8,
        "warmup_ratio": 0.0,
        "resume": "auto",
    },
    "stage2_ab": {"schedule": {"b_ratio": 0.5}},
    "rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 4, "decode_batch_size": 4},
}


@pytest.fixture
def resumable(config_of: ConfigOf) -> ConfigOf:
    """A run of two epochs with both channels, answers of the learner and a constant rate."""
    return lambda **sections: config_of(**merge(OWN, sections))


def with_checkpoint(config: Config, step: int, peers: Peers = SINGLE_PROCESS, **state: Any) -> Path:
    """A run folder with a checkpoint that has only a manifest."""
    folder = config.training.output_dir
    folder.mkdir(exist_ok=True)
    (folder / RESOLVED).write_text(dump_resolved(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n' * step)
    facts = RunFacts(4, data_digest(config.data.train_jsonl), log_sizes(folder))
    checkpoints = Checkpoints(folder, None, lambda: facts, lambda: state, peers)
    part = checkpoints.unfinished / f"checkpoint-{step}"
    checkpoints.save(step, lambda: part.mkdir(parents=True, exist_ok=True))
    return folder / f"checkpoint-{step}"


@pytest.mark.req("RUN-01")
def test_a_folder_with_a_run_is_refused_unless_resume_is_auto(resumable: ConfigOf) -> None:
    checkpoint = with_checkpoint(resumable(), 4)
    start = find_start(resumable(), processes=1)
    assert (start.step, start.weights_version, start.folder) == (4, 4, str(checkpoint))
    never = resumable(training={"resume": "never"})
    with refused("training.output_dir", "holds another run", "training.resume to auto"):
        find_start(never, processes=1)
    (checkpoint.parent / "metrics.jsonl").unlink()
    with pytest.raises(ContractError, match="holds another run"):
        find_start(never, processes=1)
    shutil.rmtree(checkpoint)
    assert find_start(never, processes=1).step == 0


@pytest.mark.req("RUN-01")
def test_a_folder_that_another_process_writes_is_refused(resumable: ConfigOf) -> None:
    config = resumable()
    folder = config.training.output_dir
    folder.mkdir()
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with refused("training.output_dir", "now; run.json names its process"):
            find_start(config, processes=1)
        other.kill()
    assert find_start(config, processes=1).step == 0


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_ended_meanwhile_keeps_its_logs(resumable: ConfigOf, resume: str) -> None:
    config = resumable(training={"resume": resume})
    start = find_start(config, processes=1)
    checkpoint = with_checkpoint(config, 4)
    if resume == "never":
        shutil.rmtree(checkpoint)
    logged = (checkpoint.parent / "metrics.jsonl").read_text()
    with (
        refused("training.output_dir", "another run has written"),
        open_run_folder(config, None, start),
    ):
        pass
    assert (checkpoint.parent / "metrics.jsonl").read_text() == logged


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"training": {"seed": 1}, "data": {"shuffle": False}}, ["data.shuffle", "training.seed"]),
    ({"training": {"lr_scheduler_type": "linear"}}, ["training.lr_scheduler_type"]),
    ({"stage2_ab": {"schedule": {"b_ratio": 0.25}}}, ["stage2_ab.schedule.b_ratio"]),
]


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize(("change", "keys"), CHANGES)
def test_another_run_cannot_resume_from_a_checkpoint(
    resumable: ConfigOf, change: dict[str, Any], keys: list[str]
) -> None:
    with_checkpoint(resumable(), 4)
    with pytest.raises(ContractErrors, match="must have the same value") as caught:
        find_start(resumable(**change), processes=1)
    assert [error.where for error in caught.value.errors] == keys
    assert RESOLVED in caught.value.found


@pytest.mark.req("RUN-01")
def test_a_run_without_a_checkpoint_keeps_the_logs_of_another_run(resumable: ConfigOf) -> None:
    config = resumable()
    folder = config.training.output_dir
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    other = resumable(tuner={"train_type": "lora", "lora_rank": 2, "lora_alpha": 4})
    (folder / RESOLVED).write_text(dump_resolved(other))
    with pytest.raises(ContractErrors) as caught:
        find_start(config, processes=1)
    assert {error.where.partition(".")[0] for error in caught.value.errors} == {"tuner"}
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.req("RUN-01")
def test_changed_data_is_refused(resumable: ConfigOf, toy_data: ToyData, tmp_path: Path) -> None:
    own = Path(shutil.copy(toy_data.train_jsonl, tmp_path))
    config = resumable(data={"train_jsonl": str(own)})
    with_checkpoint(config, 4)
    assert find_start(config, processes=1).step == 4
    own.write_text(own.read_text() + "\n")
    with pytest.raises(ContractError, match="is no longer the file"):
        find_start(config, processes=1)


@pytest.mark.req("RUN-01")
def test_another_number_of_processes_resumes_unless_each_has_a_state(resumable: ConfigOf) -> None:
    config = resumable()
    config.training.output_dir.mkdir()
    in_ranks(2, lambda peers: with_checkpoint(config, 2, peers))
    for count in (2, 3):
        assert find_start(config, processes=count).state(count - 1, count) == {}
    start = find_start(config, processes=1)
    assert start.step == 2
    assert "2 processes made it and 1 go on" in start.notes[-1]
    in_ranks(2, lambda peers: with_checkpoint(config, 4, peers, queue=[peers.rank]))
    assert find_start(config, processes=2).state(1, 2) == {"queue": [1]}
    with pytest.raises(ContractError, match="has the states of 2 processes"):
        find_start(config, processes=1)


@pytest.mark.req("RUN-01")
def test_processes_that_see_different_folders_stop_before_truncation(resumable: ConfigOf) -> None:
    config = resumable()
    folder = with_checkpoint(config, 2).parent
    resumed, inputs = find_start(config, processes=1), check_inputs(config, {})

    def errors(folders: list[Path], starts: list[Start]) -> list[str]:
        configs = [resumable(training={"output_dir": str(each)}) for each in folders]

        def work(peers: Peers) -> None:
            given = replace(inputs, start=starts[peers.rank])
            train_as(peers, configs[peers.rank], given, [], Console(file=io.StringIO()))

        found = [result.exception() for result in in_ranks(2, work)]
        assert [type(error) for error in found] == [RunError] * 2
        return [str(error).partition(": training")[0] for error in found]

    found = errors([folder, folder], [BEGINNING, resumed])
    assert all(error.endswith("(steps: [0, 2])") for error in found)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    found = errors([folder, folder.with_name("other")], [resumed, resumed])
    assert all(error.endswith("(run.json: [True, False])") for error in found)


@pytest.mark.req("RUN-01", "MET-01")
def test_logs_are_truncated_to_their_sizes_at_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n2\n")
    sizes = log_sizes(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n{half")
    (tmp_path / "rollout_calls.rank1.jsonl").write_text("3\n")
    (tmp_path / "other.jsonl").write_text("3\n")
    (tmp_path / "rollouts").mkdir()
    for name in ("step_000002.jsonl", "step_000003.jsonl", "step_000003.rank1.jsonl.part"):
        (tmp_path / "rollouts" / name).write_text("{}\n")
    for _ in range(2):
        truncate_logs(tmp_path, sizes, step=2)
        assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "metrics.jsonl",
            "other.jsonl",
            "rollouts",
        ]
        assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000002.jsonl"]
    (tmp_path / "metrics.jsonl").write_text("1\n")
    truncate_logs(tmp_path, sizes, step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n"


def run(config: Config) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=500)
    folder = train(config, check_inputs(config), [], console)
    return folder, cast(io.StringIO, console.file).getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval/f1", "eval/predicted")
    logged = lines(folder / "metrics.jsonl")
    return [tuple(line.get(key) for key in keys) for line in logged if "train_runtime" not in line]


def shown_in_tensorboard(folder: Path) -> list[int]:
    events: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [event.step for event in board.Scalars("train/loss")]


def tensors(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


@pytest.mark.req("RUN-01", "MET-01", "STEP-01")
@pytest.mark.scenario("Channel selection continues across checkpoint resume")
def test_a_resumed_run_equals_an_uninterrupted_one(resumable: ConfigOf, tmp_path: Path) -> None:
    """It has dropout, evaluations, steps after the checkpoint and a second epoch."""
    lora = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.2}

    def config(name: str, **training: Any) -> Config:
        own = {"eval_strategy": "steps", "eval_steps": 2, "output_dir": str(tmp_path / name)}
        return resumable(tuner=lora, training=own | training)

    whole, _ = run(config("whole"))
    resumed, _ = run(config("resumed", max_steps=3))
    shutil.rmtree(resumed / "checkpoint-3")
    _, printed = run(config("resumed"))
    assert f"Going on from {resumed / 'checkpoint-2'}" in printed
    assert numbers(resumed) == numbers(whole)
    calls = lines(resumed / "rollout_calls.jsonl")
    assert [call.get("step", "evaluation") for call in calls] == [2, "evaluation", 4, "evaluation"]
    adapter = f"checkpoint-{STEPS}/adapter_model.safetensors"
    assert tensors(resumed / adapter) == tensors(whole / adapter)
    names = sorted(path.name for path in (resumed / "rollouts").iterdir())
    assert names == ["step_000002.jsonl", "step_000004.jsonl"]


@pytest.mark.req("RUN-01", "MET-01")
def test_run_without_checkpoint_starts_anew_and_save_steps_may_change(resumable: ConfigOf) -> None:
    channel_a = {"schedule": {"b_ratio": 0.0}}
    short = resumable(stage2_ab=channel_a, training={"max_steps": 1})
    folder, _ = run(short)
    before = numbers(folder)
    shutil.rmtree(folder / "checkpoint-1")
    _, printed = run(short)
    assert "this run starts anew" in printed
    assert numbers(folder) == before
    run(resumable(stage2_ab=channel_a, training={"save_steps": 3}))
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [line[0] for line in numbers(folder)] == [1, 2, 3, 4]
    assert shown_in_tensorboard(folder) == [1, 2, 3, 4]


@pytest.mark.req("RUN-01", "CFG-01")
@pytest.mark.parametrize(
    "command",
    [run_command.train, partial(run_command.launch, device="cpu")],
    ids=["train", "launch"],
)
def test_finished_run_is_unchanged(
    resumable: ConfigOf, capsys: pytest.CaptureFixture[str], command: Callable[[Path], None]
) -> None:
    servers = [{"base_url": "http://127.0.0.1:1", "group_port": 2}]
    vllm = {"mode": "server", "server": {"servers": servers}}
    config = resumable(rollout_matching={"rollout_backend": "vllm", "vllm": vllm})
    with_checkpoint(config, STEPS)
    (report := config.training.output_dir / "report.html").touch()
    path = config.training.output_dir.with_suffix(".yaml")
    path.write_text(dump_resolved(config))
    before = sorted(path.parent.rglob("*"))
    command(path)
    assert f"Finished at step {STEPS}" in capsys.readouterr().out
    assert sorted(path.parent.rglob("*")) == before
    report.unlink()
    command(path)
    assert "no report.html" in capsys.readouterr().out  # this folder has no run.json


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("content", [None, "model: [\n"], ids=["lost", "damaged"])
def test_an_unreadable_resolved_config_is_refused(resumable: ConfigOf, content: str | None) -> None:
    config = resumable()
    with_checkpoint(config, 2)
    resolved = config.training.output_dir / RESOLVED
    resolved.unlink()
    if content is not None:
        resolved.write_text(content)
    with pytest.raises(ContractError, match=f"^{resolved}"):
        find_start(config, processes=1)


@pytest.mark.req("RUN-01")
def test_files_of_another_user_are_refused_before_a_run_resumes(
    resumable: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resumable()
    checkpoint = with_checkpoint(config, 2)
    (rollouts := checkpoint.with_name("rollouts")).mkdir()
    for path in (checkpoint, rollouts, checkpoint.with_name("metrics.jsonl")):
        monkeypatch.setattr(os, "access", lambda tried, mode, path=path: Path(tried) != path)
        with pytest.raises(ContractErrors, match=f"{path} is not writable"):
            find_start(config, processes=1)
    curves = {"training": {"logging_dir": str(rollouts.with_name("metrics.jsonl") / "curves")}}
    with pytest.raises(ContractErrors, match=r"training\.logging_dir"):
        find_start(resumable(**curves), processes=1)
