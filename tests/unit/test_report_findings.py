"""What a person should look at first is computed, and a good run has nothing wrong in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.analysis.report.answers import Tally
from learner.analysis.report.findings import Highlight, findings
from learner.analysis.report.run_view import (
    RunView,
    Tile,
    evaluations_of,
    facts,
    headline,
    how_to_evaluate,
    state,
    tiles,
)
from learner.runs.rollout_log import StepAnswer
from shared_contracts.errors import ContractError
from tests.unit.report_folder import B, MadeRun, answer, call_line, step_line

END = {"train_runtime": 115.2, "train_loss": 1.0}


def steps(count: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [step_line(step, **more) for step in range(1, count + 1)]


def found(
    path: Path,
    lines: list[dict[str, Any]],
    answers: list[StepAnswer] | None = None,
    unreadable: int = 0,
    **run: Any,
) -> list[Highlight]:
    error = run.pop("error", None)
    view = RunView.of(MadeRun(path, lines, **run).write(), error)
    tally = Tally()
    tally.offer(answers or [])
    return findings(view, tally, unreadable)


def texts(found: list[Highlight]) -> list[str]:
    return [f"{finding.weight} {finding.section}: {finding.text}" for finding in found]


def test_a_good_run_has_nothing_wrong_in_it(tmp_path: Path) -> None:
    lines = steps(time__wait_s=0.1, time__push_s=0.1)
    assert [finding.weight for finding in found(tmp_path, lines, [answer()] * 50)] == ["good"]


def spoilt(step: int, **more: Any) -> list[dict[str, Any]]:
    lines = steps(time__wait_s=0.1)
    lines[step - 1] |= more
    return lines


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            spoilt(7, loss=None),
            "bad curves: The loss was not a finite number in 1 step (first: step 7)",
        ),
        (
            spoilt(7, grad_norm=None),
            "bad curves: The gradient norm was not a finite number in 1 step (first: step 7)",
        ),
        (spoilt(3, **{"rollout/servers_lost": 2.0}), "bad sync: Servers were lost 2 times"),
        (spoilt(3, **{"rollout/retries": 1.0}), "look sync: 1 server call had to be made again"),
        (
            spoilt(3, **{"rollout/repeat_terminate_triggered_sequences": 5.0}),
            "look answers: The repeat guard ended 5 answers",
        ),
        (
            spoilt(9, **{"time/push_s": 0.9}),
            "look timeline: 1 push took longer than the step's training",
        ),
        (steps(), "look timeline: Steps with answers spent 33% of their time waiting for packs"),
        (
            steps(time__push_s=0.48),
            "look timeline: Steps with answers spent 40% of their time pushing weights",
        ),
        (
            steps(rollout__parse_truncated_rate=0.12),
            "look answers: 12.0% of the answers were truncated",
        ),
    ],
)
def test_what_is_wrong_is_told_with_where_to_look(
    lines: list[dict[str, Any]], told: str, tmp_path: Path
) -> None:
    assert told in texts(found(tmp_path, lines))
    assert told not in texts(found(tmp_path / "good", steps(time__wait_s=0.1)))


def test_a_drop_reason_that_rises_is_named_with_both_shares(tmp_path: Path) -> None:
    lines = steps()
    for line in lines:
        late = line["step"] > 20
        line[f"{B}/strict_drop/bbox_invalid"] = 4.0 if late else 1.0
        line[f"{B}/N_drop_invalid"] = 6.0 if late else 3.0
        line[f"{B}/strict_drop/key_invalid"] = 2.0  # as ever
    rises = [text for text in texts(found(tmp_path, lines)) if "rises" in text]
    assert rises == [
        "look answers: Drop reason bbox_invalid rises: 2.33% of the predicted objects in the first "
        "third, 8.70% in the last"
    ]


def test_answers_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    cut = answer(truncated=True, finish_reason="length")
    answers = [
        *[answer()] * 80,
        *[cut] * 12,
        answer(invalid=True),
        answer(supervised=False),
        *[answer(predicted=[("dog", (110, 100, 400, 400))])] * 15,
        *[answer(dropped=[("object_2", "key_invalid")])] * 2,
    ]
    lines = steps()
    lines[0] |= {f"{B}/strict_drop/key_invalid": 2.0}
    assert {text for text in texts(found(tmp_path, lines, answers, 3)) if "answer" in text} >= {
        "look answers: 10.8% of the answers were truncated at max_new_tokens (16)",
        "look answers: 0.9% of the answers are no JSON object at all",
        "look gallery: 1 answer could not be trained on and were left out",
        "look gallery: 13.5% of the answers describe an object they found by a wrong name",
        "look answers: The parser dropped objects of 1.8% of the answers, most of them as "
        "key_invalid",
        "look gallery: 3 images of the answers shown cannot be read any more",
    }


def test_an_evaluation_that_was_better_before_is_told(tmp_path: Path) -> None:
    scores = [{"step": 10 * at, "eval/f1": f1} for at, f1 in enumerate([0.2, 0.8, 0.75], start=1)]
    assert "look curves: The best F1 was 0.800 at step 20; the last is 0.750" in texts(
        found(tmp_path, [*steps(), *scores])
    )
    rising = texts(found(tmp_path / "rising", [*steps(), *scores[:2]]))
    assert "good curves: The last F1, 0.800, is the best" in rising
    none = [{"step": step, "eval/f1": 0.0} for step in (10, 20)]
    assert "The last F1" not in str(texts(found(tmp_path / "none", [*steps(), *none])))


def test_a_loss_and_a_match_rate_that_go_the_wrong_way_are_told(tmp_path: Path) -> None:
    lines = steps()
    for line in lines:
        line["loss"] = float(line["step"])
        line[f"{B}/match_rate"] = 1 / line["step"]
    told = texts(found(tmp_path, lines))
    assert (
        "look curves: The loss of channel B rose: 5.500 in the first third of its steps, 25.50 in "
        "the last" in told
    )
    assert any(
        text.startswith("look curves: The match rate of training images did not rise: 29.3%")
        for text in told
    )


def test_an_adapter_that_gave_way_to_full_weights_is_told(tmp_path: Path) -> None:
    calls = [call_line(1, sync_fallback="it has DoRA"), call_line(2, sync_fallback=None)]
    assert "bad sync: Full weights replaced the adapter: it has DoRA" in texts(
        found(tmp_path, steps(), calls=calls)
    )


def test_what_is_wrong_comes_before_what_is_worth_a_look(tmp_path: Path) -> None:
    lines = steps(time__push_s=0.9)
    lines[3]["loss"] = None
    weights = [finding.weight for finding in found(tmp_path, lines, error="no server is left")]
    assert weights == sorted(weights, key=["bad", "look", "good"].index)
    assert weights[0] == "bad"


def view(path: Path, lines: list[dict[str, Any]], error: str | None = None, **run: Any) -> RunView:
    return RunView.of(MadeRun(path, lines, **run).write(), error)


def test_the_state_of_a_run_is_told(tmp_path: Path) -> None:
    lines = steps(2)
    assert state(view(tmp_path / "none", [])) == "No step is logged yet."
    going_on = state(view(tmp_path / "on", lines))
    assert going_on.startswith("Not finished: step 2 of 3. The last line was logged 2")
    over = [*lines, {"step": 2, **END}]
    assert state(view(tmp_path / "end", over)) == "Finished: 2 steps in 1m55s."
    again = [*over, step_line(3)]  # resumed with more steps
    assert state(view(tmp_path / "again", again)).startswith("Not finished: step 3 of 3.")
    failed = state(view(tmp_path / "failed", lines, "no server is left"))
    assert failed == "Ended by an error at step 2 of 3."


def test_the_steps_of_a_run_over_epochs_are_told_from_its_pace(tmp_path: Path) -> None:
    epochs = {"training": {"max_steps": None, "num_train_epochs": 2.0, "save_steps": 50}}
    run = view(tmp_path, steps(30), sections={**epochs})
    assert run.total_steps == 200


def headline_of(run: RunView) -> list[Tile]:
    found = evaluations_of(run)
    return tiles(run, headline(found, run.config.data.val_jsonl), "#evaluations")


@pytest.mark.req("REPORT-01")
def test_the_head_has_the_last_scores_and_what_the_run_is(tmp_path: Path) -> None:
    scores = {"step": 30, "eval/f1": 0.78, "eval/precision": 0.8, "eval/recall": 0.76}
    run = view(tmp_path, [*steps(), scores], facts={"rollout_backend": "hf", "rollouts": "itself"})
    shown = headline_of(run)
    assert {tile.name: tile.value for tile in shown} == {
        "Held-out F1": "0.780",
        "Precision": "0.800",
        "Recall": "0.760",
        "Match rate": "0.884",
        "Loss": "0.2383",
        "Seconds a step": "1.200",
    }
    assert (shown[0].name, shown[0].note) == ("Held-out F1", "after step 30, val.jsonl")
    assert shown[3].note.startswith("of training images")
    told = facts(run)
    assert told["variant"] == "stage2_two_channel, channel B in 50% of the steps"
    assert told["answers by"] == "hf: itself"
    assert told["commit"] == "0123456789ab"


@pytest.mark.req("REPORT-01")
def test_a_run_without_an_evaluation_says_so_and_how_to_get_one(tmp_path: Path) -> None:
    run = view(tmp_path, steps())
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-100").mkdir()
    first = headline_of(run)[0]
    assert first == Tile(
        "Held-out F1", "none yet", "this run has no evaluation; how to get one", "#evaluations"
    )
    assert how_to_evaluate(run) == (
        f"learner eval --config {tmp_path}/resolved_config.yaml "
        f"--checkpoint {tmp_path}/checkpoint-100"
    )


def evaluated(run: RunView, name: str, checkpoint: Path, data: Path, f1: float = 0.5) -> None:
    """As `learner eval` leaves it in the folder of a run."""
    folder = run.folder.path / "evaluations" / name
    folder.mkdir(parents=True)
    told = {
        "checkpoint": str(checkpoint),
        "data": str(data),
        "scores": {"f1": f1, "precision": 0.25, "recall": 0.75},
        "coco": {"bbox": {"objects": {"ap": 0.125}}},
    }
    (folder / "scores.json").write_text(json.dumps(told))
    (folder / "report.html").write_text("<title>Evaluation</title>")


@pytest.mark.req("REPORT-01")
def test_the_headline_is_the_newest_score_of_held_out_data(tmp_path: Path) -> None:
    own = {"step": 20, "eval/f1": 0.6, "eval/precision": 0.6, "eval/recall": 0.6}
    path = tmp_path / "the run"
    run = view(path, [*steps(), own])
    data = run.config.data
    assert data.val_jsonl is not None
    evaluated(run, "a", path / "checkpoint-10", data.val_jsonl, 0.9)
    evaluated(run, "b", path / "checkpoint-30", Path(data.train_jsonl), 1.0)
    evaluated(run, "c", run.config.model.model, data.val_jsonl, 0.1)
    evaluated(run, "d", path / "checkpoint-31", data.val_jsonl, 0.8)  # of steps thrown away
    evaluated(run, "e", tmp_path / "other" / "checkpoint-30", data.val_jsonl, 0.7)
    found = evaluations_of(run)
    assert [(each.step, each.f1, each.held_out) for each in found] == [
        (0, 0.1, True),
        (10, 0.9, True),
        (20, 0.6, True),
        (30, 1.0, False),
    ]
    first = headline(found, data.val_jsonl)
    assert first is found[2]
    assert first.link(path / "report.html") == ""
    evaluated(run, "f", path / "checkpoint-30", data.val_jsonl, 0.65)
    evaluated(run, "g", path / "checkpoint-30", tmp_path / "third.jsonl", 0.99)
    found = evaluations_of(run)
    first = headline(found, data.val_jsonl)
    assert first is not None
    assert (first.f1, first.precision, first.recall, first.ap) == (0.65, 0.25, 0.75, 0.125)
    assert first.link(path / "report.html") == "evaluations/f/report.html"
    assert first.link(tmp_path / "page.html") == "the%20run/evaluations/f/report.html"


def test_scores_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    run = view(tmp_path, steps())
    evaluated(run, "a", tmp_path / "checkpoint-10", Path("/data/val.jsonl"))
    file = tmp_path / "evaluations" / "a" / "scores.json"
    for text in ("{", '{"checkpoint": 3}', f'{{"checkpoint": "{tmp_path}/checkpoint-10"}}'):
        file.write_text(text)
        with pytest.raises(ContractError, match="of this version") as caught:
            evaluations_of(run)
        assert caught.value.where == str(file)
