"""`learner replay`: steps of every kind of run are built again bit for bit, and what differs is
found and named (REPLAY-01)."""

import gc
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from learner.analysis.replay import LoggedStep, Rebuilder, Replayed, compare
from learner.cli import app
from learner.config import dump_mapping, load_config, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.models.load import load_model
from learner.runs.rollout_log import RolloutLog
from learner.runs.run_folder import RunFolder
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.targets import assess, with_target
from learner.types import (
    AssessedRollout,
    GroundTruthObject,
    ParsedRollout,
    Place,
    RolloutOutput,
    Sample,
)
from shared_contracts.errors import ContractError
from tests.unit.answers import CAT, ground_truths, rollouts
from tests.unit.logged_runs import SHARE, RunMaker
from tests.unit.small_run import small_config

pytestmark = pytest.mark.usefixtures("one_thread")

ALIGNED = Path(__file__).parents[2] / "configs/stage2_rollout_aligned/smoke/default.yaml"
SERVERS = {
    "vllm": {
        "mode": "server",
        "server": {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]},
    }
}
STEPS = (2, 4)
HALF = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
MakeRun = Callable[..., Path]


@pytest.fixture(scope="module")
def poly_data(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    out = tmp_path_factory.mktemp("replayed_polygons") / "data"
    return make_data(out, train=24, val=4, seed=0, polygons=True)


@pytest.fixture(scope="module")
def make_run(
    toy_checkpoint: Path,
    toy_data: ToyData,
    poly_data: ToyData,
    tmp_path_factory: pytest.TempPathFactory,
) -> MakeRun:
    """A run folder of the boxes, or of the polygons, of the toy world."""
    loaded = load_model(small_config(toy_checkpoint, toy_data, Path("nowhere")))

    def make(*, polygons: bool = False, chunk: int | None = 3, ranks: int = 1, **keys: Any) -> Path:
        data = poly_data if polygons else toy_data
        out = tmp_path_factory.mktemp("replayed") / "run"
        config = (aligned if polygons else two_channel)(toy_checkpoint, data, out, **keys)
        every = read_samples(data.train_jsonl, allow_poly=polygons)
        samples = sorted(every, key=lambda sample: len(sample.objects) == 1)
        return RunMaker(loaded, samples).make(config, chunk=chunk, ranks=ranks, steps=STEPS)

    return make


def two_channel(model: Path, data: ToyData, out: Path, **keys: Any) -> Config:
    return small_config(model, data, out, **merge({"global_max_length": 300, **HALF}, keys))


def aligned(model: Path, data: ToyData, out: Path, **keys: Any) -> Config:
    own = {
        "model": {"model": str(model), "torch_dtype": "float32"},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {"output_dir": str(out), "logging_dir": str(out / "tensorboard")},
        "global_max_length": 300,
        "rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 12},
    }
    mapping = load_config(ALIGNED).model_dump(mode="json", exclude_none=True)
    return parse_config(merge(merge(mapping, own), keys))


@pytest.fixture(scope="module")
def finished(make_run: MakeRun) -> Path:
    """A run of two processes with packing and chunks."""
    return make_run(ranks=2)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
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


def edit_config(run: Path, change: dict[str, Any]) -> None:
    file = run / "resolved_config.yaml"
    file.write_text(dump_mapping(merge(yaml.safe_load(file.read_text()), change)))


# --- The same -----------------------------------------------------------------------------


@pytest.mark.req("REPLAY-01", "MET-03")
@pytest.mark.parametrize(
    "kind",
    [
        {"chunk": None},
        {"chunk": 3},
        {"chunk": 2, "ranks": 2},
        {"chunk": 3, "training": {"packing": False}},
        {"chunk": 3, "global_max_length": 160},
        {"chunk": 3, "training": {"packing_min_fill_ratio": 0.9}},
        {"chunk": 3, "custom": {"object_field_order": "geometry_first"}},
        {"chunk": 3, "stage2_ab": {"channel_b": {"prefix": "clean"}}},
        {"polygons": True, "chunk": 3},
        {"polygons": True, "chunk": None, "training": {"packing": False}},
        {"chunk": 2, "rollout_matching": {**SERVERS, "async_rollout": {"enabled": True}}},
    ],
    ids=lambda kind: "-".join(map(str, kind)),
)
def test_every_step_of_a_run_is_built_again_bit_for_bit(
    make_run: MakeRun, kind: dict[str, Any]
) -> None:
    run = make_run(**kind)
    answers = [answer for step in STEPS for answer in RunFolder.open(run).answers(step)]
    assert len(answers) == len(STEPS) * SHARE * kind.get("ranks", 1)
    assert {answer.parse.truncated for answer in answers} == {False, True}
    assert any(answer.match.pairs for answer in answers)
    result = replay(run)
    assert result.exit_code == 0, result.output
    assert "Identical: all 2 steps" in result.output
    one = replay(run, "--step", "4")
    assert one.exit_code == 0
    numbers = next(line for line in one.output.splitlines() if line.startswith("metrics"))
    assert int(numbers.split()[1]) > 20


@pytest.mark.req("REPLAY-01", "CLEAN-01", "CLEAN-02")
def test_removed_duplicates_are_in_the_log_and_in_the_story(make_run: MakeRun) -> None:
    run = make_run(chunk=3, stage2_ab={"channel_b": {"prefix": "clean"}})
    answers = [answer for step in STEPS for answer in RunFolder.open(run).answers(step)]
    repeated = next(answer for answer in answers if answer.parse.duplicates)
    assert repeated.target is not None
    assert repeated.target.departures
    step = next(step for step in STEPS if repeated in RunFolder.open(run).answers(step))
    told = replay(run, "--step", str(step), "--sample", repeated.sample_id)
    assert "removed, repeats an earlier object" in told.output
    assert "of a duplicate, where the target has" in told.output
    edit_config(run, {"stage2_ab": {"channel_b": {"prefix": "verbatim"}}})
    assert replay(run, "--step", str(step)).exit_code == 1


@pytest.mark.req("REPLAY-01")
def test_versions_of_weights_part_the_packs_of_an_asynchronous_share(make_run: MakeRun) -> None:
    beside = {**SERVERS, "async_rollout": {"enabled": True}}
    run = make_run(chunk=2, rollout_matching=beside, global_max_length=4000)
    answers = RunFolder.open(run).answers(4)
    packs = {(a.segment.pack, a.weights_version[0]) for a in answers if a.segment}
    assert len(packs) == len({pack for pack, _ in packs}) == 2
    assert replay(run, "--step", "4").exit_code == 0
    edit_config(run, {"rollout_matching": {"async_rollout": {"enabled": False}}})
    result = replay(run, "--step", "4")
    assert result.exit_code == 1
    assert "First difference: packs" in result.output


@pytest.fixture(scope="module")
def roomy(finished: Path) -> Config:
    """Any segment fits into its packs."""
    config = load_config(finished / "resolved_config.yaml")
    return config.model_copy(update={"global_max_length": 10**6})


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def corrected(
    sample: Sample, output: RolloutOutput, tokenizer: PreTrainedTokenizerFast, config: Config
) -> AssessedRollout:
    matching = config.rollout_matching.matching
    found = assess(
        sample, output, tokenizer, partial(match_objects, config=matching), allow_poly=False
    )
    return with_target(found, tokenizer, config.custom.object_field_order, matching)


@pytest.mark.req("REPLAY-01")
@given(data=st.data())
def test_any_answer_is_built_again_as_it_was_logged(
    data: st.DataObject, tokenizer: PreTrainedTokenizerFast, roomy: Config, empty: Path
) -> None:
    poly = data.draw(st.booleans())
    truths = tuple(data.draw(st.lists(ground_truths(allow_poly=poly), max_size=3)))
    ids = data.draw(rollouts(tokenizer))
    output = RolloutOutput([7, 8], ids, "", "stop", False, (1, 1), 3)
    assessed = corrected(Sample("a.jsonl:1", (), 8, 8, truths), output, tokenizer, roomy)
    places = [Place(2 + len(assessed.target.token_ids), 0, 0, 1)] if assessed.target else []
    RolloutLog(empty).write(4, [assessed], places)
    (answer,) = RunFolder(empty).answers(4)
    replayed = compare(LoggedStep(4, [[answer]], {}), Rebuilder(roomy, tokenizer))
    assert replayed.first is None
    assert replayed.stages["length"].compared == 1
    assert replayed.packs == len(places)


@pytest.mark.req("REPLAY-01", "LOSS-02")
def test_an_answer_that_was_left_out_is_left_out_again(
    toy_tokenizer: PreTrainedTokenizerFast, roomy: Config, empty: Path
) -> None:
    unreadable = GroundTruthObject("<|im_end|>", CAT.shape)
    output = RolloutOutput([7, 8], [], "", "stop", False, (1, 1), 3)
    sample = Sample("a.jsonl:1", (), 8, 8, (unreadable,))
    RolloutLog(empty).write(4, [corrected(sample, output, toy_tokenizer, roomy)])
    (answer,) = RunFolder(empty).answers(4)
    assert (answer.supervised, answer.segment) == (False, None)
    rebuilder = Rebuilder(roomy, toy_tokenizer)
    assert compare(LoggedStep(4, [[answer]], {}), rebuilder).first is None
    changed = answer.model_copy(update={"left_out": "for no reason"})
    first = compare(LoggedStep(4, [[changed]], {}), rebuilder).first
    assert first is not None
    assert first.field == "target.left_out"


# --- Different ----------------------------------------------------------------------------


def in_first(change: Callable[[dict[str, Any]], object]) -> Callable[[list[dict[str, Any]]], None]:
    """In the first answer that has a match and something appended."""

    def edit_one(lines: list[dict[str, Any]]) -> None:
        line = next(
            line for line in lines if line["match"]["pairs"] and line["match"]["false_negatives"]
        )
        change(line)

    return edit_one


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """The last of `path` in the place that the others lead to."""

    def change(line: dict[str, Any]) -> None:
        *steps, last, value = path
        for step in steps:
            line = line[step]
        line[last] = value

    return change


@pytest.mark.req("REPLAY-01")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("parse", "objects", 0, "coords", 2, 998), ["parse.objects[0].coords[2]", "998"]),
        (put("parse", "truncated", True), ["parse.truncated", "logged true", "rebuilt false"]),
        (put("parse", "dropped", [["object_9", "key_invalid"]]), ["parse.dropped[0]", "nothing"]),
        (
            put("match", "pairs", []),
            ["match.pairs[0]", "logged nothing", "rebuilt [0, 0]", "with ground truth 1 ("],
        ),
        (put("match", "gated", 77), ["match.gated", "logged 77"]),
        (put("target", "prefix_len", 3), ["target.prefix_len", "logged 3"]),
        (put("target", "keys", 0, "object_8"), ["target.keys[0]", '"object_8"', '"object_2"']),
        (put("target", "ids", -1, 5), ["target.token_ids[", ">><|im_end|><<"]),
        (
            lambda line: line["target"].update(roles="4" + line["target"]["roles"][1:]),
            ["target.roles[0]", "appended structure", "matched structure", "token 0: >>{"],
        ),
        (put("target", "groups", 0, [[1], [2.5], True, True]), ["target.groups[0].positions[0]"]),
        (
            lambda line: line["target"]["groups"][0][1].__setitem__(2, 2.5),
            ["target.groups[0].bins[2]", "logged 2.5", ">><|coord_"],
        ),
        (put("segment", "length", 7), ["length.tokens", "logged 7"]),
        (put("segment", None), ["length.tokens", "logged null"]),
        (put("segment", "pack", 77), ["packs.pack", "logged 77"]),
        (put("segment", "position", 77), ["packs.position"]),
        (put("segment", "come", 77), ["packs.come"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_first_difference_is_named(
    run: Path, change: Callable[[dict[str, Any]], object], told: list[str]
) -> None:
    edit(run, in_first(change), rank=1)
    result = replay(run, "--step", "4")
    assert result.exit_code == 1, result.output
    stage = told[0].partition(".")[0]
    assert f"First difference: {stage}, sample " in result.output
    assert "of process 1" in result.output
    shown = " ".join(result.output.split())
    for part in told:
        assert " ".join(part.split()) in shown
    assert "Different: step 4" in result.output
    assert replay(run, "--step", "2").exit_code == 0


@pytest.mark.req("REPLAY-01")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout_matching": {"matching": {"maskiou_gate": 0.999}}}, "match."),
        ({"custom": {"object_field_order": "geometry_first"}}, "target.token_ids["),
        ({"global_max_length": 200}, "packs."),
        ({"global_max_length": 90}, "packs.plan"),
        ({"training": {"packing": False}}, "packs."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_config_is_found_at_the_stage_that_it_changes(
    run: Path, change: dict[str, Any], field: str
) -> None:
    edit_config(run, change)
    result = replay(run)
    assert result.exit_code == 1
    stage, _, name = field.partition(".")
    assert f"First difference: {stage}, " in result.output
    assert f"field {stage}.{name}" in " ".join(result.output.split())
    assert "Different: 2 of 2 steps" in result.output


def test_of_many_steps_that_differ_one_is_held_at_a_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[Replayed]] = []

    def watched(step: LoggedStep, rebuilder: Rebuilder) -> Replayed:
        gc.collect()
        assert [each for each in built if each() is not None] == []
        replayed = compare(step, rebuilder)
        built.append(weakref.ref(replayed))
        return replayed

    monkeypatch.setattr("learner.analysis.replay.compare", watched)
    edit_config(run, {"custom": {"object_field_order": "geometry_first"}})
    assert "Different: 2 of 2 steps" in replay(run).output
    assert len(built) == 2


@pytest.mark.req("REPLAY-01")
def test_a_parser_that_reads_otherwise_is_found(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*given: Any, **named: Any) -> ParsedRollout:
        parsed = parse_rollout(*given, **named)
        return replace(parsed, dropped=[])

    monkeypatch.setattr("learner.stages.formats.coord_json.parse_rollout", forgetful)
    result = replay(finished, "--step", "2")
    assert result.exit_code == 1
    assert "parse.dropped[0]" in result.output
    assert re.search(r"packs +0 +segments .* it follows from parse", result.output)
    assert re.search(r"metrics +0 +numbers .* it follows from parse", result.output)


@pytest.mark.req("REPLAY-01", "MET-02")
def test_numbers_of_the_step_are_compared_with_its_line(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[3]["stage2_ab/channel_b/match_rate"] += 1e-9
    del lines[3]["packing/post_rollout_packs"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = replay(run, "--step", "4")
    assert result.exit_code == 1
    assert "First difference: metrics, all processes" in result.output
    assert re.search(r"field +metrics\.packing/post_rollout_packs", result.output)
    assert re.search(r"logged +nothing", result.output)
    assert re.search(r"metrics +\d+ +numbers +\d+ +2\b", result.output)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    result = replay(run, "--step", "4")
    assert result.exit_code == 0
    assert 'no line of "step": 4' in result.output


@pytest.mark.req("RES-22", "REPLAY-01")
def test_a_run_of_a_version_that_logged_a_carry_buffer_is_replayed(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    old = [{**line, "packing/post_rollout_buffer": 0.0} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in old))
    result = replay(run, "--step", "4")
    assert result.exit_code == 0, result.output


# --- One answer ---------------------------------------------------------------------------


@pytest.mark.req("REPLAY-01")
def test_the_story_of_an_answer_is_told_whole(finished: Path) -> None:
    answers = RunFolder.open(finished).answers(4)
    told = next(a for a in answers if a.match.pairs and a.match.false_negatives)
    assert told.target is not None
    assert told.segment is not None
    name = told.sample_id.rpartition("/")[2]
    result = replay(finished, "--step", "4", "--sample", name)
    assert result.exit_code == 0
    shown = " ".join(result.output.split())
    assert f"Sample {told.sample_id}" in shown
    assert str(told.images[0]) in shown
    assert "IoU 1.00" in shown
    assert f"missed, appended as {told.target.keys[0]}" in shown
    assert (
        f"appended {len(told.target.ids) - 1 - told.target.prefix_len + told.target.kept}" in shown
    )
    assert "end 1 <|im_end|>" in shown
    assert f"pack number {told.segment.pack}" in shown
    for item in told.ground_truth:
        assert item.desc in shown
        assert " ".join(map(str, item.coords)) in shown


@pytest.mark.req("REPLAY-01")
@pytest.mark.parametrize("place", ["first", "last"])
def test_an_answer_does_not_steer_the_terminal(run: Path, toy_checkpoint: Path, place: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy_checkpoint)
    steering = tokenizer.encode("\x1b]0;title\x07\x9b2J", add_special_tokens=False)
    told = next(a for a in RunFolder.open(run).answers(4) if a.rank == 0 and a.target is not None)

    def write(lines: list[dict[str, Any]]) -> None:
        line = next(each for each in lines if each["sample_id"] == told.sample_id)
        ids = line["response_token_ids"]
        line["response_token_ids"] = (
            steering + ids if place == "first" else [*ids[:-1], *steering, ids[-1]]
        )

    edit(run, write)
    output = replay(run, "--step", "4", "--sample", told.sample_id).output
    assert [c for c in output if not c.isprintable() and c != "\n"] == []
    assert output.count(r"\x1b]0;title\x07\x9b2J") >= 2, "in the answer and in what becomes of it"


@pytest.mark.req("REPLAY-01")
def test_a_dropped_object_is_told_with_its_reason_and_what_that_means(finished: Path) -> None:
    answers = RunFolder.open(finished).answers(2)
    told = next(a for a in answers if a.parse.dropped and a.parse.dropped[0][1] == "missing_desc")
    result = replay(finished, "--step", "2", "--sample", told.sample_id)
    assert "dropped, missing_desc: no description" in " ".join(result.output.split())


@pytest.mark.req("REPLAY-01")
def test_a_sample_of_one_step_is_found_without_the_step(finished: Path) -> None:
    steps = {step: RunFolder.open(finished).answers(step) for step in STEPS}
    ids = {step: {answer.sample_id for answer in own} for step, own in steps.items()}
    result = replay(finished, "--sample", min(ids[2] - ids[4]))
    assert "Step 2: " in result.output
    with pytest.raises(ContractError, match=r"steps 2, 4 have a sample.*Say which step"):
        replay(finished, "--sample", min(ids[2] & ids[4]))


# --- Bad input ----------------------------------------------------------------------------


def refusal(run: Path, *options: str) -> str:
    with pytest.raises(ContractError) as caught:
        replay(run, *options)
    return str(caught.value)


@pytest.mark.req("REPLAY-01")
def test_a_step_without_answers_is_told_why_and_which_ones_have_some(run: Path) -> None:
    assert "no answers of step 7 are logged. Choose a step of channel B: 2, 4" in refusal(
        run, "--step", "7"
    )
    assert "step 3 was one of channel A" in refusal(run, "--step", "3")
    shutil.rmtree(run / "rollouts")
    assert "no answers are logged in it" in refusal(run)


@pytest.mark.req("REPLAY-01")
def test_logs_that_do_not_have_it_all_are_refused(run: Path) -> None:
    (run / "rollouts" / "step_000004.rank1.jsonl").unlink()
    assert "process 1 asked for answers, and its file" in refusal(run, "--step", "4")
    result = replay(run)
    assert result.exit_code == 0
    assert "note: step 4 is left out" in result.output
    assert "all 1 step (1 could not be read)" in result.output

    def without_chunks(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            del line["chunk"]

    edit(run, without_chunks)
    assert "is no logged answer" in refusal(run, "--step", "4")


@pytest.mark.req("REPLAY-01")
def test_a_role_that_is_none_is_refused(run: Path) -> None:
    edit(run, in_first(lambda line: line["target"].update(roles="9")))
    assert "is no logged answer" in refusal(run, "--step", "4")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is no run folder" in refusal(tmp_path, "--step", "4")


@pytest.mark.req("REPLAY-01")
def test_the_tokenizer_has_to_be_that_of_the_run(run: Path, toy_checkpoint: Path) -> None:
    gone = run.parent / "gone"
    edit_config(run, {"model": {"model": str(gone)}})
    assert f"{gone} is gone. Name a folder" in refusal(run)
    saved = shutil.copytree(toy_checkpoint, run / "checkpoint-4")
    result = replay(run)
    assert result.exit_code == 0
    assert f"note: {gone} is gone; that of {saved} is the same" in result.output
    file = saved / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert "checkpoint-4 has another tokenizer.json than when the run was started" in refusal(run)
    file.unlink()
    assert "checkpoint-4 has no tokenizer.json" in refusal(run)
    assert replay(run, "--tokenizer", str(toy_checkpoint)).exit_code == 0
    assert refusal(run, "--tokenizer", str(gone)).startswith("--tokenizer: ")
    facts = json.loads((run / "run.json").read_text())
    del facts["tokenizer_sha256"]
    (run / "run.json").write_text(json.dumps(facts))
    assert "does not say which tokenizer" in refusal(run)


def test_samples_that_are_not_there_or_several_are_told(run: Path) -> None:
    assert "step 4 has no sample '0'" in refusal(run, "--step", "4", "--sample", "0")
    assert "no logged step has a sample 'x'" in refusal(run, "--sample", "x")

    def another(lines: list[dict[str, Any]]) -> None:
        lines[1]["sample_id"] = "/elsewhere/train.jsonl:" + lines[0]["sample_id"].split(":")[-1]

    edit(run, another)
    number = RunFolder.open(run).answers(4)[0].sample_id.rpartition(":")[2]
    assert "Name one of /elsewhere/" in refusal(run, "--step", "4", "--sample", number)


@pytest.mark.req("REPLAY-01")
def test_other_versions_and_later_starts_are_noted(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    facts["versions"] |= {"numpy": "0.1", "lost": "7"}
    facts["started_at_step"] = 2
    (run / "run.json").write_text(json.dumps(facts))
    output = replay(run, "--step", "2").output
    assert "note: the run was made with numpy 0.1 (here " in output
    assert "lost 7 (here none)" in output
    assert "note: the run went on after step 2" in output
    assert "went on" not in replay(run, "--step", "4").output


def test_help_needs_nothing_heavy() -> None:
    """Neither torch nor transformers is imported to read a log."""
    code = (
        "import sys; from learner.analysis.replay import rebuild, show;"
        " print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
