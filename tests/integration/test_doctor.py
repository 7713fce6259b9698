"""`learner doctor` against a real server: a set-up that holds, and each way in which it may not."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from rollout_server.http.middleware import BearerToken
from shared_contracts.errors import ContractErrors
from shared_contracts.server_info import TOKEN_VARIABLE
from shared_contracts.weights import CommunicatorReady
from tests.contract.running_server import RunningServer, response_ids, text_request
from tests.contract.weight_sender import weight_group
from tests.unit.small_run import small_mapping

TOKEN = "correct-horse"

Found = dict[str, dict[str, Any]]

pytestmark = pytest.mark.req("DEP-03")


@dataclass(frozen=True)
class Doctor:
    """A set-up that holds with the shared server, and runs of the command on it."""

    server: RunningServer
    checkpoint: Path
    data: ToyData
    folder: Path

    def config(
        self, *urls: str, checkpoint: Path | None = None, data: ToyData | None = None
    ) -> Path:
        """urls: of the servers, by default the shared one."""
        urls = urls or (self.server.process.base_url,)
        ports = free_ports(len(urls))
        servers = [{"base_url": u, "group_port": p} for u, p in zip(urls, ports, strict=True)]
        rollout = {
            "decode_batch_size": 4,
            "max_new_tokens": 24,
            "vllm": {"mode": "server", "server": {"servers": servers, "timeout_s": 60}},
        }
        mapping = small_mapping(
            checkpoint or self.checkpoint,
            data or self.data,
            self.folder / "run",
            stage2_ab={"schedule": {"b_ratio": 0.5}},
            rollout_matching=rollout,
        )
        file = self.folder / "run.yaml"
        file.write_text(dump_mapping(mapping))
        return file

    def run(self, config: Path, exit_code: int, *options: str, token: str = "") -> Found:
        """Findings by check, those of the last server where there are several."""
        environment = {TOKEN_VARIABLE: token or None}
        result = CliRunner().invoke(
            app, ["doctor", "--config", str(config), "--json", *options], env=environment
        )
        assert result.exit_code == exit_code, result.output
        document = json.loads(result.stdout)
        assert document["failed"] == (exit_code == 1)
        return {finding["check"]: finding for finding in document["findings"]}


def statuses(found: Found) -> dict[str, set[str]]:
    """Checks by their status."""
    every = {finding["status"] for finding in found.values()}
    return {s: {check for check, f in found.items() if f["status"] == s} for s in every}


@pytest.fixture
def doctor(server: RunningServer, tied: Path, tmp_path: Path) -> Iterator[Doctor]:
    """The server has the same weights, version and answers before and after.

    What tests before this one left of a weight group is closed: the doctor keeps away from it.
    """

    def state() -> tuple[Any, list[int]]:
        health = server.http.get("/health/").json()
        answer = response_ids(server.infer([text_request()])[0])
        return (health["state"], health["weights_version"]), answer

    assert server.http.post("/close_communicator/", json={"attempt": None}).status_code == 200
    before = state()
    yield Doctor(server, tied, data_for(server), tmp_path)
    assert state() == before


def data_for(server: RunningServer) -> ToyData:
    data = ToyData.under(server.media / "doctor")
    if not data.train_jsonl.exists():
        make_data(server.media / "doctor", train=8, val=2, seed=0)
    return data


def test_a_set_up_that_holds_is_ok_from_end_to_end(doctor: Doctor) -> None:
    found = doctor.run(doctor.config(), exit_code=0)
    untrained = {"coordinate rows"}  # the checkpoint has random weights
    assert statuses(found) == {"ok": set(found) - untrained, "warn": untrained}
    assert "1 worker(s) and the learner met over gloo" in found["rendezvous"]["found"]
    assert "went to 1 worker(s) and is what they hold" in found["one tensor"]["found"]
    assert found["media"]["found"] == "4 image(s) of 4 samples were read"
    assert found["prompt"]["found"].startswith("4 prompts of ")
    assert "the parser finds" in found["rollout"]["found"]
    assert doctor.server.http.get("/info/").json()["weight_group"] is None


@pytest.mark.req("SYNC-06")
def test_a_probe_comes_last_and_pushes_the_checkpoint(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    version = server.http.get("/info/").json()["weights_version"]
    doctor = Doctor(server, tied, data_for(server), tmp_path)
    found = doctor.run(doctor.config(), 0, "--probe")
    assert list(found)[-2:] == ["probe text", "probe image"]
    assert "as the learner" in found["probe text"]["found"]
    assert "as the learner" in found["probe image"]["found"]
    assert server.http.get("/info/").json()["weights_version"] > version


def test_a_server_that_is_not_there_keeps_nobody_from_looking_at_the_next(doctor: Doctor) -> None:
    (nobody,) = free_ports(1)
    config = doctor.config(f"http://127.0.0.1:{nobody}", doctor.server.process.base_url)
    result = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert result.exit_code == 1
    shown = " ".join(re.split(r"[│\s]+", result.stdout))
    assert "-> Start the server with `rollout-server serve`" in shown
    found = doctor.run(config, 1, "--probe")
    assert (found["probe"]["status"], found["servers together"]["status"]) == ("skipped", "skipped")
    assert {found[check]["status"] for check in ("http", "one tensor", "rollout")} == {"ok"}


def test_images_the_server_may_not_read_are_named_with_the_remedy(
    doctor: Doctor, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    data = make_data(outside, train=8, val=2, seed=1)
    found = doctor.run(doctor.config(data=data), exit_code=1)
    assert statuses(found)["fail"] == {"media"}
    assert statuses(found)["skipped"] == {"prompt", "rollout"}
    assert found["media"]["found"].startswith(f"the server cannot read {outside}/")
    assert "(nor 3 more there)" in found["media"]["found"]
    image = Path(found["media"]["found"].split()[4])
    assert f"Start the server with --allowed-media-dir {image.parent}, " in found["media"]["do"]


def test_a_tokenizer_that_differs_is_found_and_rollouts_are_tried_all_the_same(
    doctor: Doctor, tied: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tied, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = doctor.run(doctor.config(checkpoint=other), exit_code=1)
    assert statuses(found)["fail"] == {"prompt"}
    assert "the server" in found["prompt"]["found"]
    assert "tokenizer, chat template" in found["prompt"]["do"]
    assert found["rollout"]["status"] == "ok"


def test_another_checkpoint_of_the_same_shape_is_told_and_not_loaded(
    doctor: Doctor, other_tied: Path
) -> None:
    version = doctor.server.http.get("/info/").json()["weights_version"]
    found = doctor.run(doctor.config(checkpoint=other_tied), exit_code=0)
    assert found["one tensor"]["status"] == ("skipped" if version else "warn")
    assert found["rendezvous"]["status"] == "ok"
    assert doctor.server.http.get("/info/").json()["weight_group"] is None


def test_the_group_of_a_run_is_left_alone(doctor: Doctor) -> None:
    (port,) = free_ports(1)
    with weight_group(doctor.server.http, port):
        found = doctor.run(doctor.config(), exit_code=0)
        assert statuses(found)["skipped"] == {"group port", "rendezvous", "one tensor"}
        assert f"127.0.0.1:{port}" in found["rendezvous"]["found"]
        group = doctor.server.http.get("/info/").json()["weight_group"]
        assert group == f"127.0.0.1:{port}"
    doctor.server.http.post("/close_communicator/", json={"attempt": None})


def test_a_learner_that_comes_in_the_middle_keeps_its_group(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor has asked whether a group stands, and has not yet connected."""
    (port,) = free_ports(1)
    connect = WeightPusher.connect
    with ExitStack() as until_the_end:

        def late(pusher: WeightPusher, only_if_free: bool = False) -> CommunicatorReady:
            until_the_end.enter_context(weight_group(doctor.server.http, port))
            return connect(pusher, only_if_free)

        monkeypatch.setattr(WeightPusher, "connect", late)
        found = doctor.run(doctor.config(), exit_code=0)
        assert statuses(found)["skipped"] == {"rendezvous", "one tensor"}
        assert "a run has come to push" in found["rendezvous"]["found"]
        group = doctor.server.http.get("/info/").json()["weight_group"]
        assert group == f"127.0.0.1:{port}"
    doctor.server.http.post("/close_communicator/", json={"attempt": None})


def test_a_group_port_that_is_taken_is_told_with_its_holder(doctor: Doctor) -> None:
    config = doctor.config()
    with socket.socket() as held:
        held.bind(("127.0.0.1", int(config.read_text().split("group_port: ")[1].split()[0])))
        held.listen()
        found = doctor.run(config, exit_code=1)
    assert statuses(found)["fail"] == {"group port"}
    assert "(pid " in found["group port"]["found"]
    assert statuses(found)["skipped"] == {"rendezvous", "one tensor"}


@pytest.fixture
def guarded(server: RunningServer) -> Iterator[str]:
    """The shared server's own address behind the token it would want with `--token-file`."""

    async def forward(request: Request) -> Response:
        url = f"{server.process.base_url}{request.url.path}"
        content = await request.body()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answer = await http.request(request.method, url, content=content, headers=_JSON)
        return Response(answer.content, answer.status_code, media_type="application/json")

    routes = [Route("/{path:path}", forward, methods=["GET", "POST"])]
    inner = BearerToken(Starlette(routes=routes), SecretStr(TOKEN))
    (port,) = free_ports(1)
    door = uvicorn.Server(uvicorn.Config(inner, port=port, log_level="warning"))
    thread = threading.Thread(target=door.run)
    thread.start()
    while not door.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    door.should_exit = True
    thread.join()


_JSON = {"content-type": "application/json"}


@pytest.mark.req("SRV-06")
def test_a_token_is_missing_wrong_right_or_not_wanted(doctor: Doctor, guarded: str) -> None:
    config = doctor.config(guarded)
    missing = doctor.run(config, exit_code=1)
    assert "the learner has none" in missing["token"]["found"]
    assert missing["media"]["found"] == "waits for token"
    wrong = doctor.run(config, exit_code=1, token="battery-staple")
    assert f"refuses the token of {TOKEN_VARIABLE}" in wrong["token"]["found"]
    right = doctor.run(config, exit_code=0, token=TOKEN)
    assert right["token"]["found"] == "accepted"
    assert right["one tensor"]["status"] == "ok"
    unwanted = doctor.run(doctor.config(), exit_code=0, token=TOKEN)
    assert statuses(unwanted)["warn"] == {"token", "coordinate rows"}


def test_a_config_that_is_wrong_ends_before_anything_is_looked_at(doctor: Doctor) -> None:
    config = doctor.config()
    config.write_text(config.read_text().replace("max_new_tokens", "max_new_toknes"))
    result = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert isinstance(result.exception, ContractErrors)
    assert "max_new_tokens" in str(result.exception)
    assert result.stdout == ""
