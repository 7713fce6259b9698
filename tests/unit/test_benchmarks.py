"""The arithmetic of the benchmarks; what they measure is measured elsewhere."""

import json
from pathlib import Path

import pytest

from benchmarks.results import Result, median_of, table, write_json
from benchmarks.throughput import REQUESTS, Side, UnequalWork, Work, compare
from benchmarks.workload import ANSWER_TOKENS, Scene, infer_call, make_scenes, openai_messages
from shared_contracts.infer import InferCall

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


@pytest.mark.parametrize("with_image", [False, True])
def test_the_bodies_of_both_kinds_of_server_say_the_same(with_image: bool) -> None:
    (scene,) = make_scenes(7, 1, with_image)
    (request,) = InferCall.model_validate(infer_call([scene])).infer_requests
    (message,) = request.messages
    *urls, text = openai_messages(scene)[0]["content"]
    assert message.content == "<image>" * with_image + text["text"]
    assert request.images == [url["image_url"]["url"] for url in urls]
