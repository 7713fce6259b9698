"""Where a run starts: what is refused, what goes on, and that nothing is lost or doubled."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from learner.commands import run as run_command
from learner.config import dump_mapping, dump_resolved, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.runs.checkpoint import Checkpoints, RunFacts
from learner.runs.resume import (
    Start,
    data_digest,
    find_start,
    free_keys,
    log_sizes,
    prepare_folder,
    truncate_logs,
)
from learner.runs.run_folder import RESOLVED, RUN, identity_of_this_process
from learner.training.start_checks import check_inputs
from learner.training.train import train
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4


@pytest.fixture
def mapping(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> dict[str, Any]:
    """A run of two epochs that may go on: two channels, answers of the learner, a constant rate."""
    training = {"max_steps": STEPS, "save_steps": 1, "lr_scheduler_type": "constant"}
    mapping = small_mapping(
        toy_checkpoint,
        toy_data,
        tmp_path / "run",
        training={**training, "effective_batch_size": 12, "warmup_ratio": 0.0, "resume": "auto"},
        stage2_ab={"schedule": {"b_ratio": 0.5}},
    )
    hf = {"rollout_backend": "hf", "max_new_tokens": 4, "decode_batch_size": 4}
    mapping["rollout_matching"] = hf
    return mapping


def with_checkpoint(config: Config, step: int, peers: Peers = SINGLE_PROCESS, **state: Any) -> Path:
    """A run folder with a checkpoint that has a manifest and little else."""
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
def test_a_folder_with_a_run_in_it_is_refused_unless_it_may_go_on(mapping: dict[str, Any]) -> None:
    checkpoint = with_checkpoint(parse_config(mapping), 4)
    start = find_start(parse_config(mapping), processes=1)
    assert (start.step, start.weights_version, start.folder) == (4, 4, str(checkpoint))
    never = parse_config(merge(mapping, {"training": {"resume": "never"}}))
    with pytest.raises(ContractError, match="holds another run") as caught:
        find_start(never, processes=1)
    assert "training.resume to auto" in caught.value.do
    (checkpoint.parent / "metrics.jsonl").unlink()
    with pytest.raises(ContractError, match="holds another run"):
        find_start(never, processes=1)
    shutil.rmtree(checkpoint)
    assert find_start(never, processes=1).step == 0


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_that_another_process_writes_is_refused(
    mapping: dict[str, Any], resume: str
) -> None:
    config = parse_config(merge(mapping, {"training": {"resume": resume}}))
    folder = config.training.output_dir
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"]) as other:
        ticks = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        identity = {**identity_of_this_process(), "pid": other.pid, "start_ticks": int(ticks)}
        (folder / "run.json").write_text(json.dumps({"process": identity}))
        with pytest.raises(ContractError, match=f"process {other.pid} writes") as caught:
            find_start(config, processes=1)
        assert caught.value.where == "training.output_dir"
        (folder / "metrics.jsonl").write_text('{"step": 4, "train_runtime": 2.0}\n')
        if resume == "auto":
            (folder / RESOLVED).write_text(dump_resolved(config))
            assert find_start(config, processes=1).goes_on, "that run has ended"
        (folder / "metrics.jsonl").unlink()
        other.kill()
    assert find_start(config, processes=1).step == 0
    (folder / "run.json").write_text(json.dumps({"process": identity_of_this_process()}))
    find_start(config, processes=1)


@pytest.mark.req("RUN-01", "REPLAY-01")
@pytest.mark.parametrize("start", [Start(), Start(None, True)], ids=["never", "auto"])
def test_what_an_attempt_left_that_died_in_its_first_step_is_cleared(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("rollout_calls.jsonl", "rollout_calls.rank1.jsonl", "rollouts/step_000001.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "notes.txt").touch()
    prepare_folder(tmp_path, start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "rollouts"]
    assert list((tmp_path / "rollouts").iterdir()) == []


@pytest.mark.req("RUN-01")
def test_nothing_whole_is_no_reason_to_start_anew(mapping: dict[str, Any]) -> None:
    config = parse_config(mapping)
    assert find_start(config, processes=1).notes == ()
    older, newer = with_checkpoint(config, 2), with_checkpoint(config, 4)
    (newer / "rollmatch_state.json").write_text("{")
    start = find_start(config, processes=1)
    assert start.step == 2
    assert any("Warning" in note and str(newer) in note for note in start.notes)
    (older / "rollmatch_state.json").unlink()
    with pytest.raises(ContractError, match=r"no checkpoint in .* is whole") as caught:
        find_start(config, processes=1)
    assert str(older) in str(caught.value)
    assert str(newer) in str(caught.value)


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "seed", 12),
        ("training", "effective_batch_size", 8),
        ("training", "learning_rate", 1e-5),
        ("training", "lr_scheduler_type", "linear"),
        ("training", "packing", False),
        ("data", "shuffle", False),
        ("rollout_matching", "max_new_tokens", 5),
        ("stage2_ab", "schedule", {"b_ratio": 0.25}),
        ("tuner", "train_type", "lora"),
    ],
)
def test_another_run_cannot_go_on_from_a_checkpoint(
    mapping: dict[str, Any], section: str, key: str, value: Any
) -> None:
    with_checkpoint(parse_config(mapping), 4)
    change = {section: {key: value}}
    if value == "lora":
        mapping["tuner"] = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    with pytest.raises(ContractErrors, match="must have the same value") as caught:
        find_start(parse_config(merge(mapping, change)), processes=1)
    assert caught.value.where.startswith(f"{section}.{key}")
    assert RESOLVED in caught.value.found


def test_all_differences_are_told_at_once(mapping: dict[str, Any]) -> None:
    with_checkpoint(parse_config(mapping), 4)
    changed = merge(mapping, {"training": {"seed": 1}, "data": {"shuffle": False}})
    with pytest.raises(ContractErrors) as caught:
        find_start(parse_config(changed), processes=1)
    assert [error.where for error in caught.value.errors] == ["data.shuffle", "training.seed"]


def test_what_a_run_saves_shows_and_asks_may_change(mapping: dict[str, Any]) -> None:
    with_checkpoint(parse_config(mapping), 4)
    changes = {
        "training": {"max_steps": 12, "save_steps": 3, "save_total_limit": 1, "run_name": "on"},
        "rollout_matching": {"decode_batch_size": 2, "rollout_backend": "vllm"},
        "custom": {"extra": {"note": 1}},
    }
    assert find_start(parse_config(merge(mapping, changes)), processes=1).step == 4


def test_operations_names_the_keys_that_may_change(mapping: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = page.partition("**What may change.**")[2].partition("\n\n")[2].partition("\n\n")[0]
    documented = set()
    for row in table.splitlines()[2:]:
        section = ""
        for key in re.findall(r"`([\w.*]+)`", row):
            section = key.rpartition(".")[0] or section
            documented.add(f"{section}.{key.rpartition('.')[2]}")
    sections = free_keys(parse_config(mapping))
    free = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    assert [key for key in free if not any(fnmatch(key, name) for name in documented)] == []
    assert [name for name in documented if not any(fnmatch(key, name) for key in free)] == []


@pytest.mark.req("RUN-01")
def test_samples_that_were_changed_are_found(mapping: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "train.jsonl"
    own.write_text(Path(mapping["data"]["train_jsonl"]).read_text())
    config = parse_config(merge(mapping, {"data": {"train_jsonl": str(own)}}))
    with_checkpoint(config, 4)
    assert find_start(config, processes=1).step == 4
    own.write_text(own.read_text() + "\n")
    with pytest.raises(ContractError, match="is no longer the file"):
        find_start(config, processes=1)


@pytest.mark.req("RUN-01")
def test_another_number_of_processes_goes_on_with_a_note_unless_each_has_a_state(
    mapping: dict[str, Any],
) -> None:
    config = parse_config(mapping)
    config.training.output_dir.mkdir()
    in_ranks(2, lambda peers: with_checkpoint(config, 2, peers))
    assert find_start(config, processes=2).state(1, 2) == {}
    start = find_start(config, processes=1)
    assert start.step == 2
    assert "2 processes made it and 1 go on" in start.notes[-1]
    in_ranks(2, lambda peers: with_checkpoint(config, 4, peers, queue=[peers.rank]))
    assert find_start(config, processes=2).state(1, 2) == {"queue": [1]}
    with pytest.raises(ContractError, match="of 2 processes with a state of each"):
        find_start(config, processes=1)


@pytest.mark.req("RUN-01", "MET-01")
def test_logs_are_cut_to_what_they_were(tmp_path: Path) -> None:
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


def run(mapping: dict[str, Any], name: str, said: io.StringIO | None = None) -> Path:
    out = Path(mapping["training"]["output_dir"]).with_name(name)
    config = parse_config(merge(mapping, {"training": {"output_dir": str(out)}}))
    return train(config, check_inputs(config), [], Console(file=said or io.StringIO()))


def until(mapping: dict[str, Any], steps: int) -> dict[str, Any]:
    return merge(mapping, {"training": {"max_steps": steps}})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """Steps and evaluations, without what they took."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval/f1", "eval/predicted")
    logged = lines(folder / "metrics.jsonl")
    return [tuple(line.get(key) for key in keys) for line in logged if "train_runtime" not in line]


def shown_in_tensorboard(folder: Path) -> list[int]:
    """Steps with a loss."""
    events: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [event.step for event in board.Scalars("train/loss")]


def tensors(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


@pytest.mark.req("RUN-01", "MET-01")
def test_a_run_that_goes_on_is_the_run_that_did_not_stop(
    mapping: dict[str, Any], toy_checkpoint: Path
) -> None:
    """Adapters with dropout, evaluations, a broken checkpoint, at the end of an epoch."""
    lora = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.2}
    mapping["tuner"] = lora
    mapping = merge(mapping, {"training": {"eval_strategy": "steps", "eval_steps": 2}})
    whole = run(mapping, "whole")
    resumed = run(until(mapping, 3), "resumed")
    state = resumed / "checkpoint-3" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    said = io.StringIO()
    run(mapping, "resumed", said)
    assert f"{state} has 100 bytes of" in said.getvalue()
    assert f"Going on from {resumed / 'checkpoint-2'}" in said.getvalue()
    assert numbers(resumed) == numbers(whole)
    calls = lines(resumed / "rollout_calls.jsonl")
    assert [call.get("step", "evaluation") for call in calls] == [2, "evaluation", 4, "evaluation"]
    adapter = f"checkpoint-{STEPS}/adapter_model.safetensors"
    assert tensors(resumed / adapter) == tensors(whole / adapter)
    names = sorted(path.name for path in (resumed / "rollouts").iterdir())
    assert names == ["step_000002.jsonl", "step_000004.jsonl"]
    base = AutoModelForImageTextToText.from_pretrained(toy_checkpoint)
    loaded = PeftModel.from_pretrained(base, resumed / f"checkpoint-{STEPS}")
    config = loaded.peft_config["default"]
    assert isinstance(config, LoraConfig)
    assert config.r == 4


@pytest.mark.req("RUN-01", "MET-01")
def test_a_run_without_a_checkpoint_starts_anew_and_steps_to_a_save_may_change(
    mapping: dict[str, Any],
) -> None:
    mapping["stage2_ab"]["schedule"]["b_ratio"] = 0.0
    folder = run(until(mapping, 1), "run")
    before = numbers(folder)
    shutil.rmtree(folder / "checkpoint-1")
    said = io.StringIO()
    run(until(mapping, 1), "run", said)
    assert "this run starts anew" in said.getvalue()
    assert numbers(folder) == before
    run(merge(mapping, {"training": {"save_steps": 3}}), "run")
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [line[0] for line in numbers(folder)] == [1, 2, 3, 4]
    assert shown_in_tensorboard(folder) == [1, 2, 3, 4]


@pytest.mark.req("RUN-01", "CFG-01")
def test_a_finished_run_says_so_and_does_nothing(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with_checkpoint(parse_config(mapping), STEPS)
    path = Path(mapping["training"]["output_dir"]).with_suffix(".yaml")
    path.write_text(dump_mapping(mapping))
    assert load_mapping(path) == mapping
    before = sorted(path.parent.rglob("*"))
    run_command.train(path)
    assert f"Finished at step {STEPS}" in capsys.readouterr().out
    assert sorted(path.parent.rglob("*")) == before


def test_going_on_needs_checkpoints(mapping: dict[str, Any]) -> None:
    with pytest.raises(ContractErrors, match="nothing to go on from") as caught:
        parse_config(merge(mapping, {"training": {"save_strategy": "no"}}))
    assert caught.value.where == "training.resume"


@pytest.mark.req("RUN-01")
def test_the_logs_of_another_run_are_not_taken_for_those_of_this_one(
    mapping: dict[str, Any],
) -> None:
    """It has no checkpoint, so going on would be starting anew, and its logs would be gone."""
    config = parse_config(mapping)
    folder = config.training.output_dir
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    other = parse_config(merge(mapping, {"training": {"seed": 99}}))
    (folder / RESOLVED).write_text(dump_resolved(other))
    with pytest.raises(ContractErrors) as caught:
        find_start(config, processes=1)
    assert [error.where for error in caught.value.errors] == ["training.seed"]
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "No such file"), (b"model: [\n", "resolved_config.yaml:2:1"), (b"\xff", "UTF-8")],
)
def test_a_resolved_config_that_cannot_be_read_is_told(
    mapping: dict[str, Any], content: bytes | None, word: str
) -> None:
    config = parse_config(mapping)
    with_checkpoint(config, 2)
    resolved = config.training.output_dir / RESOLVED
    resolved.unlink()
    if content is not None:
        resolved.write_bytes(content)
    with pytest.raises(ContractError) as caught:
        find_start(config, processes=1)
    assert caught.value.where == "training.resume"
    assert word in caught.value.found
    assert caught.value.do.startswith("Restore it")


# --- folders that cannot be written to

READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 99
shift
exec "$@"
"""


def learner_beside_read_only(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`learner WORDS` where nobody, not even root, can write below `folder`."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    program = [sys.executable, "-c", "from learner.cli import main; main()", *words]
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh"]
    ended = subprocess.run(
        [*apart, str(folder), *program],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 99 or ended.stderr.startswith("unshare:"):
        pytest.skip(ended.stderr.strip())
    return ended


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "to be made"])
def test_a_read_only_run_folder_is_refused_before_a_run(
    mapping: dict[str, Any], tmp_path: Path, resume: str, there: bool
) -> None:
    disk = tmp_path / "disk"
    out = disk / "run"
    mapping = merge(mapping, {"training": {"output_dir": str(out), "resume": resume}})
    mapping["training"]["logging_dir"] = str(tmp_path / "tensorboard")
    (out if there else disk).mkdir(parents=True)
    if there and resume == "auto":
        with_checkpoint(parse_config(mapping), 2)
    file = tmp_path / "run.yaml"
    file.write_text(dump_mapping(mapping))
    ended = learner_beside_read_only(disk, "train", "--config", str(file))
    can = "cannot be written to" if there else "cannot be made"
    named = out if there else disk
    assert ended.stderr.splitlines() == [
        "error: training.output_dir",
        f"  found: {out} {can} (Read-only file system: {named})",
        "  do: Name a folder that can be written to.",
    ]
    assert ended.returncode == 2


@pytest.mark.req("EVAL-01")
def test_an_evaluation_and_a_report_of_a_read_only_run_are_refused(
    mapping: dict[str, Any], tmp_path: Path
) -> None:
    config = parse_config(mapping)
    out, file = config.training.output_dir, tmp_path / "run.yaml"
    file.write_text(dump_mapping(mapping))
    with_checkpoint(config, 2)
    (out / RUN).write_text("{}")
    page = out / "report.html"
    page.write_text("before")
    for words in (("eval", "--config", str(file)), ("report", str(out))):
        ended = learner_beside_read_only(out, *words)
        assert f"cannot be made (Read-only file system: {out})" in ended.stderr
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 3), ended.stderr
    assert page.read_text() == "before"


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("key", ["output_dir", "logging_dir"])
@pytest.mark.parametrize("below", ["", "run"], ids=["a file", "below a file"])
def test_a_run_folder_that_is_a_file_is_refused(
    mapping: dict[str, Any], tmp_path: Path, key: str, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    config = parse_config(merge(mapping, {"training": {key: str(file / below)}}))
    with pytest.raises(ContractErrors) as caught:
        check_inputs(config)
    assert caught.value.errors[0].where == f"training.{key}"
    assert caught.value.errors[0].found.endswith(f"(Not a directory: {file})")
    assert file.read_text() == "kept"


@pytest.mark.req("RUN-01")
def test_a_checkpoint_of_another_user_is_told_before_a_run_goes_on(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(mapping)
    checkpoint = with_checkpoint(config, 2)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != checkpoint)
    with pytest.raises(ContractErrors, match=f"{checkpoint} may not be written by this user"):
        find_start(config, processes=1)
