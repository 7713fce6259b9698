"""deploy/systemd: systemd takes the units, the programs take their commands (DEP-01)."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rollout_server.serve import ANSWERS_S
from tests.unit.deployment import DEPLOY, ROOT, command_fault, parsed, seconds

SYSTEMD = DEPLOY / "systemd"
SERVER, LEARNER = SYSTEMD / "rollout-server.service", SYSTEMD / "rollmatch-learner.service"
# What the units refer to and systemd looks for: other units, and the programs.
TARGETS = ("basic", "multi-user", "network-online", "shutdown", "sysinit", "umount")
STUBS = ("opt/rollmatch/.venv/bin/rollout-server", "opt/rollmatch/deploy/train_stage2.sh")

pytestmark = pytest.mark.req("DEP-01")


def settings_of(unit: str) -> dict[str, list[str]]:
    """Every key of a unit with its values, in order; continued lines are one."""
    lines = unit.replace("\\\n", " ").splitlines()
    pairs = [line.split("=", 1) for line in lines if re.match(r"[A-Za-z]+=", line)]
    return {key: [value for k, value in pairs if k == key] for key, _ in pairs}


def words_of(unit: str) -> list[str]:
    """ExecStart with the variables of run.env and systemd's %d filled in."""
    (line,) = settings_of(unit)["ExecStart"]
    text = (SYSTEMD / "run.env").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    filled = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], line)
    return shlex.split(filled.replace("%d", "/run/credentials"))


def unit_faults(unit: str) -> list[str]:
    """What systemd would not say."""
    keys = settings_of(unit)
    faults = [
        f"{key} is {keys.get(key)}" for key, wanted in _WANTED.items() if keys.get(key) != [wanted]
    ]
    if not any(value.startswith(_PROGRAMS) for value in keys["Environment"]):
        faults.append("PATH has no programs of the environment first")
    words = words_of(unit)
    stop = seconds(keys["TimeoutStopSec"][0])
    if words[1] == "serve":
        if fault := command_fault(words):
            return [*faults, fault]
        options = parsed(words)
        if stop < options["grace_seconds"] + ANSWERS_S + 10:
            faults.append("TimeoutStopSec leaves no time after --grace-seconds")
        if str(options["token_file"]) not in _credentials(keys):
            faults.append(f"{options['token_file']} is no credential")
    elif not any(
        f"ROLLOUT_SERVER_TOKEN_FILE={path}" in keys["Environment"]
        for path in (p.replace("/run/credentials", "%d") for p in _credentials(keys))
    ):
        faults.append("the learner is not told the token's file")
    if "WatchdogSec" in keys or keys["Type"] == ["notify"]:
        faults.append("the programs do not talk to systemd")
    return faults  # fmt: skip


_PROGRAMS = "PATH=/opt/rollmatch/.venv/bin:"
_WANTED = {
    "User": "rollmatch",
    "Restart": "on-failure",
    "RestartPreventExitStatus": "2",
    "KillMode": "mixed",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "CapabilityBoundingSet": "",
    "DevicePolicy": "closed",
    "EnvironmentFile": "/etc/rollmatch/run.env",
}


def _credentials(keys: dict[str, list[str]]) -> set[str]:
    return {f"/run/credentials/{value.split(':')[0]}" for value in keys["LoadCredential"]}


@pytest.mark.parametrize("unit", [SERVER, LEARNER], ids=lambda unit: unit.stem)
def test_a_unit_is_sound(unit: Path) -> None:
    assert unit_faults(unit.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("unit", "old", "new", "found"),
    [
        (SERVER, "TimeoutStopSec=60s", "TimeoutStopSec=30s", "no time after --grace-seconds"),
        (SERVER, "--grace-seconds", "--grace", "No such option"),
        (SERVER, "--token-file %d/", "--token-file /etc/rollmatch/", "no credential"),
        (SERVER, "KillMode=mixed", "KillMode=process", "KillMode"),
        (SERVER, "User=rollmatch\n", "", "User"),
        (SERVER, "Environment=PATH=", "Environment=PATHS=", "PATH has no programs"),
        (LEARNER, "=PATH=/opt/rollmatch/.venv/bin:", "=PATH=", "PATH has no programs"),
        (LEARNER, "_TOKEN_FILE=%d", "_TOKEN_FILE=/etc", "not told the token's file"),
        (LEARNER, "Restart=on-failure", "Restart=always", "Restart"),
        (LEARNER, "[Install]", "WatchdogSec=30\n[Install]", "do not talk to systemd"),
    ],
)
def test_a_unit_that_would_not_do_is_caught(unit: Path, old: str, new: str, found: str) -> None:
    text = unit.read_text(encoding="utf-8")
    assert old in text
    faults = unit_faults(text.replace(old, new))
    assert any(found in fault for fault in faults), faults


def test_servers_and_learner_take_different_gpus() -> None:
    server, learner = (words_of(unit.read_text(encoding="utf-8")) for unit in (SERVER, LEARNER))
    script, option, gpus, config = learner
    assert option == "--train-gpus"
    assert config == str(parsed(server)["run_config"])
    assert not set(parsed(server)["gpus"].split(",")) & set(gpus.split(","))
    assert ROOT / script.removeprefix("/opt/rollmatch/") == DEPLOY / "train_stage2.sh"


def test_no_variable_of_the_units_makes_the_learner_start_servers_itself() -> None:
    script = (DEPLOY / "train_stage2.sh").read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{([A-Z_]+)-\}", script))
    assert {"SERVER_GPUS", "TRAIN_GPUS", "NPROC"} <= read
    given = (SYSTEMD / "run.env").read_text(encoding="utf-8")
    names = set(re.findall(r"^(\w+)=", given, re.MULTILINE))
    assert read & names == {"TRAIN_GPUS"}


# --- What systemd itself says -------------------------------------------------------------

needs_systemd = pytest.mark.skipif(
    "CI" not in os.environ and shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not there (Debian: apt-get install systemd)",
)


def verified(root: Path, server: str, learner: str) -> str:
    """What `systemd-analyze verify` says of the units in a root that has what they refer to."""
    units = root / "etc/systemd/system"
    units.mkdir(parents=True)
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\nDescription=stub\n")
    for stub in STUBS:
        (root / stub).parent.mkdir(parents=True, exist_ok=True)
        (root / stub).write_text("#!/bin/sh\n")
        (root / stub).chmod(0o755)
    (units / SERVER.name).write_text(server)
    (units / LEARNER.name).write_text(learner)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={root}", SERVER.name, LEARNER.name],
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_takes_both_units(tmp_path: Path) -> None:
    server, learner = (unit.read_text(encoding="utf-8") for unit in (SERVER, LEARNER))
    assert verified(tmp_path, server, learner) == ""


@needs_systemd
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("KillMode=mixed", "KillMode=mixd", "kill mode"),
        ("RestartSec=", "RestartSeconds=", "RestartSeconds"),
        (".venv/bin/rollout-server", "bin/rollout-server", "not executable"),
        ("ProtectSystem=strict", "ProtectSystem=very", "very"),
        ("After=network-online.target", "After=network-online", "network-online"),
    ],
)
def test_systemd_catches_a_broken_unit(tmp_path: Path, old: str, new: str, found: str) -> None:
    server, learner = (unit.read_text(encoding="utf-8") for unit in (SERVER, LEARNER))
    assert old in server
    told = verified(tmp_path, server.replace(old, new), learner)
    assert found.lower() in told.lower()
