"""A run folder is read back as it was written, also while it is being written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from learner.runs.rollout_log import LoggedAnswer, RolloutLog
from learner.runs.run_folder import RunFolder
from shared_contracts.errors import ContractError
from tests.unit.test_rollout_log import assessed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"versions": {"torch": "2"}}')
    (tmp_path / "resolved_config.yaml").write_text("{}")
    return tmp_path


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"no run\.json and no resolved_config\.yaml"):
        RunFolder.open(tmp_path)


@pytest.mark.req("MET-03")
def test_answers_come_back_as_they_were_logged(
    folder: Path, toy_tokenizer: PreTrainedTokenizerFast
) -> None:
    for rank in (1, 0):
        RolloutLog(folder, rank).write(3, [assessed(toy_tokenizer, f"a.jsonl:{rank}")])
    (folder / "rollouts" / "step_000003.old.jsonl").write_text("somebody's copy\n")
    run = RunFolder.open(folder)
    assert run.answer_steps() == [3]
    answers = run.answers(3)
    assert [(answer.rank, answer.sample_id) for answer in answers] == [
        (0, "a.jsonl:0"),
        (1, "a.jsonl:1"),
    ]
    again = assessed(toy_tokenizer, "a.jsonl:0")
    assert LoggedAnswer(
        **answers[0].model_dump(exclude={"step", "rank", "chunk", "segment"})
    ) == LoggedAnswer.of(again)
    assert answers[0].sample == again.sample
    assert run.answers(4) == []


@pytest.mark.req("MET-03")
def test_a_step_is_not_taken_for_one_whose_number_begins_with_its(
    folder: Path, toy_tokenizer: PreTrainedTokenizerFast
) -> None:
    for step in (100_000, 1_000_000):
        RolloutLog(folder).write(step, [assessed(toy_tokenizer, f"a.jsonl:{step}")])
    (folder / "rollouts" / "step_000012.old.jsonl").write_text("somebody's copy\n")
    run = RunFolder.open(folder)
    assert run.answer_steps() == [100_000, 1_000_000]
    assert [answer.step for answer in run.answers(100_000)] == [100_000]


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert RunFolder.open(folder).metrics() == [{"step": 1}, {"step": 2}]


def test_a_broken_line_is_named(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ContractError) as caught:
        RunFolder.open(folder).metrics()
    assert caught.value.where == f"{folder / 'metrics.jsonl'}:2"


def test_an_answer_of_another_version_is_refused(
    folder: Path, toy_tokenizer: PreTrainedTokenizerFast
) -> None:
    RolloutLog(folder).write(0, [assessed(toy_tokenizer)])
    (file,) = (folder / "rollouts").iterdir()
    record = json.loads(file.read_text())
    del record["match"]
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(ContractError, match="Field required at match"):
        RunFolder.open(folder).answers(0)


def test_an_answer_may_hold_what_unicode_takes_for_the_end_of_a_line(
    folder: Path, toy_tokenizer: PreTrainedTokenizerFast
) -> None:
    item = assessed(toy_tokenizer)
    odd = replace(item.rollout, text="a\u2028b\u0085c")
    RolloutLog(folder).write(0, [item._replace(rollout=odd)])
    (answer,) = RunFolder.open(folder).answers(0)
    assert answer.text == odd.text
