"""The arithmetic of the benchmarks; what they measure is measured elsewhere."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from benchmarks import full_size
from benchmarks.__main__ import NAMES, PAGE, ROOT, with_table
from benchmarks.loss_parts.measuring import Bench
from benchmarks.method_parts.arms import ARMS, BASE, GUARD, TITLES, WithoutAppend
from benchmarks.method_parts.curves import LINES, curves_png
from benchmarks.method_parts.records import (
    Counts,
    Evaluation,
    Record,
    curves,
    read_records,
    spread,
    tables,
)
from benchmarks.results import Result, median_of, read_json, table, write_json
from benchmarks.throughput import REQUESTS, Side, UnequalWork, Work, compare
from benchmarks.workload import ANSWER_TOKENS, Scene, infer_call, make_scenes, openai_messages
from learner.config.rollout_matching import MatchingConfig
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models import head
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import PromptEncoder
from learner.stages.formats.coord_json import parse_rollout, serialize_objects
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
    RepeatTerminateConfig,
    object_key_token_ids,
)
from tests.unit.answers import coords, encode, entry
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


def evaluation(step: int, f1: float) -> Evaluation:
    counts = Counts(answers=10, tokens=400, truncated=2, ended=1, dropped=3)
    return Evaluation(step, f1 - 0.1, f1 + 0.1, f1, 0.9, counts)


def record(arm: str, seed: int, *f1: float, training: Counts | None = None) -> Record:
    found = tuple(evaluation(20 * i, score) for i, score in enumerate(f1))
    return Record(arm, seed, "0123456789abcdef", 60.0, found, training or Counts())


def rows(table: str, title: str) -> list[list[str]]:
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return [cells for cells in found if cells[:1] == [title]]


def test_records_read_back_as_they_were_written_and_unended_runs_are_none(tmp_path: Path) -> None:
    mixed = record("mixed", 1, 0.5, 0.7, training=Counts(32, 1000, 3, 2, 4))
    for name in ("mixed_1", "mixed_2.part"):
        (tmp_path / name).mkdir()
    mixed.write(tmp_path / "mixed_1")
    assert read_records(tmp_path) == [mixed]


def test_counts_add_up_name_by_name() -> None:
    assert Counts(1, 2, 3, 4, 5) + Counts(10, 20, 30, 40, 50) == Counts(11, 22, 33, 44, 55)


def test_a_figure_is_the_mean_of_the_seeds_with_the_least_and_the_most() -> None:
    assert spread([0.1, 0.2, 0.6], "{:.2f}".format) == "0.30 (0.10 .. 0.60)"
    assert spread([2.0, 2.0], "{:.0f}".format) == "2"


def test_the_scores_are_those_at_the_end_and_differences_are_taken_seed_by_seed() -> None:
    records = [
        record("mixed", 0, 0.4, 0.5),
        record("mixed", 1, 0.5, 0.7),
        record("a_alone", 1, 0.5, 0.6),
        record("a_alone", 0, 0.4, 0.8),
    ]
    table = tables(records, TITLES, BASE)
    alone, _ = rows(table, TITLES["a_alone"])
    before, *_ = rows(table, "before, after the warm-up")
    assert alone[3] == "0.700 (0.600 .. 0.800)"
    assert alone[5] == "+0.100 (-0.100 .. +0.300)"
    assert before[3] == "0.450 (0.400 .. 0.500)"


def test_an_arm_that_has_not_ended_has_no_row_and_a_seed_without_its_base_no_difference() -> None:
    table = tables([record("mixed", 0, 0.4, 0.5), record("a_alone", 1, 0.4, 0.8)], TITLES, BASE)
    assert rows(table, TITLES["no_guard"]) == []
    alone, _ = rows(table, TITLES["a_alone"])
    assert alone[5:] == [""]


def test_what_was_generated_is_summed_and_an_arm_that_trains_on_no_answer_says_so() -> None:
    trained = [
        record("mixed", seed, 0.4, 0.5, training=Counts(100, tokens, 5, 0, 7))
        for seed, tokens in enumerate((4000, 6000))
    ]
    table = tables([*trained, record("a_alone", 0, 0.4, 0.5)], TITLES, BASE)
    _, mixed = rows(table, TITLES["mixed"])
    _, alone = rows(table, TITLES["a_alone"])
    evaluated = rows(table, "")
    assert mixed[1:] == [
        "training",
        "100",
        "5,000 (4,000 .. 6,000)",
        "50.0 (40.0 .. 60.0)",
        "5",
        "0",
        "7",
    ]
    assert alone[1:3] == ["training", "0"]
    assert [cells[1:] for cells in evaluated] == 2 * [
        ["evaluations", "20", "800", "40.0", "4", "2", "6"]
    ]


def test_curves_hold_one_line_of_scores_for_each_seed() -> None:
    records = [record("mixed", 0, 0.4, 0.5, 0.6), record("mixed", 1, 0.3, 0.2, 0.1)]
    steps, scores = curves(records, "mixed", "f1")
    assert (steps, scores) == ([0, 20, 40], [[0.4, 0.5, 0.6], [0.3, 0.2, 0.1]])
    assert curves(records, "no_guard", "f1") == ([], [])


def test_the_picture_is_a_small_png_in_which_dashes_alone_tell_the_arms_apart() -> None:
    rng = random.Random(0)
    records = [
        record(arm.key, seed, *(rng.random() for _ in range(7)))
        for arm in ARMS
        for seed in range(3)
    ]
    png = curves_png(records, TITLES)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 150_000
    assert len({dashes for _, dashes in LINES}) == len(ARMS)


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
    keys = object_key_token_ids(lambda text: encode(toy.tokenizer, text))
    guard = RepeatGuard(RepeatTerminateConfig.model_validate(GUARD), keys)
    return any(guard.push(token_id) for token_id in encode(toy.tokenizer, text))


def test_the_guard_of_the_ablation_leaves_every_right_answer_alone(
    toy: LoadedModel, toy_data: ToyData
) -> None:
    flat = GroundTruthObject("red triangle", Shape("bbox_2d", (7, 7, 7, 7)))
    answers = [
        serialize_objects(sample.objects, "desc_first")
        for path in (toy_data.train_jsonl, toy_data.val_jsonl)
        for sample in read_samples(path, allow_poly=False)
    ]
    assert not any(ended(toy, answer) for answer in [*answers, written(flat, flat)])


@pytest.mark.parametrize(
    "answer",
    [
        written(CAT, DOG, GHOST),
        "{" + ", ".join(entry(1) for _ in range(3)),
        '{"object_1": {"desc": "red triangle", "bbox_2d": ' + coords(*[7] * 6),
        '{"object_1": {"desc": "red red red red red red',
    ],
    ids=["three objects", "an object again", "one coordinate", "one word"],
)
def test_the_guard_of_the_ablation_ends_answers_that_run_on(toy: LoadedModel, answer: str) -> None:
    assert ended(toy, answer)
