"""Runs over two hosts: the server on one, learner processes on the other or on both.

Every process has its own address. Weights, rollouts and gradients cross the cable, which is cut.

Two network namespaces stand for the hosts. A sleeping process holds each; programs enter it with
`nsenter`. All is in a user namespace, which needs no rights where those are allowed.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.data.toy import make_data
from learner.runs.run_folder import METRICS
from tests.contract.running_server import CPU, START_TIMEOUT_S
from tests.integration.runs import write_config
from tests.unit.small_run import metric_lines

TOOLS = ("unshare", "nsenter", "ip")
SERVER_ADDRESS = "10.77.0.1"
LEARNER_ADDRESS = "10.77.0.2"
_CABLE = ("cable0", "cable1")


class NotAllowed(Exception):
    """This machine allows no namespaces, or lacks the tools."""


@dataclass(frozen=True)
class Host:
    """pid: of the process that holds the namespace open."""

    pid: int
    address: str
    end: str

    @property
    def enter(self) -> list[str]:
        """The command that runs another one on this host."""
        return ["nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials"]

    def run(self, *command: str) -> None:
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotAllowed(f"{' '.join(command)}: {done.stderr.strip()}")

    def cut(self) -> None:
        """Take this end of the cable down: packets are lost silently."""
        self.run("ip", "link", "set", self.end, "down")

    def mend(self) -> None:
        self.run("ip", "link", "set", self.end, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """(the server's host, the learner's host), connected. Raises NotAllowed."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotAllowed(f"there is no {', '.join(missing)} here")
    with _held(["unshare", "--user", "--map-root-user", "--net"]) as first:
        server = Host(first, SERVER_ADDRESS, _CABLE[0])
        with _held([*server.enter, "unshare", "--net"]) as second:
            learner = Host(second, LEARNER_ADDRESS, _CABLE[1])
            _connect(server, learner)
            yield server, learner


@contextmanager
def _held(namespace: list[str]) -> Iterator[int]:
    """Id of a process that sleeps in a new namespace."""
    process = subprocess.Popen([*namespace, "sleep", "infinity"], stderr=subprocess.PIPE)
    try:
        _wait_for_sleep(process)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _wait_for_sleep(process: "subprocess.Popen[bytes]") -> None:
    """Until the chain of programs has become `sleep`, within its namespaces."""
    name = Path(f"/proc/{process.pid}/comm")
    while process.poll() is None:
        with suppress(OSError):
            if name.read_text().strip() == "sleep":
                return
        time.sleep(0.01)
    assert process.stderr is not None
    raise NotAllowed(process.stderr.read().decode(errors="replace").strip())


def _connect(server: Host, learner: Host) -> None:
    server.run("ip", "link", "add", server.end, "type", "veth", "peer", "name", learner.end)
    server.run("ip", "link", "set", learner.end, "netns", str(learner.pid))
    for host in (server, learner):
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", host.end)
        host.run("ip", "link", "set", host.end, "up")
        host.run("ip", "link", "set", "lo", "up")


PORT, GROUP_PORT = 8000, 8001
TOKEN = "a-token-for-two-hosts"
# Runs on the host of the server; prints status and body of a GET.
GET = """
import json, sys, urllib.error, urllib.request
url, token = sys.argv[1:]
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
try:
    answer = urllib.request.urlopen(request, timeout=5)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    print(json.dumps([0, ""]))
    sys.exit()
print(json.dumps([answer.status, answer.read().decode()]))
"""


class FarServer:
    """A rollout server on its host. Requests to it are made there, too."""

    def __init__(self, host: Host, checkpoint: Path, folder: Path) -> None:
        self.url = f"http://{host.address}:{PORT}"
        self.log = folder / "server.log"
        self._host = host
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "rollout_server", "serve", "--model", str(checkpoint)]
        self.media = folder / "media"
        self.media.mkdir()
        media = ["--allowed-media-dir", str(self.media)]
        where = ["--host", host.address, "--port", str(PORT), "--token-file", str(token)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*host.enter, *command, *CPU, *where, "--max-model-len", "512", *media],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; status 0 without an answer."""
        command = [*self._host.enter, sys.executable, "-c", GET, self.url + path, TOKEN]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        status, body = json.loads(printed)
        return status, body

    def wait_for(self, status: int) -> Any:
        """The body of `/health/` once its status is `status`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found, body = self.get("/health/")
            if found == status:
                return json.loads(body)
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-2000:])

    def wait_until_it_decodes(self) -> None:
        """Wait; the time limit of the test is the only one."""
        while True:
            for line in self.get("/metrics/")[1].splitlines():
                if line.startswith("rollout_running_sequences{") and float(line.split()[-1]):
                    return


pytestmark = [pytest.mark.nightly]

RENDEZVOUS_PORT = 29_500
STEPS = 4


@dataclass(frozen=True)
class Far:
    """A healthy rollout server on the host `here`. `there` reaches it by a cable."""

    server: FarServer
    here: Host
    there: Host
    checkpoint: Path


@pytest.fixture(scope="module")
def far(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    """Skips where network namespaces are not allowed.

    A test leaves the cable whole and the server READY.
    """
    try:
        with two_hosts() as (here, there):
            server = FarServer(here, tied, tmp_path_factory.mktemp("far"))
            try:
                server.wait_for(200)
                yield Far(server, here, there, tied)
            finally:
                server.process.terminate()
                server.process.wait(60)
    except NotAllowed as reason:
        pytest.skip(str(reason))


def torchrun(
    host: Host, node: int, master: Host, config: Path, log: Path
) -> "subprocess.Popen[bytes]":
    """One learner process on `host`, as docs/operations.md has a node start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    meet = [f"--master-addr={master.address}", f"--master-port={RENDEZVOUS_PORT}"]
    learner = ["--nproc-per-node=1", "--no-python", str(Path(sys.executable).parent / "learner")]
    own = {"ROLLOUT_SERVER_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": host.end, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*host.enter, *launch, *meet, *learner, "train", "--config", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | own,
        )


@pytest.mark.req("SYNC-07", "SYNC-08", "DDP-02", "SYNC-09", "DIST-05", "CFG-06")
def test_a_run_over_two_hosts_recovers_when_the_cable_is_cut_during_a_rollout(
    far: Far, tmp_path: Path
) -> None:
    """Both processes are on the other host: a cut between them would end the run (DDP-01)."""
    run_nodes(far, (far.there, far.there), tmp_path, cut=True)
    calls = (tmp_path / "run" / "rollout_calls.jsonl").read_text()
    assert "the server is gone" in calls
    check_run(far, tmp_path / "run")


@pytest.mark.req("SYNC-08", "DDP-02", "SYNC-09")
def test_a_run_over_two_hosts_trains_rolls_out_and_pushes(far: Far, tmp_path: Path) -> None:
    run_nodes(far, (far.there, far.here), tmp_path)
    check_run(far, tmp_path / "run")
    calls = [tmp_path / "run" / f"rollout_calls{rank}.jsonl" for rank in ("", ".rank1")]
    logged = [[json.loads(line) for line in file.read_text().splitlines()] for file in calls]
    for rank in logged:
        assert [sum(call["count"] for call in step["calls"]) for step in rank] == [2, 2]
    assert [len(step["pushes"]) for step in logged[0]] == [1, 1]
    assert [len(step["pushes"]) for step in logged[1]] == [0, 0]


def run_nodes(far: Far, hosts: tuple[Host, Host], folder: Path, *, cut: bool = False) -> None:
    """A run with a process on each of `hosts`. cut: the cable, in the rollouts of the last step."""
    address = {"base_url": far.server.url, "group_port": GROUP_PORT}
    config = write_config(
        far.checkpoint,
        make_data(far.server.media / folder.name, train=24, val=4, seed=0),
        folder,
        training={"max_steps": STEPS, "save_steps": STEPS},
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"vllm": {"server": {"servers": [address]}}},
    )
    logs = [folder / f"node{node}.log" for node in range(len(hosts))]
    nodes = [
        torchrun(host, node, hosts[0], config, log)
        for node, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    try:
        if cut:

            def wait_for(times: int, text: str, files: list[Path]) -> None:
                while "".join(f.read_text() for f in files if f.exists()).count(text) < times:
                    assert all(node.poll() is None for node in nodes), logs[0].read_text()
                    time.sleep(0.05)

            # Checks before the run, and the proof of the first push, decode too.
            wait_for(STEPS - 1, '"loss"', [folder / "run" / METRICS])
            far.server.wait_until_it_decodes()
            far.here.cut()
            wait_for(1, "is lost", logs)
            far.here.mend()
        codes = [node.wait(300) for node in nodes]
    finally:
        far.here.mend()
        for node in nodes:
            node.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def check_run(far: Far, run: Path) -> None:
    steps = metric_lines(run, "loss")
    assert [line["step/channel_b"] for line in steps] == [0, 1, 0, 1]
    first, second = (line["sync/weights_version"] for line in steps if line["step/channel_b"])
    assert second == first + 1
    assert far.server.wait_for(200)["weights_version"] == second
