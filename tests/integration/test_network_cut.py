"""The network between a learner and its server is cut: nothing hangs, and nothing is lost.

Two network namespaces with a cable are the two hosts; packets are lost without a word.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Far
from tests.integration.far_server import GROUP_PORT, TOKEN, FarServer, ended
from tests.integration.two_hosts import Host

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07", "DIST-05", "CFG-06")
def test_a_cut_cable_is_noticed_by_both_sides_and_all_is_made_good(
    far: Far, other_tied: Path
) -> None:
    learner = FarLearner(far.there, far.server, other_tied)
    with ended(learner.process):
        play(far.here, far.server, learner)


def play(here: Host, server: FarServer, learner: FarLearner) -> None:
    """A blocked group port, then an undisturbed push, one that is cut, a rollout that is cut."""
    here.block(GROUP_PORT)
    refused = learner.do("connect")["error"]
    assert f"({server.url}) in phase rendezvous: " in refused
    assert f"{here.address}:{GROUP_PORT}" in refused
    here.unblock(GROUP_PORT)
    version = learner.do("connect")["connected"]

    assert learner.do("push") == {"pushed": version + 1}
    undisturbed = learner.do("ask")

    assert learner.do("push half") == {"half": True}
    here.cut()
    learner.tell("go on")
    assert server.wait_for(503)["type"] == "urn:rollmatch:weights-poisoned"
    reason = learner.hear()["lost"]
    assert "weight sync failed at the " in reason
    assert f"({server.url}) in phase transfer" in reason
    here.mend()
    assert learner.hear() == {"pushed": version + 2}
    assert server.wait_for(200)["weights_version"] == version + 2
    assert learner.do("ask") == undisturbed

    learner.tell("ask")
    server.wait_until_it_decodes()
    here.cut()
    assert "the server is gone: GET /live/ failed" in learner.hear()["failed"]
    here.mend()
    assert learner.hear() == undisturbed
