"""`--run-config`: learner and servers read the same values from one training YAML."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_config, load_mapping, merge
from rollout_server.settings.options import ServerSettings, load_settings, read_rollout_config
from rollout_server.settings.repeat_config import CONFIG_JSON, INJECTION
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.refusals import refused

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = {"model": Path("/m"), "device": "cpu"}
GUARD: dict[str, Any] = {"enabled": True, "min_new_tokens": 8, "max_object_keys": 40}
GUARDED = "rollout_matching: {repeat_terminate: {enabled: true, max_object_keys: 9}}\n"


def training_yaml(folder: Path, name: str = "run.yaml", **rollout_matching: Any) -> Path:
    """A file that extends the demo's warm-up, with these keys of `rollout_matching`."""
    warmup = folder / "base" / "warmup.yaml"
    warmup.parent.mkdir(exist_ok=True)
    warmup.write_bytes((CONFIGS / "demo" / "warmup.yaml").read_bytes())
    file = folder / name
    keys = {"extends": "base/warmup.yaml", "rollout_matching": rollout_matching}
    file.write_text(dump_mapping(keys))
    return file


def settings_of(
    run: Path | None,
    config: Path | None = None,
    environ: dict[str, str] | None = None,
    **given: Any,
) -> ServerSettings:
    return load_settings(config, CPU | given, run, environ or {})


def errors_of(run: Path, **given: Any) -> list[ContractError]:
    with pytest.raises(ContractErrors) as caught:
        settings_of(run, **given)
    return caught.value.errors


@pytest.mark.req("REP-04", "CFG-04", "CFG-09")
@pytest.mark.scenario("Preflight/runtime consume a shared validated rollout contract")
def test_server_and_learner_read_the_same_of_every_shipped_config() -> None:
    for path in sorted(CONFIGS.rglob("*.yaml")):
        learner = load_config(path).rollout_matching
        server = read_rollout_config(path, load_mapping(path))
        for name in type(server).model_fields:
            assert getattr(server, name) == getattr(learner, name), path


@pytest.mark.req("REP-01", "REP-04", "CFG-04", "CFG-09", "SRV-03")
@pytest.mark.scenario("Existing YAML enables repeat-aware behavior in vLLM mode")
def test_guard_and_batch_come_from_a_file_and_its_base(tmp_path: Path) -> None:
    parent = training_yaml(tmp_path, "parent.yaml", repeat_terminate=GUARD, decode_batch_size=12)
    assert settings_of(parent).repeat_terminate == RepeatTerminateConfig(**GUARD)
    file = tmp_path / "leaf.yaml"
    file.write_text("extends: parent.yaml\n" + GUARDED)
    expected = RepeatTerminateConfig(**GUARD | {"max_object_keys": 9})
    assert settings_of(file).repeat_terminate == expected
    assert settings_of(file).max_num_seqs == 12
    given = {"model": Path("/m"), "gpus": [0, 1, 2, 3], "tensor_parallel_size": 2}
    assert load_settings(None, given, file, {}).max_num_seqs == 2 * 12
    assert load_config(file).rollout_matching.repeat_terminate == expected


@pytest.mark.req("FMT-01", "REP-06")
def test_the_guard_counts_the_entries_of_the_run_s_format(tmp_path: Path) -> None:
    """It is in `custom`, where the guard does not name it again."""
    file = training_yaml(tmp_path, repeat_terminate=GUARD)
    with file.open("a") as more:
        more.write("custom: {answer_format: compact}\n")
    guard = settings_of(file).repeat_terminate
    assert guard == RepeatTerminateConfig(**GUARD, answer_format="compact")
    assert load_config(file).rollout_matching.repeat_terminate == guard


@pytest.mark.req("FULL-06")
def test_a_context_holds_a_pack_and_an_answer_unless_it_is_stated(tmp_path: Path) -> None:
    """The server cannot read the data, but no prompt is longer than the pack that it is in."""
    run = training_yaml(tmp_path, max_new_tokens=100)
    packs = load_mapping(CONFIGS / "demo" / "warmup.yaml")["global_max_length"]
    assert settings_of(run).max_model_len == -(-(packs + 100) // 256) * 256
    assert settings_of(run, max_model_len=77).max_model_len == 77
    stated = training_yaml(tmp_path, "stated.yaml", vllm={"max_model_len": 640})
    assert settings_of(stated).max_model_len == 640
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 300}}')
    assert settings_of(run, model=tmp_path).max_model_len == 300
    unpacked = tmp_path / "unpacked.yaml"
    unpacked.write_text(dump_mapping(merge(load_mapping(run), {"training": {"packing": False}})))
    assert settings_of(unpacked).max_model_len is None


@pytest.mark.req("CFG-02", "CFG-09")
def test_every_fault_of_the_shared_part_is_reported_with_its_path(tmp_path: Path) -> None:
    run = training_yaml(
        tmp_path,
        decode_batch_size=0,
        repeat_terminate={"enabled": True, "ngram_sise": 3},
        vllm={"server": {"servers": [{"base_url": "http://a", "group_port": 1, "flag": 1}]}},
    )
    errors = {error.where: error for error in errors_of(run)}
    assert set(errors) == {
        "rollout_matching.decode_batch_size",
        "rollout_matching.repeat_terminate.ngram_sise",
        "rollout_matching.vllm.server.servers[0].flag",
    }
    assert "'ngram_size'" in errors["rollout_matching.repeat_terminate.ngram_sise"].do


@pytest.mark.req("CFG-09")
def test_keys_that_only_the_learner_reads_may_be_wrong(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, unknown=1, decode_mode="guess", decode_batch_size=3)
    broken = merge(load_mapping(run), {"training": {"learning_rate": "fast"}, "modle": 1})
    run.write_text(dump_mapping(broken))
    assert settings_of(run).max_num_seqs == 3


@pytest.mark.req("SRV-04", "CFG-04", "FMT-01", "CFG-03")
@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("model: {}\n", "rollout_matching", "RUN"),
        (GUARDED + "custom: {answer_format: xml}\n", "custom.answer_format", "xml"),
        ("a: 1\na: 2\n", "--run-config", 'RUN:2:1: found duplicate key "a"'),
        ("extends: gone.yaml\n", "RUN: extends", "gone.yaml"),
    ],
)
def test_a_file_that_is_no_training_yaml_is_refused(
    tmp_path: Path, text: str, where: str, found: str
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(text)
    with refused(where.replace("RUN", str(run)), found.replace("RUN", str(run))):
        settings_of(run)


def environment(**guard: Any) -> dict[str, str]:
    return {CONFIG_JSON: json.dumps(guard)}


@pytest.mark.req("REP-04")
def test_an_environment_that_contradicts_a_file_is_refused_with_both(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("repeat_terminate: {enabled: true, max_object_keys: 7}\n")
    same = training_yaml(tmp_path, "same.yaml", repeat_terminate=GUARD)
    assert settings_of(same, environ=environment(**GUARD)).repeat_terminate.max_object_keys == 40
    for run, file, source, there in (
        (None, config, "--config", '"max_object_keys":7'),
        (training_yaml(tmp_path), None, "--run-config", '"enabled":false'),
    ):
        with pytest.raises(ContractError) as caught:
            settings_of(run, file, environment(**GUARD))
        assert caught.value.where == CONFIG_JSON
        for found in ('"max_object_keys":40', source, there):
            assert found in caught.value.found
    for run, file, source in ((None, config, "--config"), (same, None, "--run-config")):
        with refused(INJECTION, f"it is 0 and {source} has enabled: true"):
            settings_of(run, file, {INJECTION: "0"})
    off = settings_of(training_yaml(tmp_path), environ={INJECTION: "0"})
    assert not off.repeat_terminate.enabled


@pytest.mark.req("CFG-05", "CFG-09", "SRV-01")
def test_engine_settings_of_the_training_yaml_hold_for_its_servers(tmp_path: Path) -> None:
    vllm = {"max_model_len": 777, "enable_prefix_caching": False, "sync": {"transport": "gloo"}}
    run = training_yaml(tmp_path, vllm=vllm, decode_batch_size=12)
    settings = settings_of(run)
    assert (settings.max_model_len, settings.enable_prefix_caching) == (777, False)
    assert (settings.enable_lora, settings.weight_transport) == (False, "gloo")
    auto = training_yaml(tmp_path, "auto.yaml", vllm={"sync": {"transport": "auto"}})
    assert settings_of(auto).weight_transport is None
    config = tmp_path / "server.yaml"  # which wins over the run, and options over both
    config.write_text("max_num_seqs: 6\nmax_model_len: 98\n")
    given = settings_of(run, config, max_model_len=99, enable_prefix_caching=True)
    assert (given.max_model_len, given.enable_prefix_caching) == (99, True)
    assert given.max_num_seqs == 6


def adapter_yaml(folder: Path, lora_rank: int, enable_lora: bool = True) -> Path:
    run = training_yaml(folder, vllm={"enable_lora": enable_lora})
    tuner = {"train_type": "lora", "lora_rank": lora_rank, "lora_alpha": 8}
    run.write_text(dump_mapping(merge(load_mapping(run), {"tuner": tuner})))
    return run


@pytest.mark.req("SYNC-01", "CFG-09")
@pytest.mark.parametrize(
    ("lora_rank", "enable_lora", "room"), [(65, True, 128), (128, False, None), (-1, True, None)]
)
def test_the_trained_rank_is_rounded_up_to_one_of_vllm(
    tmp_path: Path, lora_rank: int, enable_lora: bool, room: int | None
) -> None:
    run = adapter_yaml(tmp_path, lora_rank, enable_lora)
    settings = settings_of(run)
    default = ServerSettings.model_fields["max_lora_rank"].default
    assert (settings.enable_lora, settings.max_lora_rank) == (enable_lora, room or default)
    assert settings_of(run, max_lora_rank=320).max_lora_rank == 320
    assert settings_of(run, enable_lora=False).enable_lora is False


@pytest.mark.req("SYNC-01")
def test_a_rank_beyond_all_of_vllm_is_refused(tmp_path: Path) -> None:
    assert settings_of(adapter_yaml(tmp_path, 512)).max_lora_rank == 512
    with refused("tuner.lora_rank", "up to rank 512"):
        settings_of(adapter_yaml(tmp_path, 513))
