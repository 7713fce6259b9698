"""The log of rollouts: one line per answer. A run folder reads it back. The record of calls."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Policy, RequestSettings
from learner.rollout.server_pool import ServerPool
from learner.runs.rollout_log import LoggedAnswer, LoggedTarget, RolloutLog, folded, unfolded
from learner.runs.run_folder import RunFolder
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.targets import build_target
from learner.types import AssessedRollout, GroundTruthObject, Place, RolloutOutput, Sample, Shape
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.fleets import fleet
from tests.unit.refusals import refused
from tests.unit.scripted_server import ScriptedPusher

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
    logprobs = [-0.1 * place for place in range(len(ids))]
    sample = Sample(name, (Path("a.png"),), 64, 64, (CAT, DOG))
    prompt = [1, 2, *[9] * 256, 3, 3]
    rollout = RolloutOutput(prompt, ids, ANSWER, "length", False, (4, 4), 77, logprobs)
    parsed = parse_rollout(ids, tokenizer)
    match = match_objects(parsed.objects, sample.objects, MatchingConfig())
    target = build_target(parsed, sample.objects, match, tokenizer, "desc_first")
    return AssessedRollout(sample, rollout, parsed, match, target, chunk=2)


@pytest.mark.req("MET-03", "LOGP-01")
def test_a_line_has_the_answer_its_parse_match_target_and_place(
    toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    item = assessed(toy_tokenizer)
    plain = replace(item.rollout, logprobs=None)
    unreadable = item._replace(rollout=plain, target=None, left_out="no brace")
    second = assessed(toy_tokenizer, "a.jsonl:2")
    places = [Place(400, 1, 0, 4), Place(410, 0, 2, 3)]
    RolloutLog(tmp_path).write(12, [item, unreadable, second], places)
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "step_000012.jsonl"
    first, left, last = (json.loads(line) for line in path.read_text().splitlines())
    assert (left["supervised"], left["target"], left["segment"]) == (False, None, None)
    assert left["left_out"] == "no brace"
    assert "logprobs" not in left
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
        "logprobs": item.rollout.logprobs,
    }


def check_target(logged: dict[str, Any], item: AssessedRollout) -> None:
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


@given(st.lists(st.integers(0, 2)))
def test_folded_ids_unfold_to_the_same_ids(ids: list[int]) -> None:
    assert unfolded(json.loads(json.dumps(folded(ids)))) == ids
    assert folded([7, *[5] * 1024, 7, 7, 7]) == [7, [5, 1024], 7, 7, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"versions": {"torch": "2"}}')
    (tmp_path / "resolved_config.yaml").write_text("{}")
    return tmp_path


@pytest.mark.req("MET-03")
def test_answers_are_read_as_logged(folder: Path, toy_tokenizer: PreTrainedTokenizerFast) -> None:
    """Step 100,000 has the files of both ranks. The file of step 1,000,000 is not read."""
    for rank in (1, 0):
        RolloutLog(folder, rank).write(100_000, [assessed(toy_tokenizer, f"a.jsonl:{rank}")])
    RolloutLog(folder).write(1_000_000, [assessed(toy_tokenizer)])
    names = {path.name for path in (folder / "rollouts").iterdir()}
    assert names == {"step_100000.jsonl", "step_100000.rank1.jsonl", "step_1000000.jsonl"}
    (folder / "rollouts" / "step_100000.old.jsonl").write_text("a copy\n")
    run = RunFolder.open(folder)
    assert run.answer_steps() == [100_000, 1_000_000]
    answers = run.answers(100_000)
    assert [(answer.step, answer.rank, answer.sample_id) for answer in answers] == [
        (100_000, 0, "a.jsonl:0"),
        (100_000, 1, "a.jsonl:1"),
    ]
    again = assessed(toy_tokenizer, "a.jsonl:0")
    assert (answers[0].sample, answers[0].rollout) == (again.sample, again.rollout)
    assert answers[0].match == LoggedAnswer.of(again).match
    assert run.answers(4) == []


def test_an_unfinished_last_line_is_ignored_and_a_broken_line_is_named(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert RunFolder.open(folder).metrics() == [{"step": 1}, {"step": 2}]
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with refused(f"{folder / 'metrics.jsonl'}:2"):
        RunFolder.open(folder).metrics()


def test_incomplete_answer_is_refused(folder: Path, toy_tokenizer: PreTrainedTokenizerFast) -> None:
    RolloutLog(folder).write(0, [assessed(toy_tokenizer)])
    (file,) = (folder / "rollouts").iterdir()
    record = json.loads(file.read_text())
    del record["match"]
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(ContractError, match="StepAnswer match Field required"):
        RunFolder.open(folder).answers(0)


@pytest.mark.req("SEED-02")
def test_server_mode_logs_reproducibility_metadata() -> None:
    with fleet(2) as run:
        urls = [one.server.base_url for one in run.rollouts]
        servers = [ServerAddress(base_url=url, group_port=51216 + i) for i, url in enumerate(urls)]
        journal = Journal(servers, lambda: ("full", None))
        clients = [RolloutClient(url, timeout_s=60.0) for url in urls]
        pushers = [ScriptedPusher(one) for one in run.rollouts]
        backend = ServerPool(clients, pushers, 8, journal)
        asking = RequestSettings("Detect.", None, RequestConfig(max_tokens=9))
        backend.connect()
        policy = Policy(backend, asking)
        policy.push()
        policy.answer([Sample(str(i), (), 64, 64, ()) for i in range(4)], seed=1000)
        record, _ = policy.take_notes()
        policy.close()
    assert record["servers"] == [server.model_dump(mode="json") for server in servers]
    assert (record["sync_mode"], record["sync_fallback"]) == ("full", None)
    assert record["weights_version"] == 2
    assert [push["version"] for push in record["pushes"]] == [2, 2]
    assert {(call["attempt"], call["outcome"]) for call in record["calls"]} == {(1, "answered")}
    assert json.loads(json.dumps(record)) is not None
    calls = sorted(record["calls"], key=lambda call: int(call["first"]))
    assert [(c["server"], c["first"], c["count"], c["seed"]) for c in calls] == [
        (servers[0].base_url, 0, 2, 1000),
        (servers[1].base_url, 2, 2, 1002),
    ]
    assert record["decoding"] == {"max_tokens": 9}
