"""The files of deploy/ as their programs read them: compose services and command lines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from learner.cli import app as learner_app
from rollout_server.cli import app as server_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Values for the required variables of the compose file.
VARIABLES = {
    "WORK": "/project",
    "CONFIG": "train.yaml",
    "IMAGES": "/project/data",
    "CHECKPOINT": "/project/model",
    "RUNS": "/project/runs",
    "TOKEN_FILE": "/project/token",
}
PROGRAMS = {"rollout-server": server_app, "learner": learner_app}
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[?-])(?P<text>[^}]*))?\}")


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command line, parsed by the program itself. Raises its usage errors."""
    command: Any = typer.main.get_command(PROGRAMS[Path(words[0]).name])
    rest = words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    params: dict[str, Any] = command.make_context(words[0], rest).params
    return params


def interpolated(text: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """`text` with `${A}`, `${A:-default}` and `${A:?message}` replaced as compose does."""

    def value(match: re.Match[str]) -> str:
        if match["how"] == "-":
            return variables.get(match["name"], match["text"])
        return variables[match["name"]]

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True)
class Service:
    """One service of a compose file; `raw` is its mapping in the file."""

    name: str
    raw: dict[str, Any]

    @property
    def binds(self) -> dict[str, dict[str, Any]]:
        """Mounts of host folders, by their path in the container."""
        mounts = [mount for mount in self.raw["volumes"] if isinstance(mount, dict)]
        return {mount["target"]: mount for mount in mounts}

    @property
    def gpu_ids(self) -> list[str]:
        resources = self.raw.get("deploy", {}).get("resources", {})
        devices = resources.get("reservations", {}).get("devices", [])
        return [number for device in devices for number in device["device_ids"]]

    @property
    def host_names(self) -> set[str]:
        networks = self.raw.get("networks", {}).values()
        return {self.name, *(alias for network in networks for alias in network["aliases"])}

    @property
    def secret_files(self) -> set[str]:
        return {f"/run/secrets/{name}" for name in self.raw.get("secrets", [])}


def services_of(text: str) -> list[Service]:
    document = yaml.safe_load(interpolated(text))
    return [Service(name, raw) for name, raw in document["services"].items()]
