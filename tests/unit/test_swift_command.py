"""Options of `swift sft` beside the YAML (RUN-02). ms-swift itself is not loaded."""

from pathlib import Path
from typing import Any

import pytest

from learner.adapters.swift_command import check_command, config_path
from learner.config.schema import Config
from learner.data.toy import ToyData
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.small_run import small_config

pytestmark = pytest.mark.req("RUN-02")


def config_in(folder: Path, **sections: Any) -> Config:
    data = ToyData.under(folder / "data")
    return small_config(folder / "model", data, folder / "run", **sections)


def command(config: Config, **options: str | None) -> list[str]:
    """The documented command with other `options`; None leaves one out."""
    documented = {
        "external_plugins": "ms_swift.py",
        "model": str(config.model.model),
        "model_type": "rollmatch",
        "tuner_type": "rollmatch",
        "dataset": "rollmatch",
    }
    given = {name: value for name, value in (documented | options).items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def refused(config: Config, arguments: list[str], **environment: str) -> ContractError:
    with pytest.raises(ContractErrors) as raised:
        check_command(arguments, config, environment)
    (error,) = raised.value.errors
    return error


def test_the_documented_command_is_accepted_with_other_paths_for_records(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    check_command(command(config), config, {})
    check_command(command(config, output_dir="elsewhere", add_version="false"), config, {})
    words = command(config)
    joined = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    check_command(joined, config, {})


@pytest.mark.parametrize(
    ("option", "value", "do"),
    [
        ("learning_rate", "1e-4", "ROLLMATCH_CONFIG"),
        ("learning", "1e-4", "ROLLMATCH_CONFIG"),  # ms-swift accepts unique prefixes of a name
        ("tuner_type", None, "Give --tuner_type rollmatch"),
        ("dataset", "rollmatch#100", "Give --dataset rollmatch"),
        ("model", "Qwen/Qwen3-VL-4B-Instruct", "model"),
    ],
)
def test_an_option_that_contradicts_the_yaml_is_refused(
    tmp_path: Path, option: str, value: str | None, do: str
) -> None:
    config = config_in(tmp_path)
    error = refused(config, command(config, **{option: value}))
    assert error.where == f"--{option}"
    assert do in error.do


def test_the_yaml_and_the_number_of_processes_come_from_variables(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert "torchrun" in refused(config, command(config), NPROC_PER_NODE="2").do
    assert config_path({"ROLLMATCH_CONFIG": "train.yaml"}) == Path("train.yaml")
    with pytest.raises(ContractError, match="ROLLMATCH_CONFIG: it is not set"):
        config_path({})


@pytest.mark.req("HUB-01")
@pytest.mark.parametrize(
    ("where", "sections"),
    [
        (
            "rollout_matching.vllm.mode",
            {
                "stage2_ab": {"schedule": {"b_ratio": 0.5}},
                "rollout_matching": {"vllm": {"mode": "colocate", "server": None}},
            },
        ),
        ("training.push_to_hub", {"training": {"push_to_hub": True, "hub_model_id": "a/b"}}),
    ],
    ids=["colocate", "hub"],
)
def test_a_feature_of_learner_train_alone_is_refused(
    tmp_path: Path, where: str, sections: dict[str, Any]
) -> None:
    config = config_in(tmp_path, **sections)
    assert refused(config, command(config)).where == where
