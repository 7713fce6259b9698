"""The arithmetic of the benchmarks: what they measure needs hours, how they compute is tested."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks import full_size
from benchmarks.command import Bench
from benchmarks.method_parts.arms import TITLES
from benchmarks.method_parts.records import (
    Run,
    at_equal_steps,
    at_equal_time,
    read_runs,
    score_table,
    time_table,
)
from benchmarks.results import median_of, read_json, write_json
from benchmarks.throughput import REQUESTS, Side, UnequalWork, Work, compare
from benchmarks.workload import ANSWER_TOKENS, Scene
from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.models import head
from learner.types import GroundTruthObject, Shape
from tests.unit.eval_answers import DATA, answers

# ---- throughput: ratios of two sides, and verdicts -----------------------------------

ALL_TOKENS = REQUESTS * ANSWER_TOKENS


def side(seconds: float, prompt_tokens: int = 500, tokens: int = ALL_TOKENS) -> Side:
    return lambda scenes: Work(seconds, prompt_tokens, tokens)


def test_a_ratio_is_the_median_over_all_rounds_but_the_first() -> None:
    times = iter([100.0, 2.0, 4.0, 8.0])
    seen: list[list[Scene]] = []

    def peer(scenes: list[Scene]) -> Work:
        seen.append(scenes)
        return Work(next(times), 500, ALL_TOKENS)

    result = compare("ours over theirs", (side(2.0), peer), 3, 1.5, with_image=False)
    assert (result.measured, result.values, result.met) == (2.0, (1.0, 2.0, 4.0), True)
    assert len({scene for scenes in seen for scene in scenes}) == 4 * REQUESTS, "no cached prompt"


def test_sides_with_different_work_are_not_compared() -> None:
    for peer in (side(1.0, tokens=ALL_TOKENS - 1), side(1.0, prompt_tokens=501)):
        with pytest.raises(UnequalWork):
            compare("any", (side(1.0), peer), 1, 1.0, with_image=False)


def test_a_result_has_its_verdict_and_survives_its_file(tmp_path: Path) -> None:
    met = median_of("speed", [1.0, 3.0, 2.0], 2.0, at_least=True)
    missed = median_of("speed", [1.1], 1.0, at_least=False)
    rows = [result.row.split(" | ")[3:5] for result in (met, missed)]
    assert rows == [[">= 2", "met"], ["<= 1", "missed"]]
    write_json([met, missed], tmp_path / "out.json")
    assert read_json(tmp_path / "out.json") == [met, missed]


@pytest.mark.slow
def test_the_plain_and_the_shipped_loss_agree_and_fakes_predict_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark itself raises where losses or gradients differ. Toy widths."""
    # As at full size, a block of the head is a 24th of its gradient.
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 4000 * 128 // 24)
    tiny = full_size.Size(
        segments=2, side=64, objects=2, text={"vocab_size": 4000}, vision={"patch_size": 16}
    )
    bench = Bench(tmp_path, 1, ExitStack())
    ours, plain = full_size.compared(bench, tiny, torch.float32).peaks
    assert ours < plain
    fakes = full_size.memory_ratio(bench, tiny, torch.float32)
    assert fakes.measured == pytest.approx(ours / plain, rel=0.1)


# ---- the method: three scenes, the answers of an arm after some steps ----------------

CAT = GroundTruthObject("red triangle", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("blue triangle", Shape("bbox_2d", (500, 510, 700, 710)))
GHOST = GroundTruthObject("green rectangle", Shape("bbox_2d", (800, 0, 999, 90)))
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


def test_an_arm_is_compared_with_channel_a_at_equal_steps_and_at_equal_time(
    tmp_path: Path,
) -> None:
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
