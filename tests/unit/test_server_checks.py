"""The start-up checks of servers (settings, group port, images) and of FSDP2."""

import socket
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.rollout.server_process import free_ports
from learner.training import server_checks
from learner.training.input_checks import Caution, StartUp, Waiting, check_inputs
from learner.training.server_checks import check_group_port, describe_server, reach_servers
from shared_contracts.errors import ContractError, ContractErrors, Problem
from tests.unit.scripted_server import (
    INFER,
    ScriptedServer,
    envelope,
    problem,
    replica,
    scripted_server,
)
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import small_config, small_mapping

URL = "http://serve-0:8000"
KEY = "rollout_matching.vllm.server.servers[0].group_port"


def config_of(
    checkpoint: Path, data: ToyData, folder: Path, server: ScriptedServer | None = None, **vllm: Any
) -> Config:
    """server: the only one of the run; vllm: keys beside it."""
    (port,) = free_ports(1)
    url = URL if server is None else server.base_url
    servers = {"servers": [{"base_url": url, "group_port": port}]}
    rollout = {"vllm": {"mode": "server", "server": servers, **vllm}}
    return small_config(checkpoint, data, folder, rollout_matching=rollout)


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
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    keys: dict[str, Any],
    changes: dict[str, Any],
    found: str,
) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    lines: list[str] = []
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of().model_copy(update=changes)
        server.routes[INFER] = lambda _: [envelope([1], [1])]
        config = config_of(toy_checkpoint, toy_data, tmp_path, server, **keys)
        (client,) = reach_servers(config, {}, samples, lines.append)
        assert client.base_url == server.base_url
    assert [line for line in lines if found in line] == lines != []


@pytest.mark.req("DEP-03")
def test_the_doctor_names_a_replica_that_is_asleep() -> None:
    replicas = [replica(0), replica(1, "asleep")]
    line = describe_server(info_of().model_copy(update={"replicas": replicas}))
    assert line.endswith("weights 0 READY, repeat guard off, replica 1 asleep")


@pytest.mark.req("DEP-03")
def test_a_server_with_another_transport_is_refused_before_a_model_is_loaded(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    with scripted_server() as server:
        config = config_of(toy_checkpoint, toy_data, tmp_path, server, sync={"transport": "nccl"})
        with pytest.raises(
            ContractError, match=r"is gloo, and .*sync\.transport is nccl"
        ) as caught:
            reach_servers(config, {})
    assert "set sync.transport to gloo" in caught.value.do


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_taken_group_port_is_refused_with_both_ways_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_checks, "_RELEASE_S", 0.0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.listen()
        with pytest.raises(ContractError) as caught:
            check_group_port(KEY, "http://127.0.0.1:8000", port)
    assert (caught.value.where, caught.value.found) == (KEY, f"127.0.0.1:{port} is taken")
    assert "vllm.mode: colocate or rollout_backend: hf" in caught.value.do
    check_group_port(KEY, "http://127.0.0.1:8000", port)
    check_group_port(KEY, "http://127.0.0.1:8000", port)  # it was released


@pytest.mark.req("SYNC-04", "DEP-03")
def test_a_group_port_without_an_answer_is_only_reported_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    first, second, third, *_ = read_samples(toy_data.train_jsonl, allow_poly=False)
    elsewhere, last = tmp_path / "elsewhere" / "0.png", tmp_path / "last" / "0.png"
    samples = [first, replace(second, images=(elsewhere,)), replace(third, images=(last,))]
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of()
        faults = [{"where": "infer_requests[0].images[0]", "detail": "in no allowed folder"}]
        refused = Problem.of("invalid-request", "bad images", "infer_requests", faults)
        needs_push = problem("push-needed", "it broke", "server")
        answers = chain(2 * [(refused.status, refused)], repeat(needs_push))
        server.routes[INFER] = lambda _: next(answers)
        config = config_of(toy_checkpoint, toy_data, tmp_path, server)
        with pytest.raises(ContractErrors) as caught:
            reach_servers(config, {}, samples)
    for error, image in zip(caught.value.errors, (first.images[0], elsewhere), strict=True):
        assert error.found == f"the server cannot read {image}: in no allowed folder"
        assert f"--allowed-media-dir {image.parent}" in error.do
        assert "mount the images at the same path" in error.do


@pytest.mark.req("DEP-03")
def test_a_server_that_needs_a_push_is_not_asked_for_its_images(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info_of()
        server.routes[INFER] = lambda _: problem("push-needed", "it broke", "server")
        config = config_of(toy_checkpoint, toy_data, tmp_path, server)
        run = StartUp(config, {}, samples=samples)
        checks = {check.name: check for check in server_checks.server_checks(run)}
        with pytest.raises(Waiting, match="waits for servers"):
            checks["media"].run()
        checks["servers"].run()
        with pytest.raises(Waiting, match="first push"):
            checks["media"].run()
        assert len(reach_servers(config, {}, samples)) == 1


# --- FSDP2 ------------------------------------------------------------------------------


HF = {"rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 12}}
OFFLOAD = {
    "rollout_matching": {"offload": {"enabled": True, "offload_model": True}, "max_new_tokens": 12}
}
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
        (2, OFFLOAD | CHANNEL_B, "rollout_matching.offload"),
    ],
    ids=["channel A", "hf without channel B", "one process", "lora", "hf", "offload"],
)
def test_sharding_of_a_model_that_has_to_be_whole_is_refused(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    processes: int,
    changes: dict[str, Any],
    named: str | None,
) -> None:
    mapping = merge(small_mapping(toy_checkpoint, toy_data, tmp_path / "run"), changes)
    if "rollout_matching" in changes:
        mapping["rollout_matching"] = changes["rollout_matching"]
    mapping["training"]["data_parallel"] = "fsdp2"
    config, environment = parse_config(mapping), {"WORLD_SIZE": str(processes)}
    if named is None:
        check_inputs(config, environment)
        return
    with pytest.raises(ContractError) as caught:
        check_inputs(config, environment)
    assert caught.value.where == "training.data_parallel"
    assert caught.value.do.startswith("Set it to ddp")
    assert named in caught.value.found
