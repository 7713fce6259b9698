"""Refusals of `learner launch`, and the commands it makes. Nothing is started."""

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.config import merge
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.operate import launch
from learner.operate.launch import LaunchOptions, addresses_here, plan_launch, split_devices
from learner.rollout import server_process
from learner.rollout.server_process import ServerProcess, free_ports
from learner.training.input_checks import check_inputs
from rollout_server.settings.options import load_settings
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.machine import CUDA_VISIBLE
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_VARIABLE
from tests.unit.scripted_server import scripted_server
from tests.unit.small_run import ConfigOf

pytestmark = pytest.mark.req("DEP-02")

SERVERS = "rollout_matching.vllm.server.servers"
LOOPBACK = "127.0.0.1"
FILE = Path("run.yaml")


@contextmanager
def refused() -> Iterator[list[tuple[str, str]]]:
    """Collect `where` and `found` of all faults."""
    faults: list[tuple[str, str]] = []
    with pytest.raises(ContractError) as caught:
        yield faults
    assert all(error.do for error in caught.value.errors)
    faults += [(error.where, error.found) for error in caught.value.errors]


def gpus(*servers: str, train: str | None = "3", processes: int | None = None) -> LaunchOptions:
    return LaunchOptions("gpu", servers, train, processes)


TWICE = "--server-gpus, --train-gpus"


@pytest.mark.parametrize(
    ("options", "servers", "size", "split"),
    [
        (gpus("0,1", train="2,3"), 1, 2, [(0, 1), (2, 3)]),
        (gpus("2", "0,1"), 2, 1, [(2,), (0, 1), (3,)]),
        (LaunchOptions("cpu", train_processes=3), 2, 4, [(), (), ()]),
    ],
    ids=["one server", "servers in the order of the config", "cpu"],
)
def test_gpus_are_split_between_servers_and_learner(
    options: LaunchOptions, servers: int, size: int, split: list[tuple[int, ...]]
) -> None:
    assert split_devices(options, servers, size, range(4)) == split


@pytest.mark.parametrize(
    ("options", "servers", "size", "faults"),
    [
        (gpus("0,1", "1,3"), 2, 1, [(TWICE, "GPU 1,3 is named more than once")]),
        (gpus("0", train="4"), 1, 1, [("--train-gpus", "'4', and the GPUs here are 0,1,2,3")]),
        (
            gpus("-1", "1,1", train=None, processes=2),
            3,
            4,
            [
                ("--train-processes", "2"),
                ("--server-gpus", "given 2 times"),
                ("--server-gpus", "'-1', and"),
                ("--server-gpus", "2 GPUs (1,1) do not split"),
                ("--train-gpus", "'', and"),
                (TWICE, "GPU 1 is named more than once"),
            ],
        ),
        (LaunchOptions("cpu", ("0",), "1"), 1, 1, [("--device", "cpu, beside")]),
    ],
)
def test_all_faults_of_a_split_are_reported_together(
    options: LaunchOptions, servers: int, size: int, faults: list[tuple[str, str]]
) -> None:
    with refused() as found:
        split_devices(options, servers, size, [0, 1, 2, 3])
    assert [where for where, _ in found] == [where for where, _ in faults]
    assert all(part in text for (_, text), (_, part) in zip(found, faults, strict=True)), found


def at(*base_urls: str, ports: list[int] | None = None) -> list[ServerAddress]:
    groups = ports or free_ports(len(base_urls))
    return [
        ServerAddress(base_url=url, group_port=port)
        for url, port in zip(base_urls, groups, strict=True)
    ]


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://192.0.2.7:8000", "Cannot assign requested address"),
        ("http://no-such-host.invalid:8000", "cannot be bound"),
        ("https://127.0.0.1:8000", "no plain http"),
        ("http://127.0.0.1:8000/prefix", "has a path"),
    ],
)
def test_server_on_another_host_is_refused(url: str, part: str) -> None:
    with pytest.raises(ContractErrors) as caught:
        addresses_here(at(url))
    (error,) = caught.value.errors
    assert (error.where, part in error.found) == (f"{SERVERS}[0].base_url", True)
    assert all(way in error.do for way in ("deploy/train_stage2.sh", "rollout-server serve"))


def test_a_running_server_is_refused_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever listens there would get the token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with scripted_server() as server, pytest.raises(ContractErrors) as caught:
        addresses_here(at(server.base_url))
    assert server.calls == []
    (error,) = caught.value.errors
    assert "cannot be bound ([Errno 98] Address already in use" in error.found
    assert "For servers that run already" in error.do


def test_port_has_one_use_on_all_addresses() -> None:
    first, second, group = free_ports(3)
    urls = [f"http://0.0.0.0:{first}", f"http://{LOOPBACK}:{second}"]
    for servers, key in (
        (at(urls[0], f"http://localhost:{first}"), "base_url"),
        (at(*urls, ports=[group, group]), "group_port"),
        (at(*urls, ports=[group, first]), "group_port"),
    ):
        with refused() as found:
            addresses_here(servers)
        assert [where for where, _ in found] == [f"{SERVERS}[1].{key}"]
    own = [f"http://127.0.0.{last}:{first}" for last in (1, 2)]
    assert len(addresses_here(at(*own, ports=[group, group]))) == 2


@pytest.fixture
def config_with(config_of: ConfigOf) -> ConfigOf:
    """A run of two servers, with other sections merged over it."""
    ports = free_ports(4)
    servers = [
        {"base_url": f"http://{LOOPBACK}:{http}", "group_port": group}
        for http, group in zip(ports[:2], ports[2:], strict=True)
    ]
    vllm = {"mode": "server", "server": {"servers": servers}}
    own = {
        "rollout_matching": {"decode_batch_size": 4, "vllm": vllm},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
    }
    return lambda **sections: config_of(**merge(own, sections))


@pytest.fixture
def config(config_with: ConfigOf) -> Config:
    return config_with()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "visible_gpus", lambda _: [0, 1, 2, 3, 4])


@pytest.mark.usefixtures("four_gpus")
def test_a_list_of_gpus_with_a_fault_counts_as_many_processes(config_with: ConfigOf) -> None:
    config = config_with(training={"data_parallel": "fsdp2"})
    with refused() as found:
        plan_launch(FILE, config, gpus("0", "1", train="2,x"), {})
    assert [where for where, _ in found] == ["--train-gpus"]


@pytest.mark.usefixtures("four_gpus")
def test_faults_of_every_kind_are_reported_together(config_with: ConfigOf, tmp_path: Path) -> None:
    config = config_with(data={"train_jsonl": str(tmp_path / "none.jsonl")})
    own = {"port": 1, "gpus": [0], "tensor_parallel_size": 2, "token_file": "/run/token"}
    taken = [config_port(config, 0), config_port(config, 1, "group_port")]
    with (
        socket.create_server((LOOPBACK, taken[0])),
        socket.create_server((LOOPBACK, taken[1])),
        refused() as found,
    ):
        plan_launch(FILE, config, gpus("0", "0,1", train="2"), own)
    assert [where for where, _ in found] == [
        "--server-config",
        "--server-gpus",
        TWICE,
        f"{SERVERS}[0].base_url",
        f"{SERVERS}[1].group_port",
        str(tmp_path / "none.jsonl"),
    ]
    assert "it has gpus, port, token_file" in found[0][1]
    assert not config.training.output_dir.exists()


def config_port(config: Config, index: int, key: str = "base_url") -> int:
    assert config.rollout_matching.vllm.server is not None
    address = config.rollout_matching.vllm.server.servers[index]
    return int(str(getattr(address, key)).rpartition(":")[2])


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"stage2_ab": {"schedule": {"b_ratio": 0.0}}}, "stage2_ab.schedule.b_ratio"),
        ({"rollout_matching": {"rollout_backend": "hf"}}, "rollout_matching.rollout_backend"),
        (
            {"rollout_matching": {"vllm": {"mode": "colocate", "server": None}}},
            "rollout_matching.vllm.mode",
        ),
        ({"rollout_matching": {"decode_batch_size": 1}}, "rollout_matching.decode_batch_size"),
    ],
)
def test_unfit_run_is_refused(config_with: ConfigOf, sections: dict[str, Any], where: str) -> None:
    config = config_with(**sections)
    with refused() as found:
        plan_launch(FILE, config, LaunchOptions("cpu", train_processes=4), {})
    assert [place for place, _ in found] == [where]


@pytest.mark.req("CFG-09", "FULL-06", "WIRE-04")
@pytest.mark.usefixtures("four_gpus")
def test_options_of_started_servers(config: Config, toy_data: ToyData, tmp_path: Path) -> None:
    own = {"tensor_parallel_size": 2, "allowed_media_dirs": [str(tmp_path)], "grace_seconds": 90}
    plan = plan_launch(FILE, config, gpus("2,0", "1,4", train="3"), own)
    plan.write_files()
    for start, ids in zip(plan.servers.values(), [(2, 0), (1, 4)], strict=True):
        words, log, *_, grace_s = start.args
        given = dict(zip(words[::2], words[1::2], strict=True))
        settings = load_settings(Path(given["--config"]), {}, Path(given["--run-config"]), {})
        assert (settings.device, settings.gpus, settings.num_replicas) == ("gpu", ids, 1)
        assert settings.model == Path(config.model.model)
        assert settings.dtype == config.model.torch_dtype
        assert settings.max_num_seqs == 4 * 2
        assert settings.grace_seconds == grace_s == 90
        assert settings.max_model_len == 512, "106 tokens, and the proof of a push with 292"
        images = toy_data.train_jsonl.parent / "images"
        assert set(settings.allowed_media_dirs) == {tmp_path, images / "train", images / "val"}
        assert log.parent == config.training.output_dir / "logs"
    first, _ = plan.servers
    assert first.startswith(f"http://{LOOPBACK}:{config_port(config, 0)} on GPU 2,0 (log: ")
    assert first.endswith("/server-0.log)")
    assert check_inputs(config).start.step == 0, "the run folder still counts as unused"


@pytest.mark.parametrize(
    ("on_term", "grace_s", "code"), [("", 0.01, -signal.SIGKILL), ("exit 7", 60.0, 7)]
)
def test_server_is_killed_only_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_term: str, grace_s: float, code: int
) -> None:
    """on_term: of the process; empty: it ignores SIGTERM."""
    monkeypatch.setattr(server_process, "STOP_MARGIN_S", 0.0)
    program, log = tmp_path / "program", tmp_path / "log"
    program.write_text(
        f"#!/bin/sh\ntrap '{on_term}' TERM\necho up\nwhile true; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with ServerProcess([], log, grace_s=grace_s) as server:
        while not log.read_text():
            assert server.code() is None
    assert server.code() == code


@pytest.mark.usefixtures("four_gpus")
def test_learner_and_servers_see_their_own_gpus(config: Config) -> None:
    around = {CUDA_VISIBLE: "0,1,2,3", TOKEN_VARIABLE: "secret", "WORLD_SIZE": "7", "RANK": "1"}
    plan = plan_launch(FILE, config, gpus("0", "1", train="2,3"), {}, around)
    assert plan.learner_environment[CUDA_VISIBLE] == "2,3"
    servers = next(iter(plan.servers.values())).args[3]
    assert CUDA_VISIBLE not in servers, "their options have the ids"
    for environment in (plan.learner_environment, servers):
        assert environment[TOKEN_VARIABLE] == "secret"
        assert not {"WORLD_SIZE", "RANK"} & environment.keys()
    assert plan.processes == 2
    program, *words = plan.learner
    assert (Path(program).name, words) == ("learner", ["train", "--config", str(FILE.absolute())])
    plan = plan_launch(FILE, config, LaunchOptions("cpu"), {}, {CUDA_VISIBLE: "0"})
    assert plan.learner_environment[CUDA_VISIBLE] == ""
    assert all(" on the CPU (" in each for each in plan.servers)
