"""The log of rollouts: one line per answer, whole files, and short rows of ids."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.models.packed_forward import PromptEncoder
from learner.runs.rollout_log import LoggedAnswer, LoggedTarget, RolloutLog, folded, unfolded
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.targets import build_target
from learner.training.channels import ChannelB, Encoding
from learner.types import AssessedRollout, GroundTruthObject, Place, RolloutOutput, Sample, Shape
from shared_contracts.errors import RunError
from tests.unit.small_run import small_config

CAT = GroundTruthObject("cat", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("dög", Shape("bbox_2d", (500, 500, 900, 900)))
ANSWER = (
    '{"object_1": {"desc": "cat", "bbox_2d": [<|coord_10|>, <|coord_20|>, <|coord_300|>, '
    '<|coord_400|>]}, "object_2": {"desc": "ghost", "bbox_2d": [<|coord_5|>]}, '
    '"object_3": {"desc": "owl", "bbox_2d": [<|coord_900|>, <|coord_1|>, <|coord_950|>, '
    "<|coord_9|>]}"
)


def assessed(tokenizer: PreTrainedTokenizerFast, name: str = "a.jsonl:1") -> AssessedRollout:
    """A hit, a dropped entry, a false positive, a missed object; the answer is cut off."""
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    sample = Sample(name, (Path("a.png"),), 64, 64, (CAT, DOG))
    prompt = [1, 2, *[9] * 256, 3, 3]
    rollout = RolloutOutput(prompt, ids, ANSWER, "length", False, (4, 4), 77)
    parsed = parse_rollout(ids, tokenizer)
    match = match_objects(parsed.objects, sample.objects, MatchingConfig())
    target = build_target(parsed, sample.objects, match, tokenizer, "desc_first")
    return AssessedRollout(sample, rollout, parsed, match, target, chunk=2)


@pytest.mark.req("MET-03", "LOGP-01")
def test_the_log_keeps_log_probabilities_where_there_are_some(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    item = assessed(toy_tokenizer)
    assert "logprobs" not in LoggedAnswer.of(item).model_dump_json()
    values = [-0.1 * place for place in range(len(item.rollout.response_token_ids))]
    rollout = replace(item.rollout, logprobs=values)
    line = LoggedAnswer.of(item._replace(rollout=rollout)).model_dump_json()
    assert LoggedAnswer.model_validate_json(line).rollout == rollout


@pytest.mark.req("MET-03")
def test_an_answer_is_logged_with_all_that_became_of_it(
    toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    item = assessed(toy_tokenizer)
    unreadable = assessed(toy_tokenizer)._replace(target=None, left_out="no brace")
    second = assessed(toy_tokenizer, "a.jsonl:2")
    places = [Place(400, 1, 0, 4), Place(410, 0, 2, 3)]
    RolloutLog(tmp_path).write(12, [item, unreadable, second], places)
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "step_000012.jsonl"
    first, left, last = (json.loads(line) for line in path.read_text().splitlines())
    assert (left["supervised"], left["target"], left["segment"]) == (False, None, None)
    assert left["left_out"] == "no brace"
    assert last["sample_id"] == "a.jsonl:2"
    assert last["segment"] == {"length": 410, "pack": 0, "position": 2, "come": 3}
    target = first.pop("target")
    check_target(target, item)
    assert unfolded(first.pop("prompt_token_ids")) == item.rollout.prompt_token_ids
    assert first == {
        "step": 12,
        "rank": 0,
        "sample_id": "a.jsonl:1",
        "images": ["a.png"],
        "width": 64,
        "height": 64,
        "ground_truth": [
            {"desc": "cat", "kind": "bbox_2d", "coords": [10, 20, 300, 400]},
            {"desc": "dög", "kind": "bbox_2d", "coords": [500, 500, 900, 900]},
        ],
        "seed": 77,
        "weights_version": [4, 4],
        "finish_reason": "length",
        "repeat_terminated": False,
        "supervised": True,
        "left_out": None,
        "chunk": 2,
        "segment": {"length": 400, "pack": 1, "position": 0, "come": 4},
        "parse": {
            "truncated": True,
            "invalid": False,
            "objects": [
                {"key": "object_1", "kind": "bbox_2d", "coords": [10, 20, 300, 400], "desc": "cat"},
                {"key": "object_3", "kind": "bbox_2d", "coords": [900, 1, 950, 9], "desc": "owl"},
            ],
            "dropped": [["object_2", "wrong_arity"]],
        },
        "match": {
            "pairs": [[0, 0]],
            "false_positives": [1],
            "false_negatives": [1],
            "gated": item.match.gated,
        },
        "text": ANSWER,
        "response_token_ids": item.rollout.response_token_ids,
    }


def check_target(logged: dict[str, Any], item: AssessedRollout) -> None:
    """Nothing of the target is lost, and of its ids only what the answer does not have is kept."""
    target, response = item.target, item.rollout.response_token_ids
    assert target is not None
    read = LoggedTarget(**logged)
    assert read.token_ids(response) == target.token_ids
    assert read.prefix_len == target.prefix_len == read.kept == len(response)
    assert logged["ids"] == target.token_ids[read.kept :]
    assert logged["keys"] == ["object_4"]
    assert [int(digit) for digit in logged["roles"]] == target.role.tolist()
    assert [tuple(map(tuple, group[:2])) for group in logged["groups"]] == [
        (group.positions, group.bins) for group in target.coord_groups
    ]
    assert [group[2:] for group in logged["groups"]] == [[True, True], [False, True]]


@pytest.mark.req("MET-03")
def test_every_rank_has_a_file_of_its_own(
    toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for rank in (0, 1):
        RolloutLog(tmp_path, rank).write(3, [assessed(toy_tokenizer)])
    folder = tmp_path / "rollouts"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000003.jsonl",
        "step_000003.rank1.jsonl",
    ]
    record = json.loads((folder / "step_000003.rank1.jsonl").read_text())
    assert (record["step"], record["rank"]) == (3, 1)


@pytest.mark.req("MET-03")
def test_a_full_disk_is_told_and_leaves_no_half_of_a_file(
    toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "step_000000.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"step_000000\.jsonl: No space left"):
        RolloutLog(tmp_path).write(0, [assessed(toy_tokenizer)])
    assert list(folder.iterdir()) == []


@given(st.lists(st.integers(0, 2)))
def test_ids_are_folded_without_loss(ids: list[int]) -> None:
    assert unfolded(json.loads(json.dumps(folded(ids)))) == ids


def test_the_placeholders_of_an_image_take_one_place() -> None:
    assert folded([7, *[5] * 1024, 7, 7, 7]) == [7, [5, 1024], 7, 7, 7]


@pytest.mark.req("MET-03", "LOSS-02", "MET-02")
@pytest.mark.scenario("Closure marker resolution failure is dropped and counted")
def test_what_cannot_be_supervised_is_noted_as_left_out(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    config = small_config(toy_checkpoint, toy_data, tmp_path)
    loaded = load_model(config)
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
    channel = ChannelB(encoding, MatchingConfig(), allow_poly=False)
    good, bad = read_samples(toy_data.train_jsonl, allow_poly=False)[:2]
    unreadable = GroundTruthObject("<|im_end|>", CAT.shape)
    bad = Sample(bad.sample_id, bad.images, bad.width, bad.height, (unreadable,))
    ids = [prompt(sample).ids.tolist() for sample in (good, bad)]
    rollouts = [RolloutOutput(own, [], "", "stop", False, (1, 1), None) for own in ids]
    segments, noted = channel.segments([good, bad], rollouts)
    assert len(segments) == 1
    assert [each.sample for each in noted] == [good, bad]
    assert noted[0].target is not None
    assert noted[0].left_out is None
    assert noted[1].target is None
    assert "no closing brace" in str(noted[1].left_out) or "drops" in str(noted[1].left_out)
    assert [each.parsed.invalid_rollout for each in noted] == [True, True]
