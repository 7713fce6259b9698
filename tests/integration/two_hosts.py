"""Two network namespaces with a cable between them stand for two hosts; a server runs on one.

A sleeping process holds each namespace; programs enter it with `nsenter`. All is in a user
namespace, which needs no rights where those are allowed.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.running_server import CPU, START_TIMEOUT_S

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
        """Without a limit: the timeout of the test is one."""
        while True:
            for line in self.get("/metrics/")[1].splitlines():
                if line.startswith("rollout_running_sequences{") and float(line.split()[-1]):
                    return


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
