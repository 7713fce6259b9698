"""The tables of the benchmark of the method: its runs need hours, how they compute is tested."""

import json
from pathlib import Path

from benchmarks.method_parts.arms import TITLES
from benchmarks.method_parts.records import (
    Run,
    at_equal_steps,
    at_equal_time,
    read_runs,
    score_table,
    time_table,
)
from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.types import GroundTruthObject, Shape
from tests.unit.eval_answers import DATA, answers

# Three scenes, and the answers of an arm after some steps.

CAT = GroundTruthObject("red triangle", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("blue triangle", Shape("bbox_2d", (500, 510, 700, 710)))
SCENES = [[CAT, DOG], [CAT], [DOG]]
NOTHING: list[list[GroundTruthObject]] = [[], [], []]
TWICE = [[CAT, CAT, DOG], [CAT, CAT], [DOG]]


def run_folder(
    out: Path,
    arm: str,
    seed: int,
    objects_at: dict[int, list[list[GroundTruthObject]]],
    step_s: float,
) -> None:
    """A run with an evaluation at each step of `objects_at`."""
    folder = out / f"{arm}_{seed}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"commit": "0123456789abcdef"}))
    rows = [{"step": step, "time/step_s": step_s} for step in range(1, max(objects_at) + 1)]
    rows.insert(1, {"step": 1, "eval/f1": 0.5})  # an evaluation has no seconds of training
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step, objects in objects_at.items():
        found = answers(*zip(SCENES, objects, strict=True))
        folder_of_step = folder / "evaluations" / f"step_{step:06d}"
        folder_of_step.parent.mkdir(exist_ok=True)
        write_evaluation(folder_of_step, Scored.of(found, DATA, polygons=False), {})


def experiment(out: Path) -> dict[tuple[str, int], Run]:
    """Channel A finds nothing, then duplicates, then all; the other arm finds all at once."""
    for seed in (0, 1):
        run_folder(out, "a_alone", seed, {0: NOTHING, 10: TWICE, 20: SCENES}, step_s=1.0)
        run_folder(out, "clean", seed, {0: NOTHING, 10: SCENES}, step_s=1.5)
    (out / "clean_2.part").mkdir()
    return {(run.arm, run.seed): run for run in read_runs(out, TITLES)}


def rows(table: str, title: str) -> list[str]:
    (found,) = (line for line in table.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in found.split("|")[1:-1]]


def test_an_arm_is_compared_with_channel_a_at_equal_steps_and_at_equal_time(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    assert sorted(found) == [("a_alone", 0), ("a_alone", 1), ("clean", 0), ("clean", 1)]
    run, alone = found["clean", 0], found["a_alone", 0]
    assert (run.evaluated, run.seconds(10), run.seconds(4)) == ([0, 10], 15.0, 6.0)
    row = at_equal_steps(run, alone, 10)
    assert (row.against["F1@mIoU"].first, row.against["F1@mIoU"].second) == (0.8, 1.0)
    later = at_equal_time(run, alone, 10)  # after 15 s channel A has evaluated step 20
    assert (later.against["F1@mIoU"].first, later.against["F1@mIoU"].difference) == (1.0, 0.0)
    by_arm = {
        "channel A alone": [
            at_equal_steps(found["a_alone", s], found["a_alone", s], 10) for s in (0, 1)
        ],
        "cleaned": [at_equal_steps(found["clean", s], found["a_alone", s], 10) for s in (0, 1)],
    }
    scores = score_table(by_arm, "channel A alone")
    alone_row, cleaned = rows(scores, "channel A alone"), rows(scores, "cleaned")
    assert alone_row[1:7] == ["0.800", "0.800", "0.667", "1.000", "2.0", "0.67"]
    assert cleaned[1:7] == ["1.000", "1.000", "1.000", "1.000", "1.3", "0.00"]
    assert cleaned[-4:] == ["15", "+0.200", "0 of 2", "0.00"]
    timed = {"cleaned": [at_equal_time(found["clean", s], found["a_alone", s], 10) for s in (0, 1)]}
    assert rows(time_table(timed), "cleaned")[1:4] == ["1.000", "1.000", "+0.000"]
