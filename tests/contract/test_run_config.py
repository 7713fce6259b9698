"""`--run-config`: one training YAML says the same to the learner and to its servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_config, load_mapping, merge
from rollout_server.settings.options import ServerSettings, load_settings, read_run_config
from rollout_server.settings.repeat_config import CONFIG_JSON, CONFIG_JSON_PATH, INJECTION
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.repeat_guard import RepeatTerminateConfig

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
CPU = {"model": Path("/m"), "device": "cpu"}
GUARD: dict[str, Any] = {"enabled": True, "min_new_tokens": 8, "max_object_keys": 40}


def training_yaml(folder: Path, name: str = "run.yaml", **rollout_matching: Any) -> Path:
    """A file that extends the demo's warm-up and says this in `rollout_matching`."""
    warmup = folder / "base" / "warmup.yaml"
    warmup.parent.mkdir(exist_ok=True)
    warmup.write_bytes((CONFIGS / "demo" / "warmup.yaml").read_bytes())
    file = folder / name
    file.write_text(
        dump_mapping({"extends": "base/warmup.yaml", "rollout_matching": rollout_matching})
    )
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


@pytest.mark.req("REP-04", "SRV-03", "CFG-09")
def test_a_training_yaml_gives_the_guard_and_the_batch(tmp_path: Path) -> None:
    settings = settings_of(training_yaml(tmp_path, repeat_terminate=GUARD, decode_batch_size=12))
    assert settings.repeat_terminate == RepeatTerminateConfig(**GUARD)
    assert settings.max_num_seqs == 12


@pytest.mark.req("REP-04", "CFG-04", "CFG-09")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_server_and_learner_read_the_same_of_every_shipped_config(path: Path) -> None:
    learner = load_config(path).rollout_matching
    server = read_run_config(path).rollout
    for name in type(server).model_fields:
        assert getattr(server, name) == getattr(learner, name)


@pytest.mark.req("REP-04", "CFG-04")
def test_a_base_gives_what_the_file_itself_leaves_open(tmp_path: Path) -> None:
    training_yaml(tmp_path, "parent.yaml", repeat_terminate=GUARD)
    file = tmp_path / "leaf.yaml"
    file.write_text(
        "extends: parent.yaml\nrollout_matching: {repeat_terminate: {max_object_keys: 9}}\n"
    )
    expected = RepeatTerminateConfig(**GUARD | {"max_object_keys": 9})
    assert settings_of(file).repeat_terminate == expected
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


@pytest.mark.req("FMT-01", "CFG-03")
@pytest.mark.parametrize("name", ["xml", "[compact]"])
def test_a_format_that_is_not_known_is_refused_where_it_is(tmp_path: Path, name: str) -> None:
    file = training_yaml(tmp_path, repeat_terminate=GUARD)
    with file.open("a") as more:
        more.write(f"custom: {{answer_format: {name}}}\n")
    with pytest.raises(ContractError) as caught:
        settings_of(file)
    assert caught.value.where == "custom.answer_format"
    assert caught.value.do == "Use one of object_keys, objects_array, compact"


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize(("written", "value"), [("010", 10), ("0x10", 16)])
def test_numbers_mean_what_they_mean_to_the_learner(
    tmp_path: Path, written: str, value: int
) -> None:
    run = training_yaml(tmp_path)
    run.write_text(f"extends: base/warmup.yaml\nrollout_matching: {{decode_batch_size: {written}}}")
    assert settings_of(run).max_num_seqs == value
    assert load_config(run).rollout_matching.decode_batch_size == value


@pytest.mark.req("SRV-03")
def test_a_replica_of_several_gpus_decodes_the_batch_of_each(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, decode_batch_size=12)
    given = {"model": Path("/m"), "gpus": [0, 1, 2, 3], "tensor_parallel_size": 2}
    settings = load_settings(None, given, run, {})
    assert settings.max_num_seqs == 24
    assert settings.max_num_seqs * settings.num_replicas == 12 * settings.num_workers


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


@pytest.mark.req("SRV-03")
def test_an_unset_batch_is_the_learners_default(tmp_path: Path) -> None:
    mapping = load_mapping(CONFIGS / "demo" / "warmup.yaml")
    del mapping["rollout_matching"]["decode_batch_size"]
    run = tmp_path / "run.yaml"
    run.write_text(dump_mapping(mapping))
    assert settings_of(run).max_num_seqs == load_config(run).rollout_matching.decode_batch_size == 1


@pytest.mark.req("SRV-01")
@pytest.mark.parametrize(("written", "transport"), [("auto", None), ("gloo", "gloo")])
def test_the_transport_of_the_push_is_the_servers_too(
    tmp_path: Path, written: str, transport: str | None
) -> None:
    run = training_yaml(tmp_path, vllm={"sync": {"transport": written}})
    assert settings_of(run).weight_transport == transport


@pytest.mark.req("SRV-01", "REP-04")
def test_options_win_over_the_settings_file_and_that_over_the_run(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, repeat_terminate=GUARD, decode_batch_size=12)
    config = tmp_path / "server.yaml"
    config.write_text("max_num_seqs: 6\nrepeat_terminate: {enabled: true, max_object_keys: 3}\n")
    settings = settings_of(run, config)
    assert settings.max_num_seqs == 6
    assert settings.repeat_terminate == RepeatTerminateConfig(enabled=True, max_object_keys=3)
    assert settings_of(run, config, max_num_seqs=5).max_num_seqs == 5


@pytest.mark.req("CFG-02", "CFG-09")
def test_every_fault_of_the_shared_part_is_told_with_its_path(tmp_path: Path) -> None:
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


@pytest.mark.req("REP-01")
def test_a_guard_that_can_never_fire_is_refused(tmp_path: Path) -> None:
    half = {"enabled": True, "min_new_tokens": 5, "ngram_size": 3}
    (error,) = errors_of(training_yaml(tmp_path, repeat_terminate=half))
    assert error.where == "rollout_matching.repeat_terminate.enabled"
    assert "max_object_keys" in error.do


@pytest.mark.req("CFG-09")
def test_what_only_the_learner_reads_may_be_wrong(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, unknown=1, decode_mode="guess", decode_batch_size=3)
    broken = merge(load_mapping(run), {"training": {"learning_rate": "fast"}, "modle": 1})
    run.write_text(dump_mapping(broken))
    assert settings_of(run).max_num_seqs == 3


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("text", ["model: {}\n", "rollout_matching:\n", "rollout_matching: [1]\n"])
def test_a_file_that_is_no_training_yaml_is_refused(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(text)
    with pytest.raises(ContractError) as caught:
        settings_of(run)
    assert caught.value.where == "rollout_matching"
    assert str(run) in caught.value.found


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("text", ["a: b: c", "[1]", "a: 1\na: 2\n", "1: 2\n"])
def test_a_file_that_cannot_be_read_names_the_option_and_the_file(
    tmp_path: Path, text: str
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(text)
    for path in (run, tmp_path / "none.yaml"):
        with pytest.raises(ContractError) as caught:
            settings_of(path)
        assert caught.value.where == "--run-config"
        assert str(path) in caught.value.found
        if text == "a: 1\na: 2\n" and path == run:
            assert f"{run}:2:1: the key 'a' is written twice" in caught.value.found


@pytest.mark.req("CFG-04")
def test_a_missing_base_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("extends: gone.yaml\n")
    with pytest.raises(ContractError) as caught:
        settings_of(run)
    assert caught.value.where == f"{run}: extends"


def environment(**guard: Any) -> dict[str, str]:
    return {INJECTION: "1", CONFIG_JSON: json.dumps(guard)}


@pytest.mark.req("REP-04")
def test_the_environment_alone_switches_the_guard_on(tmp_path: Path) -> None:
    assert settings_of(None, environ=environment(**GUARD)).repeat_terminate == (
        RepeatTerminateConfig(**GUARD)
    )
    file = tmp_path / "guard.json"
    file.write_text(json.dumps(GUARD))
    by_path = environment(**GUARD | {"max_object_keys": 1}) | {CONFIG_JSON_PATH: str(file)}
    assert settings_of(None, environ=by_path).repeat_terminate == RepeatTerminateConfig(**GUARD)


@pytest.mark.req("REP-04")
def test_an_environment_that_says_the_same_is_no_fault(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, repeat_terminate=GUARD)
    settings = settings_of(run, environ=environment(**GUARD))
    assert settings.repeat_terminate == RepeatTerminateConfig(**GUARD)


@pytest.mark.req("REP-04")
def test_an_environment_that_contradicts_a_file_is_refused_with_both(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("repeat_terminate: {enabled: true, max_object_keys: 7}\n")
    off = training_yaml(tmp_path)
    for run, file, source, there in (
        (None, config, "--config", '"max_object_keys":7'),
        (off, config, "--config", '"max_object_keys":7'),
        (off, None, "--run-config", '"enabled":false'),
    ):
        with pytest.raises(ContractError) as caught:
            settings_of(run, file, environment(**GUARD))
        assert caught.value.where == INJECTION
        assert '"max_object_keys":40' in caught.value.found
        assert source in caught.value.found
        assert there in caught.value.found


@pytest.mark.req("REP-01", "REP-04")
def test_an_environment_whose_guard_can_never_fire_is_refused() -> None:
    with pytest.raises(ContractError) as caught:
        settings_of(None, environ=environment(enabled=True))
    assert caught.value.where == "repeat_terminate.enabled"


@pytest.mark.req("SRV-04", "REP-04")
def test_the_command_takes_a_training_yaml_and_ends_on_a_bad_one(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, repeat_terminate={"enabled": True})
    options = f"serve --device cpu --model {tmp_path} --run-config {run}".split()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rollout_server", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert told[0] == "error: rollout_matching.repeat_terminate.enabled"
    assert len(told) == 3
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "vllm", "fastapi", "transformers"})


@pytest.mark.req("CFG-05", "CFG-09")
def test_what_the_engine_is_in_the_training_yaml_holds_for_its_servers(tmp_path: Path) -> None:
    run = training_yaml(tmp_path, vllm={"max_model_len": 777, "enable_prefix_caching": False})
    settings = settings_of(run)
    assert (settings.max_model_len, settings.enable_prefix_caching) == (777, False)
    assert settings.enable_lora is False
    given = settings_of(run, max_model_len=99, enable_prefix_caching=True)
    assert (given.max_model_len, given.enable_prefix_caching) == (99, True)


def adapter_yaml(folder: Path, lora_rank: int, enable_lora: bool = True) -> Path:
    run = training_yaml(folder, vllm={"enable_lora": enable_lora})
    tuner = {"train_type": "lora", "lora_rank": lora_rank, "lora_alpha": 8}
    run.write_text(dump_mapping(merge(load_mapping(run), {"tuner": tuner})))
    return run


@pytest.mark.req("SYNC-01", "CFG-09")
@pytest.mark.parametrize(("lora_rank", "room"), [(1, 1), (2, 8), (8, 8), (65, 128), (512, 512)])
def test_the_rank_that_is_trained_is_rounded_up_to_one_of_vllm(
    tmp_path: Path, lora_rank: int, room: int
) -> None:
    run = adapter_yaml(tmp_path, lora_rank)
    settings = settings_of(run)
    assert (settings.enable_lora, settings.max_lora_rank) == (True, room)
    assert settings_of(run, max_lora_rank=320).max_lora_rank == 320
    assert settings_of(run, enable_lora=False).enable_lora is False


@pytest.mark.req("SYNC-01", "CFG-09")
def test_the_rank_counts_only_with_adapters_and_where_it_is_one(tmp_path: Path) -> None:
    default = ServerSettings.model_fields["max_lora_rank"].default
    assert settings_of(adapter_yaml(tmp_path, 128, enable_lora=False)).max_lora_rank == default
    assert settings_of(adapter_yaml(tmp_path, -1)).max_lora_rank == default
    full = training_yaml(tmp_path, vllm={"enable_lora": True})
    assert settings_of(full).max_lora_rank == default


@pytest.mark.req("SYNC-01")
def test_a_rank_beyond_all_of_vllm_is_refused(tmp_path: Path) -> None:
    run = adapter_yaml(tmp_path, 513)
    with pytest.raises(ContractError) as caught:
        settings_of(run)
    assert caught.value.where == "tuner.lora_rank"
    assert "up to rank 512" in caught.value.found
