"""A rollout server on a host of its own, and what is asked of it there."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.contract.running_server import CPU, START_TIMEOUT_S
from tests.integration.two_hosts import Host

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


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
