"""`learner doctor` against a real server: a working set-up, and each fault of one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import free_ports
from tests.contract.running_server import RunningServer, response_ids, text_request
from tests.unit.small_run import small_mapping

TOKEN = "correct-horse"

Found = dict[str, dict[str, Any]]

pytestmark = [pytest.mark.slow, pytest.mark.req("DEP-03")]


@dataclass(frozen=True)
class Doctor:
    """A working set-up with the shared server, and runs of the command on it."""

    server: RunningServer
    checkpoint: Path
    data: ToyData
    folder: Path

    def config(self, url: str = "", data: ToyData | None = None) -> Path:
        """url: of the server, by default the shared one."""
        (port,) = free_ports(1)
        servers = [{"base_url": url or self.server.process.base_url, "group_port": port}]
        rollout = {
            "decode_batch_size": 4,
            "max_new_tokens": 24,
            "vllm": {"mode": "server", "server": {"servers": servers, "timeout_s": 60}},
        }
        mapping = small_mapping(
            self.checkpoint,
            data or self.data,
            self.folder / "run",
            stage2_ab={"schedule": {"b_ratio": 0.5}},
            rollout_matching=rollout,
        )
        file = self.folder / "run.yaml"
        file.write_text(dump_mapping(mapping))
        return file

    def run(self, config: Path, exit_code: int, *options: str) -> Found:
        """Findings by check."""
        words = ["doctor", "--config", str(config), "--json", *options]
        result = CliRunner().invoke(app, words)
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
    """The server has the same owner, weights and answers before and after."""

    def state() -> tuple[Any, list[int]]:
        info = server.http.get("/info/").json()
        answer = response_ids(server.infer([text_request()])[0])
        return [info[key] for key in ("owner", "weights_state", "weights_version")], answer

    before = state()
    yield Doctor(server, tied, data_for(server), tmp_path)
    assert state() == before


def data_for(server: RunningServer) -> ToyData:
    data = ToyData.under(server.media / "doctor")
    if not data.train_jsonl.exists():
        make_data(server.media / "doctor", train=8, val=2, seed=0)
    return data


def test_working_set_up_is_ok_in_every_check(doctor: Doctor) -> None:
    owner = doctor.server.http.get("/info/").json()["owner"]
    found = doctor.run(doctor.config(), exit_code=0)
    doubtful = {"coordinate rows"}  # the checkpoint has random weights
    if owner is not None:  # another test has left the server so
        doubtful |= {"owner"}
    assert statuses(found) == {"ok": set(found) - doubtful, "warn": doubtful}
    assert found["media"]["found"] == "2 image(s) of 2 samples were read"
    assert found["prompt"]["found"] == "2 prompts agree"
    assert "the parser finds" in found["rollout"]["found"]


@pytest.mark.req("SYNC-06")
def test_push_comes_last_and_the_answers_are_those_of_the_checkpoint(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    version = server.http.get("/info/").json()["weights_version"]
    doctor = Doctor(server, tied, data_for(server), tmp_path)
    found = doctor.run(doctor.config(), 0, "--push")
    assert list(found)[-1] == "push"
    assert "over gloo to 1 worker(s) of " in found["push"]["found"]
    assert found["push"]["found"].endswith(f"; weights {version + 1}")
    info = server.http.get("/info/").json()
    assert (info["owner"], info["weights_version"]) == (None, version + 1)


def test_unreadable_images_are_named_with_the_remedy(doctor: Doctor, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    data = make_data(outside, train=8, val=2, seed=1)
    found = doctor.run(doctor.config(data=data), exit_code=1)
    assert statuses(found)["fail"] == {"media"}
    assert statuses(found)["skipped"] == {"prompt", "rollout"}
    assert found["media"]["found"].startswith(f"the server cannot read {outside}/")
    image = Path(found["media"]["found"].split()[4].rstrip(":"))
    assert f"Start the server with --allowed-media-dir {image.parent}, " in found["media"]["do"]
