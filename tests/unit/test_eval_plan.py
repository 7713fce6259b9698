"""What `learner eval` scores, and all that it refuses before anything is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.operate.eval_plan import plan_evaluation
from learner.runs.resume import BEGINNING, find_start
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.small_run import small_mapping

HF = {"rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 8}}
ADAPTERS = {"enable_lora": True, "sync": {"mode": "adapter"}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}}


@pytest.fixture
def mapping(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> dict[str, Any]:
    return merge(small_mapping(toy_checkpoint, toy_data, tmp_path / "run"), HF)


@pytest.fixture
def config(mapping: dict[str, Any]) -> Config:
    return parse_config(mapping)


def copied(checkpoint: Path, folder: Path, *, without: str = "") -> Path:
    shutil.copytree(checkpoint, folder, ignore=lambda *_: [without])
    return folder


def adapter(folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    made = {"r": 2, "lora_alpha": 4, "use_dora": False, **changed}
    (folder / "adapter_config.json").write_text(json.dumps(made))
    return folder


@pytest.mark.req("EVAL-01")
def test_model_and_data_are_those_of_the_config_or_of_the_options(
    config: Config, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    plan = plan_evaluation(config)
    assert (plan.checkpoint, plan.data) == (toy_checkpoint, toy_data.val_jsonl)
    assert len(plan.samples) == 4
    assert plan.out == tmp_path / "run" / "evaluations" / "model-val"
    other = copied(toy_checkpoint, tmp_path / "checkpoint-7")
    plan = plan_evaluation(config, other, toy_data.train_jsonl, tmp_path / "out")
    assert plan.config.model.model == plan.checkpoint == other
    assert (len(plan.samples), plan.out) == (24, tmp_path / "out")


@pytest.mark.req("EVAL-01")
def test_every_evaluation_has_a_folder_of_its_own_and_the_run_can_still_begin(
    config: Config, tmp_path: Path
) -> None:
    names = []
    for _ in range(3):
        plan = plan_evaluation(config)
        plan.out.mkdir(parents=True)
        (plan.out / "scores.json").touch()
        names.append(plan.out.name)
    assert names == ["model-val", "model-val-2", "model-val-3"]
    assert find_start(config, processes=1) == BEGINNING


@pytest.mark.req("EVAL-01", "SYNC-01")
def test_whole_weights_are_pushed_and_nothing_of_training_is_set_up(
    mapping: dict[str, Any],
) -> None:
    """Servers that only got an adapter would answer with whatever they had loaded."""
    served = {"rollout_matching": {"rollout_backend": "vllm", "vllm": ADAPTERS}}
    trained = {"training": {"data_parallel": "fsdp2"}}
    plan = plan_evaluation(parse_config(merge(merge(mapping, LORA), merge(served, trained))))
    assert plan.config.rollout_matching.vllm.sync.mode == "full"
    assert plan.config.tuner.train_type == "full"
    assert plan.config.training.data_parallel == "ddp"


@pytest.mark.req("EVAL-01")
def test_an_adapter_is_scored_on_the_model_of_the_config(
    mapping: dict[str, Any], toy_checkpoint: Path, tmp_path: Path
) -> None:
    plan = plan_evaluation(parse_config(merge(mapping, LORA)), adapter(tmp_path / "checkpoint-9"))
    assert plan.adapter
    assert plan.config.tuner.train_type == "lora"
    assert plan.config.model.model == toy_checkpoint
    assert plan.out.name == "checkpoint-9-val"


@pytest.mark.req("EVAL-01")
def test_an_adapter_of_another_kind_is_refused(mapping: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "checkpoint-9", r=8, use_dora=True)
    with pytest.raises(ContractErrors) as caught:
        plan_evaluation(parse_config(merge(mapping, LORA)), folder)
    assert [error.where for error in caught.value.errors] == ["tuner.lora_rank", "tuner.use_dora"]
    with pytest.raises(ContractError, match="is an adapter") as refused:
        plan_evaluation(parse_config(mapping), folder)
    assert "resolved_config.yaml" in refused.value.do
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ContractError, match="cannot be read"):
        plan_evaluation(parse_config(merge(mapping, LORA)), folder)


@pytest.mark.req("EVAL-01")
@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "holds no .*safetensors"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    config: Config, toy_checkpoint: Path, tmp_path: Path, missing: str, found: str
) -> None:
    folder = copied(toy_checkpoint, tmp_path / "checkpoint-3", without=missing)
    with pytest.raises(ContractError, match=found) as caught:
        plan_evaluation(config, folder)
    assert caught.value.where == "--checkpoint"


@pytest.mark.req("EVAL-01")
def test_a_run_folder_is_no_checkpoint_and_the_newest_in_it_is_named(
    config: Config, toy_checkpoint: Path, tmp_path: Path
) -> None:
    for step in (3, 12):
        copied(toy_checkpoint, tmp_path / f"checkpoint-{step}")
    with pytest.raises(ContractError, match="is the folder of a run") as caught:
        plan_evaluation(config, tmp_path)
    assert str(tmp_path / "checkpoint-12") in caught.value.do


@pytest.mark.req("EVAL-01", "RUN-01")
def test_a_checkpoint_that_has_lost_a_file_is_refused(
    config: Config, toy_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copied(toy_checkpoint, tmp_path / "checkpoint-3")
    (folder / "rollmatch_state.json").write_text("{}")
    with pytest.raises(ContractError, match="is not whole") as caught:
        plan_evaluation(config, folder)
    assert caught.value.where == "--checkpoint"


@pytest.mark.req("EVAL-01")
def test_data_and_folder_are_checked(
    mapping: dict[str, Any], config: Config, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="there is no such file"):
        plan_evaluation(config, data=tmp_path / "no.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"images": []}\n')
    with pytest.raises(ContractErrors) as caught:
        plan_evaluation(config, data=tmp_path / "bad.jsonl")
    assert all(e.where == f"{tmp_path / 'bad.jsonl'}:1" for e in caught.value.errors)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ContractError, match="not an empty directory"):
        plan_evaluation(config, out=tmp_path / "out")
    without = parse_config(merge(mapping, {"data": {"val_jsonl": None}}))
    with pytest.raises(ContractError, match="and so is --data"):
        plan_evaluation(without)


@pytest.mark.req("EVAL-01")
def test_one_process_evaluates(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ContractError, match="without torchrun"):
        plan_evaluation(config)


@pytest.mark.req("CFG-05", "EVAL-01")
def test_what_no_evaluation_would_do_is_refused(mapping: dict[str, Any]) -> None:
    def refused(**detection: bool) -> str:
        with pytest.raises(ContractErrors) as caught:
            parse_config(merge(mapping, {"rollout_matching": {"eval_detection": detection}}))
        (error,) = caught.value.errors
        return error.where.removeprefix("rollout_matching.eval_detection.")

    assert refused(save_answers=True) == "save_answers"
    assert refused(enabled=True) == "enabled"
    evaluates = merge(mapping, {"training": {"eval_strategy": "steps", "eval_steps": 1}})
    detection = {"enabled": True, "save_answers": True}
    parsed = parse_config(merge(evaluates, {"rollout_matching": {"eval_detection": detection}}))
    assert parsed.rollout_matching.eval_detection.save_answers
