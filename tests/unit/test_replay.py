"""`learner replay`: steps are rebuilt bit for bit, and the first difference is named."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from learner.analysis.replay import load_tokenizer
from learner.cli import app
from learner.config import dump_mapping, merge
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.runs.rollout_log import RolloutLog
from learner.runs.run_folder import RunFolder
from learner.stages.targets import run_stages
from learner.stages.tokens import Tokenizer
from learner.training.run_log import open_run_folder
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from shared_contracts.errors import ContractError
from tests.unit.answers import encode
from tests.unit.grouped import GROUPED
from tests.unit.small_run import rollout, small_config, written
from tests.unit.trained_run import TrainedRun

STEPS, SHARE = (2, 4), 7
# As many as there are kinds of answers.
GROUPS_OF_7 = merge(GROUPED, {"group_relative": {"group_size": 7}})
HALF = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
MakeRun = Callable[..., Path]


def moved(item: GroundTruthObject) -> GroundTruthObject:
    coords = tuple(min(999, value + 17) for value in item.shape.coords)
    return GroundTruthObject(item.desc, Shape(item.shape.kind, coords))


def answer(turn: int, sample: Sample, tokenizer: Tokenizer) -> RolloutOutput:
    """Right, half, next to it, garbage, cut off, with a part that is dropped, or twice."""
    objects = sample.objects
    texts = [
        written(*objects),
        written(*objects[:1]),
        written(*map(moved, objects)),
        "garbage",
        written(*objects)[: len(written(*objects)) * 2 // 3],
        re.sub(r'"desc": "[^"]*", ', "", written(*objects), count=1),
        written(*objects, *objects),
    ]
    return rollout([1, 2], encode(tokenizer, texts[turn % len(texts)]))


@pytest.fixture(scope="module")
def make_run(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> MakeRun:
    """A run folder with logged steps of the toy world, whose answers are scripted."""
    tokenizer = load_tokenizer(toy_checkpoint)
    every = read_samples(toy_data.train_jsonl, allow_poly=False)
    samples = sorted(every, key=lambda sample: len(sample.objects) == 1)

    def make(*, ranks: int = 1, **keys: Any) -> Path:
        out = tmp_path_factory.mktemp("replayed") / "run"
        config = small_config(toy_checkpoint, toy_data, out, **merge(HALF, keys))
        with open_run_folder(config, None) as folder:
            for step, rank in product(STEPS, range(ranks)):
                first, group = step + rank * SHARE, config.answers_per_sample
                own = [samples[first + i // group] for i in range(SHARE * group)]
                rollouts = [answer(turn, of, tokenizer) for turn, of in enumerate(own)]
                RolloutLog(folder, rank).write(step, run_stages(own, rollouts, tokenizer, config))
        return folder

    return make


@pytest.fixture(scope="module")
def finished(make_run: MakeRun) -> Path:
    return make_run(ranks=2)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def replay(run: Path, *options: str) -> Result:
    result = CliRunner().invoke(app, ["replay", str(run), *options])
    if isinstance(result.exception, ContractError):
        raise result.exception
    return result


def edit(run: Path, change: Callable[[list[dict[str, Any]]], None], rank: int = 0) -> None:
    """Change the logged answers of step 4."""
    name = "step_000004.jsonl" if rank == 0 else f"step_000004.rank{rank}.jsonl"
    file = run / "rollouts" / name
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.req("REPLAY-01", "MET-03")
@pytest.mark.parametrize(
    "kind", [{}, {"stage2_ab": {"channel_b": {"prefix": "clean"}}}], ids=["verbatim", "clean"]
)
def test_each_step_of_a_run_is_rebuilt_bit_for_bit(make_run: MakeRun, kind: dict[str, Any]) -> None:
    run = make_run(**kind)
    answers = [answer for step in STEPS for answer in RunFolder.open(run).answers(step)]
    assert {answer.parse.truncated for answer in answers} == {False, True}
    assert any(answer.match.pairs for answer in answers)
    result = replay(run)
    assert result.exit_code == 0, result.output
    assert f"Identical: {len(answers)} answers of 2 steps" in result.output


@pytest.mark.req("REPLAY-01", "GROUP-01")
def test_rewards_are_computed_again_and_shown(make_run: MakeRun) -> None:
    run = make_run(**GROUPS_OF_7)
    step = RunFolder.open(run).answers(4)
    assert [answer.sample_id for answer in step[:7]] == [step[0].sample_id] * 7
    first, *_, last = step[:7]
    assert first.reward is not None
    assert last.reward is not None
    assert first.reward.total == 1.0
    assert last.reward.duplicates > 0
    shown = replay(run, "--step", "4", "--sample", first.sample_id)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("advantage") == 7
    assert "missed" in shown.output
    assert "missed, appended" not in shown.output, "a policy gradient teaches no missed objects"

    def change(lines: list[dict[str, Any]]) -> None:
        *parts, advantage, credits = lines[2]["reward"]
        lines[2]["reward"] = [*parts, advantage + 1, credits]

    edit(run, change)
    different = replay(run, "--step", "4")
    assert different.exit_code == 1
    assert "reward.advantage" in different.output


@pytest.mark.req("REPLAY-01")
def test_trained_run_and_two_processes_are_rebuilt(trained_run: TrainedRun, finished: Path) -> None:
    trained = replay(trained_run.folder)
    assert trained.exit_code == 0, trained.output
    both = replay(finished, "--step", "4")
    assert both.exit_code == 0, both.output
    assert f"Identical: {2 * SHARE} answers of 1 step" in both.output


@pytest.mark.req("REPLAY-01")
@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("parse", "objects", 0, "coords", 2), 998, ["parse.objects[0].coords[2]", "998"]),
        (("match", "pairs"), [], ["match.pairs[0]", "logged null", "rebuilt [0, 0]"]),
        (("target", "ids", -1), 5, ["target.ids[", "logged 5"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_first_difference_is_named(
    run: Path, path: tuple[Any, ...], value: object, parts: list[str]
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        part: Any = next(
            line for line in lines if line["match"]["pairs"] and line["match"]["false_negatives"]
        )
        *steps, last = path
        for step in steps:
            part = part[step]
        part[last] = value

    edit(run, change, rank=1)
    result = replay(run, "--step", "4")
    assert result.exit_code == 1, result.output
    assert "First difference: step 4, sample " in result.output
    assert "process 1" in result.output
    assert "Different: 1 of " in result.output
    shown = " ".join(result.output.split())
    assert all(part in shown for part in parts)


@pytest.mark.req("REPLAY-01")
def test_text_of_an_answer_does_not_steer_the_terminal(run: Path, toy_checkpoint: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy_checkpoint)
    steering = tokenizer.encode("\x1b]0;title\x07\x9b2J", add_special_tokens=False)
    answer = next(a for a in RunFolder.open(run).answers(4) if a.rank == 0 and a.target is not None)

    def write(lines: list[dict[str, Any]]) -> None:
        line = next(each for each in lines if each["sample_id"] == answer.sample_id)
        line["response_token_ids"] = steering + line["response_token_ids"]

    edit(run, write)
    output = replay(run, "--step", "4", "--sample", answer.sample_id).output
    assert [c for c in output if not c.isprintable() and c != "\n"] == []
    assert output.count(r"\x1b]0;title\x07\x9b2J") >= 2, "in the answer and in the target"
    assert "missed, appended" in output
    shown = " ".join(output.split())
    for item in answer.ground_truth:
        assert item.desc in shown
        assert " ".join(map(str, item.coords)) in shown
    assert f"Step 4, sample {answer.sample_id}" in shown


def refusal(run: Path, *options: str) -> str:
    with pytest.raises(ContractError) as caught:
        replay(run, *options)
    return str(caught.value)


@pytest.mark.req("REPLAY-01")
def test_steps_and_samples_that_are_not_logged_are_refused(run: Path, tmp_path: Path) -> None:
    assert "is no run folder" in refusal(tmp_path / "none")
    assert "no answers of this step are logged. Choose one of the 2 logged steps, from 2 to 4" in (
        refusal(run, "--step", "3")
    )
    assert "no logged answer is to a sample '0'" in refusal(run, "--step", "4", "--sample", "0")
    shutil.rmtree(run / "rollouts")
    assert "no answers are logged in it" in refusal(run)


@pytest.mark.req("REPLAY-01")
def test_tokenizer_must_be_that_of_the_run(run: Path, toy_checkpoint: Path, tmp_path: Path) -> None:
    gone = run.parent / "gone"
    file = run / "resolved_config.yaml"
    mapping = yaml.safe_load(file.read_text())
    file.write_text(dump_mapping(merge(mapping, {"model": {"model": str(gone)}})))
    assert refusal(run).startswith(f"{gone}/tokenizer.json: there is no such file. Name a folder")
    other = shutil.copytree(toy_checkpoint, tmp_path / "other")
    assert replay(run, "--tokenizer", str(other)).exit_code == 0
    file = other / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert "is another one than when" in refusal(run, "--tokenizer", str(other))
    facts = json.loads((run / "run.json").read_text())
    del facts["tokenizer_sha256"]
    (run / "run.json").write_text(json.dumps(facts))
    assert "has no tokenizer_sha256. Restore run.json" in refusal(run, "--tokenizer", str(other))


@pytest.mark.req("REPLAY-01")
def test_a_step_that_cannot_be_read_is_left_out_of_a_replay_of_all(run: Path) -> None:
    (run / "rollouts" / "step_000002.jsonl").write_text("{\n")
    done = replay(run)
    assert (done.exit_code, "Step 2 is left out: " in done.output) == (0, True)
    assert "answers of 1 step are rebuilt" in done.output
    assert "step_000002.jsonl" in refusal(run, "--step", "2")
