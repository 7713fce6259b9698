"""Two network namespaces with a cable between them: two hosts, as far as a socket can tell.

A namespace is held by a process that sleeps; programs enter it with `nsenter`. Everything
happens in a user namespace of its own, so no rights are needed where those may be made.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip")
SERVER_ADDRESS = "10.77.0.1"
LEARNER_ADDRESS = "10.77.0.2"
_CABLE = ("cable0", "cable1")


class NotAllowed(Exception):
    """This machine lets nobody make namespaces, or lacks the tools."""


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
        """Take this end of the cable down: packets are lost without a word to either side."""
        self.run("ip", "link", "set", self.end, "down")

    def mend(self) -> None:
        self.run("ip", "link", "set", self.end, "up")

    def block(self, port: int) -> None:
        """Lose what a TCP port of this host sends to others, as a firewall would."""
        self._rule("add", port)

    def unblock(self, port: int) -> None:
        self._rule("del", port)

    def _rule(self, what: str, port: int) -> None:
        self.run("ip", "rule", what, "ipproto", "tcp", "sport", str(port), "blackhole")


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
