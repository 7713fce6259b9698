"""What CI installs of the system: scripts/system_packages, on a machine of stand-ins."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.deployment import ROOT

TOOLS = ("bash", "env", "mktemp", "rm", "tail")
APT_GET = 'echo "apt-get $*" >>"$APT_LOG"; [[ $1 != "$APT_FAILS" ]] || { echo broken; exit 100; }'


def machine(folder: Path, *programs: str, uid: int = 0, apt: bool = True) -> dict[str, str]:
    """A PATH that has `programs`, and the environment that goes with it."""
    scripts = {"id": f"echo {uid}", **dict.fromkeys(programs, "")}
    scripts |= {"apt-get": APT_GET} if apt else {}
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "APT_LOG": str(folder / "log"), "APT_FAILS": "nothing"}


def install(environment: dict[str, str]) -> tuple[int, str, list[str]]:
    """Exit code, standard error, and the calls of apt-get."""
    script = ROOT / "scripts" / "system_packages"
    done = subprocess.run([script], env=environment, capture_output=True, text=True)
    log = Path(environment["APT_LOG"])
    calls = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    assert done.stdout == ""
    return done.returncode, done.stderr, calls


def test_where_nothing_is_absent_nothing_is_asked(tmp_path: Path) -> None:
    assert install(machine(tmp_path, "chromium", "systemd-analyze", uid=1000)) == (0, "", [])


def test_what_is_absent_is_installed_and_nothing_else(tmp_path: Path) -> None:
    code, told, calls = install(machine(tmp_path, "systemd-analyze"))
    assert (code, told) == (0, "system packages: installing chromium\n")
    assert calls == ["apt-get update", "apt-get install -y --no-install-recommends chromium"]


def test_who_is_not_root_is_told_what_to_install(tmp_path: Path) -> None:
    code, told, calls = install(machine(tmp_path, "chromium", uid=1000))
    assert (code, calls) == (2, [])
    assert "systemd is absent: only root can install it" in told


def test_without_apt_get_the_package_is_named(tmp_path: Path) -> None:
    code, told, _ = install(machine(tmp_path, "systemd-analyze", apt=False))
    assert (code, "chromium is absent: there is no apt-get" in told) == (2, True)


@pytest.mark.parametrize("step", ["update", "install"])
def test_an_installation_that_fails_is_told_with_its_log(tmp_path: Path, step: str) -> None:
    code, told, _ = install(machine(tmp_path) | {"APT_FAILS": step})
    assert code == 2
    assert "broken\n" in told
    assert "apt-get could not install it" in told


def test_ci_says_that_it_is_ci_and_installs_before_it_tests(tmp_path: Path) -> None:
    """The script itself, in a checkout whose parts only note what they are told."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    note = 'import os, sys; print(os.environ["CI"], *sys.argv[1:], flush=True)\n'
    (tmp_path / "scripts" / "leaves_no_process").write_text(note)
    for given, said in ((None, "true"), ("1", "1")):
        environment = {key: value for key, value in os.environ.items() if key != "CI"}
        environment |= {} if given is None else {"CI": given}
        run = subprocess.run(
            ["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True
        )
        first, second = run.stdout.splitlines()
        for line, bounded in (
            (first, "300 scripts/system_packages"),
            (second, r"(4800|47\d\d) make --keep-going check"),
        ):
            assert re.fullmatch(rf"{said} timeout --verbose .*--kill-after=30 {bounded}", line)
