"""What `swift sft` may be told beside the YAML (RUN-02); ms-swift itself is not needed for that."""

from pathlib import Path

import pytest

from learner.adapters.swift_command import check_command, config_path
from learner.config.schema import Config
from learner.data.toy import ToyData
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.small_run import small_config

pytestmark = pytest.mark.req("RUN-02")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("swift")
    return small_config(root / "model", ToyData.under(root / "data"), root / "run")


def command(config: Config, **options: str | None) -> list[str]:
    """The documented command, with `options` otherwise; None leaves one out."""
    said = {
        "external_plugins": "ms_swift.py",
        "model": str(config.model.model),
        "model_type": "rollmatch",
        "tuner_type": "rollmatch",
        "dataset": "rollmatch",
        **options,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def refused(config: Config, arguments: list[str], **environment: str) -> dict[str, ContractError]:
    with pytest.raises(ContractErrors) as raised:
        check_command(arguments, config, environment)
    return {error.where: error for error in raised.value.errors}


@pytest.mark.parametrize("options", [{}, {"output_dir": "elsewhere"}, {"add_version": "false"}])
def test_the_documented_command_and_where_ms_swift_keeps_its_records(
    config: Config, options: dict[str, str]
) -> None:
    check_command(command(config, **options), config, {})


def test_an_option_may_be_joined_to_its_value(config: Config) -> None:
    words = command(config)
    pairs = zip(words[::2], words[1::2], strict=True)
    check_command([f"{name}={value}" for name, value in pairs], config, {})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("learning_rate", "1e-4"),
        ("per_device_train_batch_size", "2"),
        ("val_dataset", "rollmatch"),
        ("resume_from_checkpoint", "checkpoint-3"),
        ("learning", "1e-4"),  # ms-swift's parser takes the beginning of a name for the name
    ],
)
def test_what_the_yaml_says_is_not_said_twice(config: Config, option: str, value: str) -> None:
    (error,) = refused(config, command(config, **{option: value})).values()
    assert error.where == f"--{option}"
    assert value in error.found
    assert "ROLLMATCH_CONFIG" in error.do


@pytest.mark.parametrize("option", ["model_type", "tuner_type", "dataset"])
@pytest.mark.parametrize("value", ["lora", "rollmatch#100", None])
def test_the_adapters_own_type_tuner_and_data_are_chosen(
    config: Config, option: str, value: str | None
) -> None:
    (error,) = refused(config, command(config, **{option: value})).values()
    assert error.where == f"--{option}"
    assert error.do == f"Give --{option} rollmatch"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-VL-4B-Instruct", None])
def test_another_model_than_that_of_the_yaml(config: Config, model: str | None) -> None:
    errors = refused(config, command(config, model=model))
    assert list(errors) == ["--model"]
    assert str(config.model.model) in errors["--model"].found


def test_ms_swift_keeps_its_records_out_of_the_run_folder(config: Config) -> None:
    inside = Path(config.training.output_dir) / "swift"
    assert list(refused(config, command(config, output_dir=str(inside)))) == ["--output_dir"]


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "NPROC_PER_NODE"])
def test_several_processes_are_for_torchrun(config: Config, variable: str) -> None:
    (error,) = refused(config, command(config), **{variable: "2"}).values()
    assert "torchrun" in error.do


def test_a_run_is_named_by_its_variable() -> None:
    assert config_path({"ROLLMATCH_CONFIG": "train.yaml"}) == Path("train.yaml")
    with pytest.raises(ContractError, match="ROLLMATCH_CONFIG: it is not set"):
        config_path({})


def test_a_colocated_server_is_for_learner_train(tmp_path: Path) -> None:
    sections = {
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {"vllm": {"mode": "colocate", "server": None}},
    }
    data = ToyData.under(tmp_path / "data")
    colocated = small_config(tmp_path / "model", data, tmp_path / "run", **sections)
    assert list(refused(colocated, command(colocated))) == ["rollout_matching.vllm.mode"]


@pytest.mark.req("HUB-01")
def test_a_run_that_is_to_be_pushed_is_refused(tmp_path: Path) -> None:
    training = {"push_to_hub": True, "hub_model_id": "ada/shapes"}
    data = ToyData.under(tmp_path / "data")
    config = small_config(tmp_path / "model", data, tmp_path / "run", training=training)
    assert refused(config, command(config)).keys() == {"training.push_to_hub"}
