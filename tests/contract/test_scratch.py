"""What a server leaves to its engines and on the disk (SRV-06)."""

import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

from shared_contracts.server_info import TOKEN_VARIABLE
from tests.contract.running_server import running_server

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-engines-need-not-know"


@pytest.mark.req("SRV-06", "SRV-08")
def test_engines_know_no_token_and_nothing_temporary_is_left_after_a_kill(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    # Of its own, since engines of other tests leave theirs; short, since it holds sockets.
    temporary = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_server(tied, tmp_path / "server") as server:
        _, engine = server.processes().values()
        environment = dict(
            entry.split("=", 1)
            for entry in Path(f"/proc/{engine}/environ").read_text().split("\0")
            if "=" in entry
        )
        assert TOKEN_VARIABLE not in environment
        assert TOKEN not in environment.values()
        scratch = Path(environment["TMPDIR"])
        assert scratch.is_relative_to(temporary)
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        assert list(scratch.iterdir())
        assert server.http.get("/info/").status_code == 401
        os.kill(server.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while scratch.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert list(temporary.glob("vllm_dist_*")) == []
    shutil.rmtree(temporary)
