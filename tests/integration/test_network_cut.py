"""The network between a learner and its server is cut: nothing hangs, and nothing is lost.

Two network namespaces with a cable are the two hosts; packets are lost without a word.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running_server import CPU, START_TIMEOUT_S
from tests.integration.two_hosts import Host, NotAllowed, two_hosts

ROOT = Path(__file__).resolve().parents[2]
PORT, GROUP_PORT = 8000, 8001
TOKEN = "a-token-for-two-hosts"
# Runs on the server's own host: status and body of a GET.
LOOK = """
import json, sys, urllib.error, urllib.request
url, token = sys.argv[1:]
asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
try:
    answer = urllib.request.urlopen(asked, timeout=5)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    print(json.dumps([0, ""]))
    sys.exit()
print(json.dumps([answer.status, answer.read().decode()]))
"""


class FarServer:
    """A rollout server on its host, looked at from there."""

    def __init__(self, host: Host, checkpoint: Path, folder: Path) -> None:
        self.url = f"http://{host.address}:{PORT}"
        self.log = folder / "server.log"
        self._host = host
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "rollout_server", "serve", "--model", str(checkpoint)]
        where = ["--host", host.address, "--port", str(PORT), "--token-file", str(token)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*host.enter, *command, *CPU, *where, "--max-model-len", "512"],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def look(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 when nobody answers."""
        command = [*self._host.enter, sys.executable, "-c", LOOK, self.url + path, TOKEN]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        status, body = json.loads(said)
        return status, body

    def wait_for(self, status: int) -> Any:
        """The body of `/health/` once its status is `status`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found, body = self.look("/health/")
            if found == status:
                return json.loads(body)
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-2000:])

    def wait_until_it_decodes(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in self.look("/metrics/")[1].splitlines():
                if line.startswith("rollout_running_sequences{") and float(line.split()[-1]):
                    return
        raise AssertionError(self.look("/metrics/"))


class FarLearner:
    """The process of `far_learner.py` on its host."""

    def __init__(self, host: Host, server: FarServer, checkpoint: Path) -> None:
        command = [sys.executable, "-m", "tests.integration.far_learner"]
        self.process = subprocess.Popen(
            [*host.enter, *command, server.url, str(GROUP_PORT), str(checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"ROLLOUT_SERVER_TOKEN": TOKEN},
        )

    def tell(self, wanted: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(wanted + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the learner ended; its error is above"
        said: dict[str, Any] = json.loads(line)
        return said

    def do(self, wanted: str) -> dict[str, Any]:
        self.tell(wanted)
        return self.hear()


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07", "DIST-05", "CFG-06")
def test_a_cut_cable_is_noticed_by_both_sides_and_all_is_made_good(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    try:
        with two_hosts() as (here, there):
            server = FarServer(here, tied, tmp_path)
            with ended(server.process):
                server.wait_for(200)
                learner = FarLearner(there, server, other_tied)
                with ended(learner.process):
                    play(here, server, learner)
    except NotAllowed as reason:
        pytest.skip(str(reason))


def play(here: Host, server: FarServer, learner: FarLearner) -> None:
    """A blocked group port, then an undisturbed push, one that is cut, a rollout that is cut."""
    here.block(GROUP_PORT)
    refused = learner.do("connect")["error"]
    assert f"({server.url}) in phase rendezvous: " in refused
    assert f"{here.address}:{GROUP_PORT}" in refused
    here.unblock(GROUP_PORT)
    assert learner.do("connect") == {"connected": 0}

    assert learner.do("push") == {"pushed": 1}
    undisturbed = learner.do("ask")

    assert learner.do("push half") == {"half": True}
    here.cut()
    learner.tell("go on")
    assert server.wait_for(503)["type"] == "urn:rollmatch:weights-poisoned"
    reason = learner.hear()["lost"]
    assert "weight sync failed at the " in reason
    assert f"({server.url}) in phase transfer" in reason
    here.mend()
    assert learner.hear() == {"pushed": 2}
    assert server.wait_for(200)["weights_version"] == 2
    assert learner.do("ask") == undisturbed

    learner.tell("ask")
    server.wait_until_it_decodes()
    here.cut()
    assert "the server is gone: GET /live/ failed" in learner.hear()["failed"]
    here.mend()
    assert learner.hear() == undisturbed
