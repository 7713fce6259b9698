"""The arithmetic of the benchmarks; what they measure is measured elsewhere."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import full_size
from benchmarks.__main__ import NAMES, PAGE, ROOT, with_table
from benchmarks.loss_parts.measuring import Bench
from benchmarks.method_parts.arms import (
    ARMS,
    CONFIGS,
    DRAWN,
    FULL,
    TITLES,
    Arm,
    Place,
    WithoutAppend,
    arm_config,
)
from benchmarks.method_parts.curves import LINES, curves_png
from benchmarks.method_parts.records import (
    Row,
    Run,
    at_equal_steps,
    at_equal_time,
    curves,
    read_runs,
    score_table,
    spread,
    time_table,
)
from benchmarks.method_parts.scenes import MEANINGS, scenes_png
from benchmarks.results import Result, median_of, read_json, table, write_json
from benchmarks.throughput import REQUESTS, Side, UnequalWork, Work, compare
from benchmarks.workload import ANSWER_TOKENS, Scene, infer_call, make_scenes, openai_messages
from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.config import load_config
from learner.config.rollout_matching import MatchingConfig
from learner.data.toy import ToyData
from learner.models import head
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import PromptEncoder
from learner.stages.formats.compact import COMPACT
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.tokens import decode_exactly
from learner.training.channels import Encoding
from learner.types import (
    AssessedRollout,
    GroundTruthObject,
    Role,
    RolloutOutput,
    Sample,
    Shape,
    Target,
)
from shared_contracts.infer import InferCall
from shared_contracts.repeat_guard import (
    RepeatGuard,
)
from tests.unit.answers import encode
from tests.unit.eval_answers import DATA, answered, answers
from tests.unit.eval_answers import sample as eval_sample
from tests.unit.small_run import small_config, written

ALL_TOKENS = REQUESTS * ANSWER_TOKENS


def side(seconds: float, prompt_tokens: int = 500, tokens: int = ALL_TOKENS) -> Side:
    return lambda scenes: Work(seconds, prompt_tokens, tokens)


def test_a_ratio_is_the_median_of_the_rounds_ratios_without_the_first_round() -> None:
    times = iter([100.0, 2.0, 4.0, 8.0])

    def peer(scenes: list[Scene]) -> Work:
        return Work(next(times), 500, ALL_TOKENS)

    result = compare("ours over theirs", (side(2.0), peer), 3, 1.5, with_image=False)
    assert (result.measured, result.values) == (2.0, (1.0, 2.0, 4.0))
    assert result.met


def test_both_sides_get_the_same_new_prompts_in_every_round() -> None:
    seen: dict[str, list[list[Scene]]] = {"ours": [], "peer": []}

    def remember(name: str) -> Side:
        def run(scenes: list[Scene]) -> Work:
            seen[name].append(scenes)
            return Work(1.0, 500, ALL_TOKENS)

        return run

    compare("any", (remember("ours"), remember("peer")), 2, 1.0, with_image=True)
    assert seen["ours"] == seen["peer"]
    prompts = {scene for scenes in seen["ours"] for scene in scenes}
    assert len(prompts) == 3 * REQUESTS


@pytest.mark.parametrize(
    "peer", [side(1.0, tokens=ALL_TOKENS - 1), side(1.0, prompt_tokens=501)], ids=["ids", "prompts"]
)
def test_sides_that_did_different_work_are_not_compared(peer: Side) -> None:
    with pytest.raises(UnequalWork):
        compare("any", (side(1.0), peer), 1, 1.0, with_image=False)


def test_prompts_may_differ_where_the_peer_has_a_template_of_its_own() -> None:
    sides = (side(1.0), side(1.0, prompt_tokens=501))
    compare("any", sides, 1, 1.0, with_image=False, same_template=False)


@pytest.mark.parametrize(
    ("measured", "at_least", "word"),
    [(1.0, True, "met"), (0.9, True, "missed"), (1.0, False, "met"), (1.1, False, "missed")],
)
def test_a_row_says_whether_its_goal_is_met(measured: float, at_least: bool, word: str) -> None:
    row = median_of("speed", [measured], 1.0, at_least).row
    assert row.split(" | ")[4] == word


def test_the_table_shows_what_was_measured_its_spread_and_its_goal() -> None:
    result = Result("probe", 10.0, (9.5, 123.0), 50.0, at_least=False, unit=" ms", detail="max 70")
    *_, row = table([result]).splitlines()
    assert row == "| probe | 10.0 ms | 9.50 .. 123 | <= 50 ms | met | max 70 |"


def test_json_holds_every_value_and_the_verdict(tmp_path: Path) -> None:
    write_json([median_of("speed", [1.0, 3.0, 2.0], 2.5, at_least=True)], tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert (row["measured"], row["values"], row["met"]) == (2.0, [1.0, 3.0, 2.0], False)


@pytest.mark.parametrize(("measured", "word"), [(0.7, "missed"), (1.0, "met"), (1.3, "missed")])
def test_a_goal_may_be_a_range(measured: float, word: str) -> None:
    result = Result("predicted", measured, (measured,), 1.25, at_least=False, least=0.8)
    assert result.row.split(" | ")[3:5] == ["0.8 .. 1.25", word]


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = [
        median_of("speed", [1.0, 3.0, 2.0], 2.5, at_least=True, unit=" s", detail="both"),
        Result("predicted", 1.0, (1.0,), 1.25, at_least=False, least=0.8),
    ]
    write_json(results, tmp_path / "out.json")
    assert read_json(tmp_path / "out.json") == results


def test_the_page_has_a_table_for_every_benchmark_and_gets_a_new_one_in_its_place() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = table([median_of("new", [1.0], 2.0, at_least=False)])
    for name in NAMES:
        changed = with_table(page, name, rows)
        assert changed.count(rows) == 1
        before, after = changed.split(rows)
        assert page.startswith(before)
        assert page.endswith(after)
        assert f"benchmarks.{name}" in before.rpartition("\n## ")[2]
        assert with_table(changed, name, rows) == changed


def test_a_page_without_the_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"benchmarks\.steps"):
        with_table("`.venv/bin/python -m benchmarks.steps`\n\n## Next\n\n| a |\n", "steps", "| b |")


def test_every_benchmark_is_run_with_the_others() -> None:
    commands = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"^    run\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert commands == set(NAMES)


@pytest.mark.parametrize("with_image", [False, True])
def test_the_bodies_of_both_kinds_of_server_say_the_same(with_image: bool) -> None:
    (scene,) = make_scenes(7, 1, with_image)
    (request,) = InferCall.model_validate(infer_call([scene])).infer_requests
    (message,) = request.messages
    *urls, text = openai_messages(scene)[0]["content"]
    assert message.content == "<image>" * with_image + text["text"]
    assert request.images == [url["image_url"]["url"] for url in urls]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_both_ways_of_a_step_at_full_size_are_equal_and_fakes_tell_their_memory(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark itself raises where losses or gradients differ; here at toy widths.

    A CPU widens a product in 16 bits to add it, which fake tensors do not show. At full size that
    is a 24th of the head's gradient, and so it is here.
    """
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 4000 * 128 // 24)
    tiny = full_size.Size(
        segments=2, side=64, objects=2, text={"vocab_size": 4000}, vision={"patch_size": 16}
    )
    bench = Bench(tmp_path, rounds=1)
    found = full_size.compared(bench, tiny, dtype)
    ours, plain = found.peaks
    fakes = full_size.memory_ratio(bench, tiny, dtype)
    assert ours < plain
    assert fakes.measured == pytest.approx(ours / plain, rel=0.1)


# ---- the method ----------------------------------------------------------------------

CAT = GroundTruthObject("red triangle", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("blue triangle", Shape("bbox_2d", (500, 510, 700, 710)))
GHOST = GroundTruthObject("green rectangle", Shape("bbox_2d", (800, 0, 999, 90)))


# ---- what its arms leave behind: three scenes, the answers of an arm after some steps

SCENES = [[CAT, DOG], [CAT], [DOG]]
NOTHING: list[list[GroundTruthObject]] = [[], [], []]
TWICE = [[CAT, CAT, DOG], [CAT, CAT], [DOG]]


def run_folder(
    out: Path, arm: str, seed: int, said: dict[int, list[list[GroundTruthObject]]], step_s: float
) -> None:
    """A run with an evaluation for each step of `said`, and that many seconds a step."""
    folder = out / f"{arm}_{seed}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"commit": "0123456789abcdef"}))
    rows = [{"step": step, "time/step_s": step_s} for step in range(1, max(said) + 1)]
    rows.insert(1, {"step": 1, "eval/f1": 0.5})  # an evaluation has no seconds of training
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step, objects in said.items():
        found = answers(*zip(SCENES, objects, strict=True))
        out_of = folder / "evaluations" / f"step_{step:06d}"
        out_of.parent.mkdir(exist_ok=True)
        write_evaluation(out_of, Scored.of(found, DATA, polygons=False), {})


def experiment(out: Path) -> dict[tuple[str, int], Run]:
    """Channel A alone finds nothing, then repeats, then is right; the arm is right at once."""
    for seed in (0, 1):
        run_folder(out, "a_alone", seed, {0: NOTHING, 10: TWICE, 20: SCENES}, step_s=1.0)
        run_folder(out, "clean", seed, {0: NOTHING, 10: SCENES}, step_s=1.5)
    (out / "clean_2.part").mkdir()
    return {(run.arm, run.seed): run for run in read_runs(out, TITLES)}


def rows(table: str, title: str) -> list[str]:
    (found,) = (line for line in table.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in found.split("|")[1:-1]]


def test_runs_are_found_by_their_names_and_one_that_has_not_ended_is_none(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    assert sorted(found) == [("a_alone", 0), ("a_alone", 1), ("clean", 0), ("clean", 1)]
    run = found["clean", 1]
    assert (run.commit, run.evaluated) == ("0123456789abcdef", [0, 10])
    assert (run.seconds(10), run.seconds(4)) == (15.0, 6.0)


def test_an_arm_is_held_against_channel_a_at_equal_steps_and_at_equal_time(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    run, alone = found["clean", 0], found["a_alone", 0]
    row = at_equal_steps(run, alone, 10)
    assert (row.against["F1@mIoU"].first, row.against["F1@mIoU"].second) == (0.8, 1.0)
    assert not row.above, "three scenes, one of which has no difference"
    later = at_equal_time(run, alone, 10)  # 15 seconds: channel A has had 20 steps by then
    assert (later.against["F1@mIoU"].first, later.against["F1@mIoU"].difference) == (1.0, 0.0)


def test_an_arm_that_takes_longer_than_channel_a_ever_did_meets_its_last_evaluation(
    tmp_path: Path,
) -> None:
    run_folder(tmp_path, "a_alone", 0, {0: NOTHING, 10: TWICE}, step_s=1.0)
    run_folder(tmp_path, "b_75", 0, {0: NOTHING, 10: SCENES}, step_s=9.0)
    alone, run = read_runs(tmp_path, ("a_alone", "b_75"))
    assert at_equal_time(run, alone, 10).against["F1@mIoU"].first == 0.8


def test_the_tables_have_the_scores_of_all_seeds_and_what_an_arm_has_over_channel_a(
    tmp_path: Path,
) -> None:
    found = experiment(tmp_path)
    by_arm: dict[str, list[Row]] = {"channel A alone": [], "cleaned": []}
    for (arm, seed), run in found.items():
        title = "cleaned" if arm == "clean" else "channel A alone"
        by_arm[title].append(at_equal_steps(run, found["a_alone", seed], 10))
    table = score_table(by_arm, "channel A alone")
    alone, cleaned = rows(table, "channel A alone"), rows(table, "cleaned")
    assert alone[1:6] == ["0.800", "0.800", "0.667", "1.000", "2.0"]
    assert alone[6] == "0.67"
    assert alone[-3:] == ["", "", ""]
    assert cleaned[1:7] == ["1.000", "1.000", "1.000", "1.000", "1.3", "0.00"]
    assert cleaned[-4:] == ["15", "+0.200", "0 of 2", "0.00"]
    timed = {"cleaned": [at_equal_time(found["clean", s], found["a_alone", s], 10) for s in (0, 1)]}
    assert rows(time_table(timed), "cleaned")[1:4] == ["1.000", "1.000", "+0.000"]


def test_a_figure_is_the_mean_of_the_seeds_with_the_least_and_the_most() -> None:
    assert spread([0.1, 0.2, 0.6], "{:.2f}".format) == "0.30 (0.10 .. 0.60)"
    assert spread([2.0, 2.0], "{:.0f}".format) == "2"


def test_curves_hold_one_line_of_scores_for_each_seed(tmp_path: Path) -> None:
    runs = list(experiment(tmp_path).values())
    assert curves(runs, "clean", "f1_miou") == ([0, 10], [[0.0, 1.0]] * 2)
    assert curves(runs, "a_alone", "duplicates") == ([0, 10, 20], [[0.0, 2 / 3, 0.0]] * 2)
    assert curves(runs, "no_guard", "f1_miou") == ([], [])


def test_the_pictures_are_small_pngs_in_which_dashes_alone_tell_the_arms_apart(
    tmp_path: Path,
) -> None:
    runs = experiment(tmp_path)
    drawn = {key: TITLES[key] for key in DRAWN}
    png = curves_png([*runs.values()], drawn)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 150_000
    assert len({dashes for _, dashes in LINES}) == len(LINES) == len(DRAWN)


def test_the_picture_of_scenes_marks_hits_repetitions_and_what_was_missed(tmp_path: Path) -> None:
    image = tmp_path / "1.png"
    Image.new("RGB", (64, 64)).save(image)
    asked = eval_sample(1, [CAT, DOG], image=image)
    found = Scored.of([answered(asked, [CAT, CAT, GHOST])], DATA, polygons=False)
    write_evaluation(tmp_path / "evaluation", found, {})
    png = scenes_png({"an arm, cleaned": tmp_path / "evaluation"}, [0])
    shown = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = np.asarray(shown, dtype=int).reshape(-1, 3)
    for colour, meaning in MEANINGS.items():
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert abs(pixels - wanted).sum(axis=1).min() < 24, f"what is {meaning} is drawn"


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.key)
def test_every_arm_is_a_valid_run_that_changes_what_it_says(arm: Arm, tmp_path: Path) -> None:
    train, val, model, out = (tmp_path / name for name in ("train", "val", "model", "out"))
    place = Place(train, val, model, out, "http://a:1", 2)
    config = arm_config(arm, FULL, 3, place)
    rollout = config.rollout_matching
    names = [module.name for module in config.pipeline.objective]
    assert float(config.b_ratio) == arm.b_ratio
    assert (config.duplicate_iou is not None) == arm.clean
    assert ("duplicate_ul" in names) == arm.unlikelihood
    assert (rollout.decoding.temperature > 0) == arm.sampled
    assert rollout.repeat_terminate.enabled == arm.guard
    assert rollout.eval_detection.greedy
    assert config.training.seed == 3


@pytest.fixture(scope="module")
def toy(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    return load_model(small_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("out")))


def target_without_append(toy: LoadedModel, answer: str) -> Target:
    """For a scene of CAT and DOG."""
    prompt = PromptEncoder(toy.processor, "Detect every object in the image.", None)
    channel = WithoutAppend(
        Encoding(toy.inner, prompt, toy.tokenizer, "desc_first"), MatchingConfig(), allow_poly=False
    )
    parsed = parse_rollout(encode(toy.tokenizer, answer), toy.tokenizer, allow_poly=False)
    match = match_objects(parsed.objects, [CAT, DOG], MatchingConfig())
    sample = Sample("a.jsonl:1", (), 64, 64, (CAT, DOG))
    said = RolloutOutput([], encode(toy.tokenizer, answer), answer, "stop", False, (0, 0), None)
    corrected = channel.correct(AssessedRollout(sample, said, parsed, match))
    assert corrected.target is not None
    return corrected.target


@pytest.mark.parametrize(
    ("answer", "closed", "taught"),
    [
        (written(GHOST, DOG), written(GHOST, DOG), [DOG]),
        (written(DOG, CAT), written(DOG, CAT), [DOG, CAT]),
        (written(GHOST), written(GHOST), []),
        ("no answer", "{}", []),
        (written(CAT)[:-1] + ', "object_', written(CAT), [CAT]),
    ],
    ids=["one matched", "all matched", "none matched", "no answer", "truncated"],
)
def test_without_the_append_matches_are_corrected_and_what_was_missed_is_left_out(
    toy: LoadedModel, answer: str, closed: str, taught: list[GroundTruthObject]
) -> None:
    target = target_without_append(toy, answer)
    assert decode_exactly(toy.tokenizer, target.token_ids) == closed + "<|im_end|>"
    assert target.fn_keys == []
    assert [(g.bins, g.matched) for g in target.coord_groups] == [
        (item.shape.coords, True) for item in taught
    ]
    assert list(target.role[-2:]) == [Role.CLOSURE, Role.CLOSURE]


def ended(toy: LoadedModel, text: str) -> bool:
    guard = load_config(CONFIGS / "crowded_two_channel.yaml").rollout_matching.repeat_terminate
    running = RepeatGuard(guard, [])
    return any(running.push(token_id) for token_id in encode(toy.tokenizer, text))


def test_the_guard_of_the_experiment_ends_the_same_line_alone(toy: LoadedModel) -> None:
    cat, dog = (COMPACT.write([item], "desc_first").removesuffix(".") for item in (CAT, DOG))
    assert ended(toy, cat * 3)
    assert ended(toy, dog + cat * 3)
    assert not ended(toy, (cat + dog) * 5)
    assert not ended(toy, cat * 2 + dog)
