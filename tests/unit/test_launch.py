"""What `learner launch` refuses, and the commands it makes: nothing is started here."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.operate import launch_plan
from learner.operate.launch_plan import (
    Asked,
    Checked,
    LaunchPlan,
    Listen,
    Split,
    addresses_here,
    check_launch,
    plan_launch,
    split_devices,
)
from learner.rollout import server_process
from learner.rollout.server_process import ServerProcess, free_ports
from learner.training.start_checks import check_inputs
from rollout_server.settings.options import load_settings
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.machine import CUDA_VISIBLE
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.unit.scripted_server import scripted_server
from tests.unit.small_run import small_mapping
from tests.unit.test_learner_cli import command

pytestmark = pytest.mark.req("DEP-02")

SERVERS = "rollout_matching.vllm.server.servers"
LOOPBACK = "127.0.0.1"


@contextmanager
def refused() -> Iterator[list[tuple[str, str]]]:
    """Where and found of everything that is told."""
    told: list[tuple[str, str]] = []
    with pytest.raises(ContractError) as caught:
        yield told
    error = caught.value
    errors = error.errors
    assert all(e.do for e in errors)
    told += [(e.where, e.found) for e in errors]


# --- Which GPUs do what -----------------------------------------------------------------


def gpus(*servers: str, train: str | None = "3", processes: int | None = None) -> Asked:
    return Asked("gpu", servers, train, processes)


def test_a_single_server_takes_all_gpus_and_each_of_the_learners_gets_a_process() -> None:
    split = split_devices(gpus("0,1", train="2,3"), 1, 2, [0, 1, 2, 3])
    assert split == Split(((0, 1),), (2, 3), 2)
    assert split.on_gpus


def test_several_servers_take_theirs_in_the_order_of_the_config() -> None:
    assert split_devices(gpus("2", "0,1"), 2, 1, range(4)).servers == ((2,), (0, 1))


def test_on_the_cpu_there_are_processes_and_no_gpus() -> None:
    assert split_devices(Asked("cpu"), 2, 1, []) == Split(((), ()), (), 1)
    split = split_devices(Asked("cpu", train_processes=3), 1, 4, [])
    assert (split.processes, split.on_gpus) == (3, False)


@pytest.mark.parametrize(
    ("asked", "servers", "size", "told"),
    [
        (gpus("0,1", "1,2"), 2, 1, [("--server-gpus", "GPU 1 is named 2 times")]),
        (gpus("0,3"), 1, 1, [("--server-gpus", "--server-gpus 0,3 and --train-gpus 3")]),
        (gpus("0", train="3,3"), 1, 1, [("--train-gpus", "GPU 3 is named 2 times")]),
        (gpus("0", "1"), 1, 1, [("--server-gpus", "given 2 times, and")]),
        (gpus("0"), 3, 1, [("--server-gpus", "has 3 servers")]),
        (gpus("0,9"), 1, 1, [("--server-gpus", "no GPU 9 here, there are 0,1,2,3")]),
        (gpus("0", train="4"), 1, 1, [("--train-gpus", "no GPU 4 here")]),
        (gpus("0,1,2"), 1, 2, [("--server-gpus", "3 GPUs (0,1,2) do not split into replicas")]),
        (gpus("0,"), 1, 1, [("--server-gpus", "'0,' is no list")]),
        (gpus("0", processes=2), 1, 1, [("--train-processes", "2, and on GPUs")]),
        (
            gpus("-1", "1,1", train=None, processes=0),
            3,
            4,
            [
                ("--train-processes", "0, and"),
                ("--server-gpus", "given 2 times"),
                ("--train-gpus", "not given"),
                ("--server-gpus", "'-1' is no list"),
                ("--server-gpus", "GPU 1 is named 2 times"),
                ("--server-gpus", "2 GPUs (1,1) do not split"),
            ],
        ),
        (
            Asked("cpu", ("0",), "1", 0),
            1,
            1,
            [("--server-gpus", "0,"), ("--train-gpus", "1,"), ("--train-processes", "0")],
        ),
        (Asked("tpu"), 1, 1, [("--device", "'tpu'")]),
    ],
)
def test_everything_wrong_with_a_split_is_told_at_once(
    asked: Asked, servers: int, size: int, told: list[tuple[str, str]]
) -> None:
    with refused() as found:
        split_devices(asked, servers, size, [0, 1, 2, 3])
    assert [where for where, _ in found] == [where for where, _ in told]
    assert all(part in text for (_, text), (_, part) in zip(found, told, strict=True)), found


def test_a_machine_without_gpus_says_so_once() -> None:
    with refused() as found:
        split_devices(gpus("0", train="1"), 1, 1, [])
    assert [where for where, _ in found] == ["--device"]


# --- Where servers listen ---------------------------------------------------------------


def at(*base_urls: str, ports: list[int] | None = None) -> list[ServerAddress]:
    groups = ports or free_ports(len(base_urls))
    return [
        ServerAddress(base_url=url, group_port=port)
        for url, port in zip(base_urls, groups, strict=True)
    ]


@pytest.mark.parametrize("name", [LOOPBACK, "localhost", "127.0.0.2"])
def test_names_and_addresses_of_this_host_are_its_own(name: str) -> None:
    (port,) = free_ports(1)
    (listen,) = addresses_here(at(f"http://{name}:{port}"), {})
    assert listen.port == port
    assert listen.host == ("127.0.0.2" if name == "127.0.0.2" else LOOPBACK)
    assert listen.base_url == f"http://{name}:{port}"


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://192.0.2.7:8000", "another host"),
        ("http://no-such-host.invalid:8000", "no known host"),
        ("https://127.0.0.1:8000", "plain http"),
        ("http://127.0.0.1:8000/prefix", "without a path"),
    ],
)
def test_a_server_elsewhere_is_to_be_started_there(url: str, part: str) -> None:
    with pytest.raises(ContractErrors) as caught:
        addresses_here(at(url), {})
    (error,) = caught.value.errors
    assert error.where == f"{SERVERS}[0].base_url"
    assert part in error.found
    assert "deploy/train_stage2.sh" in error.do
    assert "rollout-server serve" in error.do


def test_a_host_that_others_reach_needs_a_token() -> None:
    (port,) = free_ports(1)
    servers = at(f"http://0.0.0.0:{port}")
    with refused() as found:
        addresses_here(servers, {})
    assert [where for where, _ in found] == [TOKEN_VARIABLE]
    assert addresses_here(servers, {TOKEN_VARIABLE: "secret"})[0].host == "0.0.0.0"


def test_a_token_in_a_file_is_one(tmp_path: Path) -> None:
    first, second = free_ports(2)
    servers = at(f"http://0.0.0.0:{first}", f"http://0.0.0.0:{second}")
    file = tmp_path / "token"
    given = {TOKEN_FILE_VARIABLE: str(file)}
    with refused() as found:
        addresses_here(servers, given)
    assert [where for where, _ in found] == [TOKEN_FILE_VARIABLE], "told once"
    assert "cannot be read" in found[0][1]
    file.write_text("secret\n")
    assert [listen.host for listen in addresses_here(servers, given)] == ["0.0.0.0"] * 2


def test_a_server_that_is_up_already_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not told the token: whatever listens there would get it."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with scripted_server() as server, pytest.raises(ContractErrors) as caught:
        addresses_here(at(server.base_url))
    assert server.calls == [("GET /live/", None)]
    assert server.authorizations == [None]
    (error,) = caught.value.errors
    assert "a rollout server is up" in error.found
    assert "keep it" in error.do


def test_taken_ports_are_told_together() -> None:
    with socket.create_server((LOOPBACK, 0)) as one, socket.create_server((LOOPBACK, 0)) as other:
        taken, group = one.getsockname()[1], other.getsockname()[1]
        with refused() as found:
            addresses_here(at(f"http://{LOOPBACK}:{taken}", ports=[group]), {})
    assert found[0][0] == f"{SERVERS}[0].base_url"
    assert "another program listens" in found[0][1]
    assert found[1][0] == f"{SERVERS}[0].group_port"
    assert f"port {group}" in found[1][1]


def test_a_port_has_one_use() -> None:
    first, second, group = free_ports(3)
    urls = [
        f"http://{LOOPBACK}:{first}",
        f"http://localhost:{first}",
        f"http://{LOOPBACK}:{second}",
    ]
    with refused() as found:
        addresses_here(at(*urls, ports=[group, second, group]), {})
    assert [where for where, _ in found] == [
        f"{SERVERS}[1].base_url",
        f"{SERVERS}[2].base_url",
        f"{SERVERS}[2].group_port",
    ]


@pytest.mark.parametrize("hosts", [("0.0.0.0", LOOPBACK), (LOOPBACK, "0.0.0.0")])
def test_who_listens_everywhere_takes_the_port_of_every_address(hosts: tuple[str, str]) -> None:
    first, second, group = free_ports(3)
    token = {TOKEN_VARIABLE: "secret"}
    with refused() as found:
        addresses_here(at(*(f"http://{host}:{first}" for host in hosts)), token)
    assert [where for where, _ in found] == [f"{SERVERS}[1].base_url"]
    urls = [f"http://{host}:{port}" for host, port in zip(hosts, (first, second), strict=True)]
    with refused() as found:
        addresses_here(at(*urls, ports=[group, group]), token)
    assert [where for where, _ in found] == [f"{SERVERS}[1].group_port"]
    own = [f"http://127.0.0.{last}:{first}" for last in (1, 2)]
    assert len(addresses_here(at(*own, ports=[group, group]), token)) == 2


# --- All of it --------------------------------------------------------------------------


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return config_of(toy_checkpoint, toy_data, tmp_path)


def config_of(checkpoint: Path, toy: ToyData, folder: Path, **sections: Any) -> Config:
    """A run of two servers."""
    ports = free_ports(4)
    servers = [
        {"base_url": f"http://{LOOPBACK}:{http}", "group_port": group}
        for http, group in zip(ports[:2], ports[2:], strict=True)
    ]
    rollout = {"decode_batch_size": 4, "vllm": {"mode": "server", "server": {"servers": servers}}}
    mapping = small_mapping(checkpoint, toy, folder / "out", rollout_matching=rollout)
    mapping["stage2_ab"]["schedule"]["b_ratio"] = 0.5
    return parse_config(merge(mapping, sections))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda _: [0, 1, 2, 3])


@pytest.mark.req("CFG-09")
@pytest.mark.usefixtures("four_gpus")
def test_the_checks_are_of_the_launchs_processes_not_of_this_environments(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("RANK", "8")
    checked = check_launch(config, gpus("0", "1", train="2,3"), {})
    assert checked.inputs.processes == 2
    with refused() as found:
        check_launch(config, Asked("cpu", train_processes=3), {})
    assert found[0][0] == "training.effective_batch_size", "4 samples over 3 processes"


@pytest.mark.usefixtures("four_gpus")
def test_mistakes_of_every_kind_are_told_together(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    config = config_of(
        toy_checkpoint, toy_data, tmp_path, data={"train_jsonl": str(tmp_path / "none.jsonl")}
    )
    own = {"port": 1, "gpus": [0], "tensor_parallel_size": 2}
    with socket.create_server((LOOPBACK, config_port(config, 0))), refused() as found:
        check_launch(config, gpus("0", "0,1"), own)
    assert [where for where, _ in found] == [
        "--server-config",
        "--server-gpus",
        "--server-gpus",
        f"{SERVERS}[0].base_url",
        str(tmp_path / "none.jsonl"),
    ]
    assert "gpus, port" in found[0][1]
    assert not (tmp_path / "out").exists()


def test_a_token_file_is_for_both_programs(config: Config) -> None:
    with refused() as found:
        check_launch(config, Asked("cpu"), {"token_file": "/run/token"})
    assert found == [("--server-config", "it has token_file, which the learner does not read")]


def config_port(config: Config, index: int) -> int:
    assert config.rollout_matching.vllm.server is not None
    url = config.rollout_matching.vllm.server.servers[index].base_url
    return int(url.rpartition(":")[2])


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"stage2_ab": {"schedule": {"b_ratio": 0.0}}}, "stage2_ab.schedule.b_ratio"),
        ({"rollout_matching": {"rollout_backend": "hf"}}, "rollout_matching.rollout_backend"),
    ],
)
def test_a_run_that_asks_no_server_is_not_launched(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, sections: dict[str, Any], where: str
) -> None:
    config = config_of(toy_checkpoint, toy_data, tmp_path, **sections)
    with refused() as found:
        check_launch(config, gpus("0", "1"), {})
    assert [place for place, _ in found] == [where]


def test_a_colocated_server_is_the_learners_to_start(config: Config) -> None:
    rollout = config.rollout_matching.model_dump() | {"vllm": {"mode": "colocate"}}
    colocated = parse_config(config.model_dump() | {"rollout_matching": rollout})
    with refused() as found:
        check_launch(colocated, gpus("0"), {})
    assert found == [
        ("rollout_matching.vllm.mode", "colocate, and `learner launch` starts servers")
    ]


def test_rounds_too_small_for_the_learner_are_told_before_a_server_starts(config: Config) -> None:
    small = config.model_copy(
        update={
            "rollout_matching": config.rollout_matching.model_copy(update={"decode_batch_size": 1})
        }
    )
    with refused() as found:
        check_launch(small, Asked("cpu", train_processes=4), {})
    assert [where for where, _ in found] == ["rollout_matching.decode_batch_size"]
    check_launch(small, Asked("cpu", train_processes=4), {"replicas": 2})


# --- What is started --------------------------------------------------------------------


def plan_of(config: Config, split: Split, own: dict[str, Any], **environment: str) -> LaunchPlan:
    listen = [
        Listen(f"http://localhost:{config_port(config, i)}", LOOPBACK, config_port(config, i))
        for i in range(2)
    ]
    checked = Checked(split, listen, check_inputs(config), own)
    return plan_launch(Path("run.yaml"), config, checked, environment)


@pytest.mark.req("CFG-09", "FULL-06", "WIRE-04")
def test_servers_are_told_what_the_config_says_their_gpus_and_the_images(
    config: Config, toy_data: ToyData, tmp_path: Path
) -> None:
    own = {"tensor_parallel_size": 2, "allowed_media_dirs": [str(tmp_path)]}
    plan = plan_of(config, Split(((2, 0), (1, 4)), (3,), 1), own)
    plan.write_files()
    for server, ids in zip(plan.servers, [(2, 0), (1, 4)], strict=True):
        told = dict(zip(server.options[::2], server.options[1::2], strict=True))
        settings = load_settings(Path(told["--config"]), {}, Path(told["--run-config"]), {})
        assert (settings.device, settings.gpus, settings.num_replicas) == ("gpu", ids, 1)
        assert settings.model == Path(config.model.model)
        assert settings.dtype == config.model.torch_dtype
        assert settings.max_num_seqs == 4 * 2
        assert settings.max_model_len == 256, "some 90 tokens of a prompt, 16 of an answer"
        images = toy_data.train_jsonl.parent / "images"
        assert set(settings.allowed_media_dirs) == {tmp_path, images / "train", images / "val"}
    assert [server.log.name for server in plan.servers] == ["server-0.log", "server-1.log"]
    assert plan.servers[0].log.parent == config.training.output_dir / "logs"
    assert str(plan.servers[0]) == f"http://localhost:{config_port(config, 0)} on GPU 2,0"


def test_what_is_given_for_the_servers_wins_where_it_may(config: Config) -> None:
    plan = plan_of(config, Split(((), ()), (), 1), {"dtype": "auto", "max_model_len": 99})
    plan.write_files()
    settings = load_settings(Path(plan.servers[0].options[1]), {}, None, {})
    assert (settings.device, settings.dtype, settings.max_model_len) == ("cpu", "auto", 99)


@pytest.mark.parametrize(("own", "grace_s"), [({}, 10.0), ({"grace_seconds": 90}, 90.0)])
def test_a_stop_leaves_a_server_the_grace_that_it_has(
    config: Config, own: dict[str, Any], grace_s: float
) -> None:
    plan = plan_of(config, Split(((), ()), (), 1), own)
    plan.write_files()
    settings = load_settings(Path(plan.servers[0].options[1]), {}, None, {})
    assert settings.grace_seconds == grace_s
    assert [server.grace_s for server in plan.servers] == [grace_s] * 2


def test_a_server_is_killed_after_its_grace_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is waited for ends half a second after SIGTERM."""
    monkeypatch.setattr(server_process, "STOP_MARGIN_S", 0.0)
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\ntrap 'sleep 0.5; exit 7' TERM\necho up\nwhile true; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for grace_s, code in ((0.01, -signal.SIGKILL), (60.0, 7)):
        log = tmp_path / f"log-{code}"
        with ServerProcess([], log, grace_s=grace_s) as server:
            while not log.read_text():
                assert server.code() is None
        assert server.code() == code


def test_each_side_sees_its_own_gpus(config: Config) -> None:
    around = {CUDA_VISIBLE: "0,1,2,3", TOKEN_VARIABLE: "secret", "WORLD_SIZE": "7", "RANK": "1"}
    plan = plan_of(config, Split(((0,), (1,)), (2, 3), 2), {}, **around)
    assert plan.learner_environment[CUDA_VISIBLE] == "2,3"
    assert CUDA_VISIBLE not in plan.server_environment, "they are told their ids"
    for environment in (plan.learner_environment, plan.server_environment):
        assert environment[TOKEN_VARIABLE] == "secret"
        assert not {"WORLD_SIZE", "RANK"} & environment.keys()
    assert plan.processes == 2
    program, *words = plan.learner
    assert (Path(program).name, words) == (
        "learner",
        ["train", "--config", str(Path("run.yaml").absolute())],
    )


def test_on_the_cpu_the_learner_sees_no_gpu(config: Config) -> None:
    plan = plan_of(config, Split(((), ()), (), 1), {}, **{CUDA_VISIBLE: "0"})
    assert plan.learner_environment[CUDA_VISIBLE] == ""
    assert plan.learner_environment["OMP_NUM_THREADS"] == str(os.cpu_count())
    assert str(plan.servers[1]).endswith("on the CPU")


@pytest.mark.req("RUN-01")
def test_what_a_launch_writes_does_not_make_a_new_folder_a_used_one(config: Config) -> None:
    plan = plan_of(config, Split(((), ()), (), 1), {})
    plan.write_files()
    plan.servers[0].log.write_text("a start that failed")
    assert check_inputs(config).start.step == 0


def test_a_run_folder_that_cannot_be_written_is_told(config: Config) -> None:
    plan = plan_of(config, Split(((), ()), (), 1), {})
    config.training.output_dir.write_text("a file")
    with refused() as found:
        replace(plan).write_files()
    assert [where for where, _ in found] == ["training.output_dir"]


# --- The command ------------------------------------------------------------------------


def test_mistakes_end_the_command_with_2_and_nothing_heavy(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_mapping(config.model_dump()))
    options = ["--device", "cpu", "--server-gpus", "0", "--train-processes", "0"]
    ended = command("learner.cli", "launch", "--config", str(file), *options)
    assert ended.code == 2
    assert ended.stderr.count("error: ") == 2
    assert "error: --server-gpus\n  found: 0, and --device is cpu\n  do: " in ended.stderr
    assert not ended.heavy & {"torch", "vllm", "transformers"}
    assert not config.training.output_dir.exists()
