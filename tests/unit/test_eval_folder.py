"""What an evaluation leaves: files that say all of it, of one process or of several."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pycocotools.coco import COCO

from learner.analysis.evaluation.folder import (
    ANSWERS,
    EvaluationLog,
    Scored,
    read_answers,
    write_evaluation,
)
from learner.analysis.evaluation.scores import ScoredAnswer
from learner.commands.data import data_app
from learner.data.coco import read_coco
from learner.data.jsonl import read_samples
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.runs.atomic_files import require_free
from learner.runs.resume import truncate_logs
from learner.runs.rollout_log import LoggedAnswer
from shared_contracts.errors import ContractError, RunError
from tests.unit.data_files import box as box_of_a_line
from tests.unit.data_files import line, paint_all, write_lines
from tests.unit.eval_answers import answered, box, sample
from tests.unit.ranks_in_threads import in_ranks

CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 600, 600, 900, 900)
# Ends of lines to Python, and none in JSON.
ODD = "\u2028 \x85 \x0c"


@pytest.fixture
def found(tmp_path: Path) -> list[ScoredAnswer]:
    """Of six samples, four right ones, one that misses an object, one with nothing right."""
    image = tmp_path / "scene.png"
    Image.new("RGB", (64, 64)).save(image)
    said = [[CAT, DOG], [DOG], [], [CAT, DOG], [CAT, DOG], [CAT, DOG]]
    return [
        answered(sample(line, [CAT, DOG], image=image), objects, text=f"{{}}{ODD}")
        for line, objects in enumerate(said, start=1)
    ]


def scored(answers: list[ScoredAnswer], folder: Path) -> Scored:
    return Scored.of(answers, folder / "val.jsonl", polygons=False)


@pytest.mark.req("EVAL-01")
def test_a_folder_has_all_of_it_and_is_read_back(found: list[ScoredAnswer], tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = scored(list(reversed(found)), tmp_path)
    write_evaluation(out, whole, {"checkpoint": "checkpoint-3", "settings": {"a": 1}})
    assert read_answers(out) == read_answers(out / ANSWERS) == found
    assert isinstance(read_answers(out)[0], LoggedAnswer)
    line = json.loads((out / ANSWERS).read_text(encoding="utf-8").split("\n")[1])
    assert (line["hits"], line["precision"], line["recall"]) == (1, 1.0, 0.5)
    numbers = json.loads((out / "scores.json").read_text())
    assert (numbers["checkpoint"], numbers["settings"]) == ("checkpoint-3", {"a": 1})
    assert numbers["scores"]["recall"] == pytest.approx(9 / 12)
    assert numbers["scores"]["precision"] == 1
    assert numbers["coco"]["bbox"]["objects"]["ap"] == whole.detected["bbox"].objects.ap
    assert numbers["coco"]["bbox"]["objects"]["ap_large"] is None
    assert [c["name"] for c in numbers["coco"]["bbox"]["categories"]] == ["cat", "dog"]
    truth = read_coco(out / "coco_gt.json")
    assert [image.file_name for image in truth.images] == ["scene.png"] * 6
    assert len(json.loads((out / "coco_preds.json").read_text())) == 9
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "checkpoint-3" in page
    assert found[2].sample_id in page


@pytest.mark.req("EVAL-01", "IO-01")
@pytest.mark.parametrize("form", ["coco", "lvis"])
@pytest.mark.parametrize("sure", [True, False])
def test_predictions_are_results_for_the_converted_data_file(
    form: str, sure: bool, tmp_path: Path
) -> None:
    """`sure`: there are log-probabilities."""
    paint_all(tmp_path, ["a.png", "b.png"])
    lists = {"metadata": {"neg_categories": ["bird"]}} if form == "lvis" else {}
    objects = [box_of_a_line(o.desc, *o.shape.coords) for o in (DOG, CAT)]
    lines = [line("b.png", *objects), line("a.png", objects[0]) | lists]
    data = write_lines(tmp_path / "val.jsonl", *lines)
    data_app(["convert", "--to", form, str(data), str(tmp_path / "gt.json")], standalone_mode=False)
    cow = box("a cow", 5, 5, 400, 400)
    answers = [
        answered(asked, said)
        for asked, said in zip(
            read_samples(data, allow_poly=False), ([CAT], [cow, DOG]), strict=True
        )
    ]
    for number, item in enumerate(o for answer in answers for o in answer.parse.objects):
        item.confidence = 0.25 * (number + 1) if sure else None
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
    scores = [one["score"] for one in results.anns.values()]
    assert scores == ([0.25, 0.5, 0.75] if sure else [1, 1, 1])
    own = json.loads((out / "coco_gt.json").read_text())
    assert own["categories"][:-1] == truth.dataset["categories"]
    assert own["categories"][-1]["name"] == "a cow"
    assert [image["id"] for image in own["images"]] == [i["id"] for i in truth.dataset["images"]]


@pytest.mark.req("IO-01")
def test_predictions_have_the_fields_that_fiftyone_documents(
    found: list[ScoredAnswer], tmp_path: Path
) -> None:
    """Of the labels that `fiftyone.utils.coco.add_coco_labels` takes."""
    files = scored(found, tmp_path).files
    assert [label["id"] for label in files.detections] == list(range(1, 10))
    for label in files.detections:
        assert label.keys() == {"id", "image_id", "category_id", "bbox", "score"}
        assert [type(value) for value in label["bbox"]] == [float] * 4
    assert {category["id"] for category in files.ground_truth["categories"]} == {1, 2}
    images = files.ground_truth["images"]
    assert [image.keys() for image in images] == [{"id", "file_name", "width", "height"}] * 6


@pytest.mark.req("EVAL-01")
def test_a_folder_is_whole_or_not_there(
    found: list[ScoredAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_evaluation(out, scored(found, tmp_path), {"checkpoint": object()})
    assert not out.exists()
    require_free(out)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ContractError, match="not an empty directory"):
        write_evaluation(tmp_path / "taken", scored(found, tmp_path), {})


@pytest.mark.req("EVAL-01")
@pytest.mark.parametrize("text", [None, "{}\n", "no JSON\n"])
def test_a_file_that_is_something_else_is_told(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ANSWERS).write_text(text)
    with pytest.raises(ContractError, match="is no gt_vs_pred") as caught:
        read_answers(tmp_path)
    assert caught.value.where == str(tmp_path / ANSWERS)


def finished(
    folder: Path, answers: list[ScoredAnswer], peers: Peers, step: int = 120, save: bool = True
) -> dict[str, float]:
    """What each process of a run does with the answers to its samples."""
    data, facts = folder / "val.jsonl", {"run": str(folder)}
    log = EvaluationLog(folder, data, facts, polygons=False, save=save, peers=peers)
    peers.all_gather(lambda: log.leave(answers[peers.rank :: peers.count]))
    return log.finish(step)


@pytest.mark.req("EVAL-01", "MET-01")
def test_several_processes_come_to_what_one_comes_to(
    found: list[ScoredAnswer], tmp_path: Path
) -> None:
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


@pytest.mark.req("EVAL-01")
def test_a_run_that_saves_no_answers_leaves_none(found: list[ScoredAnswer], tmp_path: Path) -> None:
    kept = finished(tmp_path / "kept", found, SINGLE_PROCESS)
    assert finished(tmp_path / "run", found, SINGLE_PROCESS, save=False) == kept
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.req("EVAL-01", "RUN-01")
def test_an_evaluation_that_is_made_again_takes_the_place_of_the_first(
    found: list[ScoredAnswer], tmp_path: Path
) -> None:
    finished(tmp_path, found[:1], SINGLE_PROCESS)
    finished(tmp_path, found, SINGLE_PROCESS)
    assert read_answers(tmp_path / "evaluations" / "step_000120") == found


@pytest.mark.req("EVAL-01")
def test_a_run_goes_on_where_its_answers_cannot_be_kept(
    found: list[ScoredAnswer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = finished(tmp_path / "kept", found, SINGLE_PROCESS)
    taken = tmp_path / "run" / "evaluations" / "step_000120"
    taken.parent.mkdir(parents=True)
    taken.write_text("a file where the folder is to be")
    assert finished(tmp_path / "run", found, SINGLE_PROCESS) == kept
    (told,) = caplog.messages
    assert told.startswith(f"the answers of the evaluation {taken} are not kept: ")
    assert list(taken.parent.iterdir()) == [taken]


@pytest.mark.req("EVAL-01")
def test_answers_that_the_processes_cannot_share_end_a_run_with_a_message(
    found: list[ScoredAnswer], tmp_path: Path
) -> None:
    (tmp_path / "evaluations").write_text("a file where the folder is to be")
    with pytest.raises(RunError, match=r"answers of an evaluation cannot be shared: .*evaluations"):
        finished(tmp_path, found, SINGLE_PROCESS)


@pytest.mark.req("EVAL-01")
def test_a_full_disk_ends_a_run_that_keeps_its_answers(
    found: list[ScoredAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("learner.analysis.evaluation.folder.write_gallery", full)
    with pytest.raises(RunError, match="step_000120: No space left on device"):
        finished(tmp_path, found, SINGLE_PROCESS)
    assert not (tmp_path / "evaluations" / "step_000120").exists()


@pytest.mark.req("EVAL-01", "RUN-01")
def test_a_run_that_goes_on_keeps_the_evaluations_up_to_its_checkpoint(tmp_path: Path) -> None:
    kept = ["checkpoint-130-val", "step_000100", "step_000120", "step_000130-val"]
    for name in (*kept, "step_000121", "step_000130", "step_000130.part"):
        (tmp_path / "evaluations" / name).mkdir(parents=True)
    truncate_logs(tmp_path, {}, step=120)
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == kept


def test_numbers_of_a_folder_are_json(found: list[ScoredAnswer], tmp_path: Path) -> None:
    numbers: dict[str, Any] = scored(found, tmp_path).numbers()
    assert json.loads(json.dumps(numbers, allow_nan=False)) == json.loads(json.dumps(numbers))
    assert numbers["answers"] == {"count": 6, "truncated": 0, "invalid": 0, "repeat_terminated": 0}
