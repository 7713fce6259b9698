"""scripts/leaves_no_process: real processes, among them ones that hide."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "leaves_no_process"


def run_guarded(shell: str, grace_s: float = 0.2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--grace", str(grace_s), "bash", "-c", shell],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_clean_command_is_kept(status: int) -> None:
    done = run_guarded(f"echo out; exit {status}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "out\n", "")


def test_a_daemon_with_children_of_its_own_is_named_and_ended() -> None:
    done = run_guarded("setsid env -i bash -c 'sleep 297 & sleep 298; :' >/dev/null 2>&1 & disown")
    assert done.returncode == 70
    assert "sleep 297" in done.stderr
    assert "sleep 298" in done.stderr
    pids = [line.split()[2] for line in done.stderr.splitlines() if line.startswith("left behind")]
    assert len(pids) == 3
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_a_process_that_ends_within_the_grace_is_no_leftover() -> None:
    done = run_guarded("sleep 0.3 & exit 0", grace_s=20)
    assert done.returncode == 0
