"""`learner eval`: plan, refusals, answers and files of an evaluation."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pycocotools.coco import COCO
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from learner.analysis.evaluation.folder import (
    ANSWERS,
    Scored,
    finish_evaluation,
    read_answers,
    write_evaluation,
)
from learner.analysis.evaluation.scores import ScoredAnswer
from learner.cli import app
from learner.commands.data import data_app
from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.operate.eval_plan import plan_evaluation
from learner.runs.checkpoint import BEGINNING, find_start
from shared_contracts.errors import ContractError, ContractErrors, RunError
from tests.unit.data_files import box as box_of_a_line
from tests.unit.data_files import line, paint_all, write_lines
from tests.unit.eval_answers import answered, box, sample
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.refusals import refused
from tests.unit.small_run import small_config, small_mapping
from tests.unit.trained_run import STEPS, TrainedRun, trained, write_config

pytestmark = pytest.mark.req("EVAL-01")

HF = {"rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 8}}
ADAPTERS = {"enable_lora": True, "sync": {"mode": "adapter"}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}}


@pytest.fixture
def mapping(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> dict[str, Any]:
    return merge(small_mapping(toy_checkpoint, toy_data, tmp_path / "run"), HF)


@pytest.fixture
def config(mapping: dict[str, Any]) -> Config:
    return parse_config(mapping)


def copied(checkpoint: Path, folder: Path, *, without: str = "") -> Path:
    shutil.copytree(checkpoint, folder, ignore=lambda *_: [without])
    return folder


def test_model_and_data_come_from_the_config_or_the_options(
    config: Config, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    plan = plan_evaluation(config)
    assert (plan.config.model.model, plan.data) == (toy_checkpoint, toy_data.val_jsonl)
    assert len(plan.samples) == 4
    names = []
    for _ in range(3):
        out = plan_evaluation(config).out
        out.mkdir(parents=True)
        (out / "scores.json").touch()
        names.append(str(out.relative_to(tmp_path / "run" / "evaluations")))
    assert names == ["model-val", "model-val-2", "model-val-3"]
    assert find_start(config, processes=1) == BEGINNING, "the run can still start"
    other = copied(toy_checkpoint, tmp_path / "checkpoint-7")
    plan = plan_evaluation(config, other, toy_data.train_jsonl, tmp_path / "out")
    assert plan.config.model.model == other
    assert (len(plan.samples), plan.out) == (24, tmp_path / "out")


@pytest.mark.req("SYNC-01")
def test_full_weights_are_pushed_and_training_is_not_set_up(mapping: dict[str, Any]) -> None:
    """Servers that only got an adapter would answer with whatever they had loaded."""
    served = {"rollout_matching": {"rollout_backend": "vllm", "vllm": ADAPTERS}}
    trained = {"training": {"data_parallel": "fsdp2"}}
    plan = plan_evaluation(parse_config(merge(merge(mapping, LORA), merge(served, trained))))
    assert plan.config.rollout_matching.vllm.sync.mode == "full"
    assert plan.config.tuner.train_type == "full"
    assert plan.config.training.data_parallel == "ddp"


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "holds no *.safetensors"),
        ("", "has no rollmatch_state.json"),
    ],
)
def test_incomplete_checkpoint_is_refused(
    config: Config, toy_checkpoint: Path, tmp_path: Path, missing: str, found: str
) -> None:
    folder = copied(toy_checkpoint, tmp_path / "checkpoint-3", without=missing)
    if not missing:
        (folder / "rollmatch_state.json").write_text("{}")
    with refused("--checkpoint", found):
        plan_evaluation(config, folder)


def test_bad_data_folder_and_processes_are_refused(
    mapping: dict[str, Any], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ContractError, match="there is no such file"):
        plan_evaluation(config, data=tmp_path / "no.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"images": []}\n')
    with pytest.raises(ContractErrors) as caught:
        plan_evaluation(config, data=tmp_path / "bad.jsonl")
    assert all(e.where == f"{tmp_path / 'bad.jsonl'}:1" for e in caught.value.errors)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ContractError, match="not an empty directory"):
        plan_evaluation(config, out=tmp_path / "out")
    with pytest.raises(ContractError, match="and so is --data"):
        plan_evaluation(parse_config(merge(mapping, {"data": {"val_jsonl": None}})))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ContractError, match="without torchrun"):
        plan_evaluation(config)


# The adapter of the first step already changes the answers.
FAST_LORA: dict[str, Any] = {
    "tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 16},
    "training": {
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "max_steps": 1,
    },
}


def evaluate(config: Path, *options: str | Path) -> Result:
    arguments = ["eval", "--config", str(config), *map(str, options)]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def ids_of(run: TrainedRun, step: int) -> list[list[int]]:
    return [answer.response_token_ids for answer in run.answers(step)]


@pytest.mark.req("MET-03")
def test_run_logs_average_precision_and_keeps_its_answers(trained_run: TrainedRun) -> None:
    logged = trained_run.lines("eval/f1")
    assert [scores["step"] for scores in logged] == list(range(1, STEPS + 1))
    for scores in logged:
        step = scores["step"]
        assert scores["eval/ap"] == scores["eval/ap50"] == scores["eval/box_ap"] == 0
        assert len(trained_run.answers(step)) == 4
        folder = trained_run.folder / "evaluations" / f"step_{step:06d}"
        kept = json.loads((folder / "scores.json").read_text())
        assert (kept["step"], kept["coco"]["bbox"]["objects"]["ap"]) == (step, 0)
    versions = [{a.weights_version for a in trained_run.answers(s)} for s in (1, STEPS)]
    assert versions[0].isdisjoint(versions[1])


@pytest.mark.req("RUN-01")
def test_resumed_run_repeats_the_evaluations_after_its_checkpoint(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run = trained_run.copy(tmp_path)
    evaluations = run.folder / "evaluations"
    shutil.rmtree(run.folder / f"checkpoint-{STEPS}")
    (evaluations / "step_000001" / "kept").touch()
    (evaluations / "step_000003" / "stale").touch()
    for name in ("step_000009", "step_000009.part", "checkpoint-9-val"):
        (evaluations / name).mkdir()
    trained(run.config, resume="auto")
    assert [scores["step"] for scores in run.lines("eval/f1")] == list(range(1, STEPS + 1))
    kept = ["checkpoint-9-val", *(f"step_{step:06d}" for step in range(1, STEPS + 1))]
    assert sorted(path.name for path in evaluations.iterdir()) == kept
    assert (evaluations / "step_000001" / "kept").exists()
    assert not (evaluations / "step_000003" / "stale").exists()
    assert ids_of(run, STEPS) == ids_of(trained_run, STEPS)


@pytest.mark.req("CFG-10")
def test_command_gives_the_answers_of_the_run(trained_run: TrainedRun, tmp_path: Path) -> None:
    run = trained_run.copy(tmp_path)
    done = evaluate(run.config, "--checkpoint", run.folder / f"checkpoint-{STEPS}")
    assert done.exit_code == 0
    out = run.folder / "evaluations" / f"checkpoint-{STEPS}-val"
    found, own = read_answers(out), run.answers(STEPS)
    assert [a.response_token_ids for a in found] == [a.response_token_ids for a in own]
    assert [a.seed for a in found] == [a.seed for a in own]
    for name in ("coco_gt.json", "coco_preds.json"):
        kept = run.folder / "evaluations" / f"step_{STEPS:06d}" / name
        assert (out / name).read_bytes() == kept.read_bytes()
    scores = json.loads((out / "scores.json").read_text())
    assert scores["checkpoint"] == str(run.folder / f"checkpoint-{STEPS}")
    assert scores["versions"]["transformers"]
    assert scores["settings"]["rollout_matching"]["max_new_tokens"] == 12
    for text in ("boxes, descriptions ignored", str(out)):
        assert text in done.output
    assert f"Report: {run.folder}/report.html" in done.output
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert f'<dt>Held-out F1</dt><dd><a href="evaluations/{out.name}/report.html">' in page


def test_adapter_answers_as_in_its_run(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, toy_checkpoint, toy_data, **FAST_LORA)
    run = trained(config)
    checkpoint = run.folder / "checkpoint-1"
    assert not (checkpoint / "config.json").exists()
    evaluate(config, "--checkpoint", checkpoint, "--out", tmp_path / "adapter")
    evaluate(config, "--out", tmp_path / "base")
    ids = {
        name: [answer.response_token_ids for answer in read_answers(tmp_path / name)]
        for name in ("adapter", "base")
    }
    assert ids["adapter"] == ids_of(run, 1)
    assert ids["adapter"] != ids["base"]
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    file = checkpoint / "adapter_model.safetensors"
    save_file(dict(sorted(load_file(file).items())[1:]), file)
    with pytest.raises(ContractError, match="bytes of"):
        evaluate(config, "--checkpoint", checkpoint, "--out", tmp_path / "out")
    (checkpoint / "rollmatch_state.json").unlink()
    with pytest.raises(ContractError, match="lacks 1 parameter,"):
        evaluate(config, "--checkpoint", checkpoint, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 600, 600, 900, 900)
# Ends of lines to Python, and none in JSON.
ODD = "\u2028 \x85 \x0c"


@pytest.fixture
def found(tmp_path: Path) -> list[ScoredAnswer]:
    """Four right answers, one that misses an object, one without any object."""
    image = tmp_path / "scene.png"
    Image.new("RGB", (64, 64)).save(image)
    predicted = [[CAT, DOG], [DOG], [], [CAT, DOG], [CAT, DOG], [CAT, DOG]]
    return [
        answered(sample(line, [CAT, DOG], image=image), objects, text=f"{{}}{ODD}")
        for line, objects in enumerate(predicted, start=1)
    ]


def scored(answers: list[ScoredAnswer], folder: Path) -> Scored:
    return Scored.of(answers, folder / "val.jsonl", polygons=False)


def test_evaluation_is_complete_and_read_back(found: list[ScoredAnswer], tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_evaluation(out, scored(list(reversed(found)), tmp_path), {"checkpoint": "checkpoint-3"})
    assert read_answers(out) == read_answers(out / ANSWERS) == found
    line = json.loads((out / ANSWERS).read_text(encoding="utf-8").split("\n")[1])
    assert (line["hits"], line["precision"], line["recall"]) == (1, 1.0, 0.5)
    numbers = json.loads((out / "scores.json").read_text())
    assert numbers["scores"]["recall"] == pytest.approx(9 / 12)
    assert numbers["coco"]["bbox"]["objects"]["ap_large"] is None
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "checkpoint-3" in page
    assert found[2].sample_id in page


@pytest.mark.req("IO-01")
@pytest.mark.parametrize("form", ["coco", "lvis"])
def test_predictions_are_results_for_the_converted_data_file(form: str, tmp_path: Path) -> None:
    paint_all(tmp_path, ["a.png", "b.png"])
    lists = {"metadata": {"neg_categories": ["bird"]}} if form == "lvis" else {}
    objects = [box_of_a_line(o.desc, *o.shape.coords) for o in (DOG, CAT)]
    lines = [line("b.png", *objects), line("a.png", objects[0]) | lists]
    data = write_lines(tmp_path / "val.jsonl", *lines)
    data_app(["convert", "--to", form, str(data), str(tmp_path / "gt.json")], standalone_mode=False)
    cow = box("a cow", 5, 5, 400, 400)
    answers = [
        answered(given, predicted)
        for given, predicted in zip(
            read_samples(data, allow_poly=False), ([CAT], [cow, DOG]), strict=True
        )
    ]
    for number, item in enumerate(o for answer in answers for o in answer.parse.objects):
        item.confidence = 0.25 * (number + 1)
    out = tmp_path / "out"
    write_evaluation(out, Scored.of(answers, data, polygons=False), {})

    truth = COCO(str(tmp_path / "gt.json"))
    results = truth.loadRes(str(out / "coco_preds.json"))
    found = [
        (truth.imgs[one["image_id"]]["file_name"], truth.cats[one["category_id"]]["name"])
        for one in results.anns.values()
        if one["category_id"] in truth.cats
    ]
    assert found == [("b.png", "cat"), ("a.png", "dog")]
    assert [one["score"] for one in results.anns.values()] == [0.25, 0.5, 0.75]
    own = json.loads((out / "coco_gt.json").read_text())
    assert own["categories"][:-1] == truth.dataset["categories"]
    assert own["categories"][-1]["name"] == "a cow"
    assert [image["id"] for image in own["images"]] == [i["id"] for i in truth.dataset["images"]]


def finished(
    folder: Path, answers: list[ScoredAnswer], peers: Peers, step: int = 120, save: bool = True
) -> dict[str, float]:
    detection = {"eval_detection": {"enabled": True, "save_answers": save}}
    training = {"eval_strategy": "steps", "eval_steps": 3}
    sections = {"training": training, "rollout_matching": detection}
    config = small_config(Path("/model"), ToyData.under(folder), folder, **sections)
    own, facts = answers[peers.rank :: peers.count], {"run": str(folder)}
    return finish_evaluation(config, step, own, facts, peers)


@pytest.mark.req("MET-01")
def test_several_processes_evaluate_as_one(found: list[ScoredAnswer], tmp_path: Path) -> None:
    alone = finished(tmp_path / "one", found, SINGLE_PROCESS)
    ranks = in_ranks(3, lambda peers: finished(tmp_path / "three", found, peers))
    assert [rank.result() for rank in ranks] == [alone] * 3
    recalled = 67 + 84  # of 101 points: those up to 4/6 of the cats, and up to 5/6 of the dogs
    assert alone["eval/ap"] == pytest.approx(recalled / 101 / 2)
    one, three = (tmp_path / name / "evaluations" / "step_000120" for name in ("one", "three"))
    assert read_answers(one) == read_answers(three) == found
    for name in ("coco_gt.json", "coco_preds.json", ANSWERS):
        assert (one / name).read_bytes() == (three / name).read_bytes()
    assert [path.name for path in three.parent.iterdir()] == ["step_000120"]
    finished(tmp_path / "one", found[:1], SINGLE_PROCESS)
    assert read_answers(one) == found[:1], "a repeated evaluation replaces the first"
    assert finished(tmp_path / "none", found, SINGLE_PROCESS, save=False) == alone
    assert not (tmp_path / "none").exists()


def test_answers_that_cannot_be_kept_warn_and_those_that_cannot_be_written_end_the_run(
    found: list[ScoredAnswer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = finished(tmp_path / "kept", found, SINGLE_PROCESS)
    taken = tmp_path / "run" / "evaluations" / "step_000120"
    taken.parent.mkdir(parents=True)
    taken.write_text("a file in the place of the folder")
    assert finished(tmp_path / "run", found, SINGLE_PROCESS) == kept
    (warning,) = caplog.messages
    assert warning.startswith(f"the answers of the evaluation {taken} are not kept: ")
    monkeypatch.setattr("learner.analysis.evaluation.folder.write_gallery", full)
    with pytest.raises(RunError, match="step_000120: No space left on device"):
        finished(tmp_path / "full", found, SINGLE_PROCESS)
    assert not (tmp_path / "full" / "evaluations" / "step_000120").exists()
