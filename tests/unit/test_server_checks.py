"""The start-up checks of backends, of servers (settings, group port, images) and of FSDP2."""

import socket
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, parse_config
from learner.config.schema import Config
from learner.rollout.server_process import free_ports
from learner.training import server_checks
from learner.training.input_checks import Caution, StartUp, Waiting, check_backend, check_inputs
from learner.training.server_checks import check_group_port, describe_server, reach_servers
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors, Problem
from tests.unit.config_faults import CONFIGS, changed
from tests.unit.refusals import refused
from tests.unit.scripted_server import (
    INFER,
    ScriptedServer,
    envelope,
    problem,
    replica,
    scripted_server,
)
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import ConfigOf

KEY = "rollout_matching.vllm.server.servers[0].group_port"
BASE = load_mapping(CONFIGS / "stage2_two_channel" / "base.yaml")


def served(
    config_of: ConfigOf, server: ScriptedServer, port: int | None = None, **vllm: Any
) -> Config:
    """vllm: keys beside the only server of the run."""
    servers = {"servers": [{"base_url": server.base_url, "group_port": port or free_ports(1)[0]}]}
    return config_of(rollout_matching={"vllm": {"mode": "server", "server": servers, **vllm}})


@pytest.mark.req("CFG-05", "SYNC-01")
def test_invalid_vllm_configuration_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.training.input_checks.find_spec", lambda name: None)
    with refused("rollout_matching.vllm.mode", do="hf"):
        check_backend(parse_config(changed("rollout_matching.vllm", {}, BASE)), {})


@pytest.mark.req("CFG-02")
def test_runtime_validator_does_not_own_static_key_allowlists(config_of: ConfigOf) -> None:
    """Once the schema has been passed, no key is refused."""
    config = config_of()
    section = config.rollout_matching.model_dump(mode="json")
    del section["pipeline"]
    check_inputs(config_of(rollout_matching=section))


@pytest.mark.req("DEP-03", "FULL-06")
@pytest.mark.parametrize(
    ("keys", "changes", "found"),
    [
        ({"max_model_len": 512}, {}, "vllm.max_model_len is 512"),
        ({}, {"max_model_len": 16}, "its answer is cut short"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching: is False"),
    ],
)
def test_a_harmless_difference_is_reported_and_the_run_starts(
    config_of: ConfigOf,
    scenes: list[Sample],
    keys: dict[str, Any],
    changes: dict[str, Any],
    found: str,
) -> None:
    lines: list[str] = []
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of().model_copy(update=changes)
        server.routes[INFER] = lambda _: [envelope([1], [1])]
        config = served(config_of, server, **keys)
        (client,) = reach_servers(config, {}, scenes, lines.append)
        assert client.base_url == server.base_url
    assert [line for line in lines if found in line] == lines != []


@pytest.mark.req("DEP-03")
def test_the_doctor_names_a_replica_that_is_asleep() -> None:
    replicas = [replica(0), replica(1, "asleep")]
    line = describe_server(info_of().model_copy(update={"replicas": replicas}))
    assert line.endswith("weights 0 READY, repeat guard off, replica 1 asleep")


@pytest.mark.req("DEP-03")
def test_another_transport_is_refused_before_a_model_is_loaded(config_of: ConfigOf) -> None:
    with scripted_server() as server:
        config = served(config_of, server, sync={"transport": "nccl"})
        with pytest.raises(
            ContractError, match=r"is gloo, and .*sync\.transport is nccl"
        ) as caught:
            reach_servers(config, {})
    assert "set sync.transport to gloo" in caught.value.do


@pytest.mark.req("SYNC-04", "DEP-03")
def test_taken_group_port_is_refused_unless_the_server_frees_it(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "_RELEASE_S", 0.0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.listen()
        with refused(KEY, f"127.0.0.1:{port} is taken", "mode: colocate or rollout_backend: hf"):
            check_group_port(KEY, "http://127.0.0.1:8000", port)
        with scripted_server() as server:
            owned = info_of().model_copy(update={"owner": "the learner that ended"})
            server.routes["GET /info/"] = lambda _: owned
            assert len(reach_servers(served(config_of, server, port), {})) == 1
    check_group_port(KEY, "http://127.0.0.1:8000", port)
    check_group_port(KEY, "http://127.0.0.1:8000", port)  # it was released


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_group_port_without_an_answer_is_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(server_checks, "address_towards", lambda _: "127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", no_answer)
    with pytest.raises(Caution) as caught:
        check_group_port(KEY, "http://192.0.2.1:8000", 51216)
    (error,) = caught.value.errors
    assert (error.where, error.do.partition(";")[0]) == (KEY, "Open the port for the learner")


@pytest.mark.req("WIRE-04", "DEP-03")
def test_an_image_of_each_folder_that_a_server_cannot_read_is_named_before_a_model_is_loaded(
    config_of: ConfigOf, scenes: list[Sample], tmp_path: Path
) -> None:
    first, second, third, *_ = scenes
    elsewhere, last = tmp_path / "elsewhere" / "0.png", tmp_path / "last" / "0.png"
    samples = [first, replace(second, images=(elsewhere,)), replace(third, images=(last,))]
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of()
        faults = [{"where": "infer_requests[0].images[0]", "detail": "in no allowed folder"}]
        refused = Problem.of("invalid-request", "bad images", "infer_requests", faults)
        needs_push = problem("push-needed", "it broke", "server")
        answers = chain(2 * [(refused.status, refused)], repeat(needs_push))
        server.routes[INFER] = lambda _: next(answers)
        config = served(config_of, server)
        with pytest.raises(ContractErrors) as caught:
            reach_servers(config, {}, samples)
    for error, image in zip(caught.value.errors, (first.images[0], elsewhere), strict=True):
        assert error.found == f"the server cannot read {image}: in no allowed folder"
        assert f"--allowed-media-dir {image.parent}" in error.do
        assert "mount the images at the same path" in error.do


@pytest.mark.req("DEP-03")
def test_before_its_push_a_server_reads_no_image(config_of: ConfigOf, scenes: list[Sample]) -> None:
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of()
        server.routes[INFER] = lambda _: problem("push-needed", "it broke", "server")
        config = served(config_of, server)
        run = StartUp(config, {}, samples=scenes)
        checks = {check.name: check for check in server_checks.server_checks(run)}
        with pytest.raises(Waiting, match="waits for servers"):
            checks["media"].run()
        checks["servers"].run()
        with pytest.raises(Waiting, match="first push"):
            checks["media"].run()
        assert len(reach_servers(config, {}, scenes)) == 1


HF = {"rollout_matching": {"rollout_backend": "hf"}}
COLOCATED = {"mode": "colocate", "server": None}
OFFLOAD = {"enabled": True, "offload_model": True}
OFFLOADED = {"rollout_matching": {"vllm": COLOCATED, "offload": OFFLOAD}}
CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 1.0}}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}}


@pytest.mark.req("RUN-02", "DDP-02", "CFG-05", "ROLL-03")
@pytest.mark.parametrize(
    ("processes", "changes", "named"),
    [
        (2, {}, None),
        (2, HF, None),
        (1, {}, "one learner process"),
        (2, LORA, "tuner.train_type lora"),
        (2, HF | CHANNEL_B, "rollout_backend hf"),
        (2, OFFLOADED | CHANNEL_B, "rollout_matching.offload"),
    ],
    ids=["channel A", "hf without channel B", "one process", "lora", "hf", "offload"],
)
def test_sharding_of_a_model_that_has_to_be_whole_is_refused(
    config_of: ConfigOf, processes: int, changes: dict[str, Any], named: str | None
) -> None:
    config = config_of(training={"data_parallel": "fsdp2"}, **changes)
    refusal = refused("training.data_parallel", named, "Set it to ddp") if named else nullcontext()
    with refusal:
        check_inputs(config, {"WORLD_SIZE": str(processes)})
