"""What the files of deploy/ say, read the way their programs read them."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import typer
import yaml
from typer.exceptions import TyperException

from learner.cli import app as learner_app
from rollout_server.cli import app as server_app
from rollout_server.http.app import create_app
from rollout_server.http.middleware import OPEN_PATHS
from rollout_server.serve import ANSWERS_S
from rollout_server.serving.pool import Pool
from rollout_server.settings.options import ServerSettings
from shared_contracts.cli import BAD_INPUT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# What the variables of the compose file are in these tests.
VARIABLES = {
    "WORK": "/project",
    "CONFIG": "train.yaml",
    "IMAGES": "/project/data",
    "CHECKPOINT": "/project/model",
    "RUNS": "/project/runs",
    "TOKEN_FILE": "/project/token",
}
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<how>:[?-])(?P<text>[^}]*))?\}")


# --- Commands ---------------------------------------------------------------------------

PROGRAMS = {"rollout-server": server_app, "learner": learner_app}


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command of one of the programs, by its own parser.

    Raises what the parser raises for a command that it does not take.
    """
    command: Any = typer.main.get_command(PROGRAMS[Path(words[0]).name])
    rest = words[1:]
    while hasattr(command, "commands"):
        name = rest[0] if rest else "--help"
        if name == "--help":
            return {}
        command, rest = command.commands[name], rest[1:]
    if rest == ["--help"]:
        return {}
    params: dict[str, Any] = command.make_context(words[0], rest).params
    return params


def command_fault(words: list[str]) -> str | None:
    """What the program says of a command it does not take; None for one that it does."""
    try:
        parsed(words)
    except KeyError as error:
        return f"{shlex.join(words)}: no such command {error}"
    except TyperException as error:
        return f"{shlex.join(words)}: {error}"
    return None


def commands_in(shell: str) -> Iterator[list[str]]:
    """Every call of one of the programs in a piece of shell, as words."""
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        call: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()<>"):
                yield from [call] if call else []
                call = []
            elif call or Path(word).name in PROGRAMS:
                call.append(word)


def shell_of(markdown: str) -> str:
    """What the shell blocks of a page have, one after another."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL))


# --- The compose file -------------------------------------------------------------------


class MissingVariable(Exception):
    """Compose stops with this message."""


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `${A}`, `${A:-default}` and `${A:?message}` replaced, as compose does."""

    def value(match: re.Match[str]) -> str:
        if found := variables.get(match["name"]):
            return found
        if match["how"] == ":-":
            return match["text"]
        raise MissingVariable(f"{match['name']}: {match['text']}")

    return _VARIABLE.sub(value, text)


def required_variables(text: str) -> set[str]:
    return {match["name"] for match in _VARIABLE.finditer(text) if match["how"] == ":?"}


@dataclass(frozen=True)
class Service:
    """One service of a compose file; `raw` is what the file says of it."""

    name: str
    raw: dict[str, Any]

    @property
    def command(self) -> list[str]:
        return list(self.raw.get("command", []))

    @property
    def serves(self) -> bool:
        return self.command[:1] == ["rollout-server"]

    @property
    def learns(self) -> bool:
        return self.command[:1] == ["train_stage2.sh"]

    @property
    def binds(self) -> dict[str, dict[str, Any]]:
        """Mounts of host folders, by their path inside."""
        mounts = [mount for mount in self.raw.get("volumes", []) if isinstance(mount, dict)]
        return {mount["target"]: mount for mount in mounts if mount["type"] == "bind"}

    @property
    def gpu_ids(self) -> list[str]:
        resources = self.raw.get("deploy", {}).get("resources", {})
        devices = resources.get("reservations", {}).get("devices", [])
        return [number for device in devices for number in device["device_ids"]]

    @property
    def host_names(self) -> set[str]:
        networks = self.raw.get("networks", {})
        aliases = [network.get("aliases", []) for network in networks.values() if network]
        return {self.name, *(alias for names in aliases for alias in names)}

    @property
    def published(self) -> list[str]:
        return list(self.raw.get("ports", []))


def services_of(text: str, variables: Mapping[str, str] = VARIABLES) -> list[Service]:
    document = yaml.safe_load(interpolated(text, variables))
    return [Service(name, raw) for name, raw in document["services"].items()]


@cache
def _compose_schema() -> Any:
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))


@cache
def server_routes() -> set[str]:
    """Every path the server serves."""
    app = create_app(Pool(ServerSettings(model=Path("/model"), device="cpu")))
    return {route.path for route in app.routes if hasattr(route, "path")}


def compose_faults(text: str) -> list[str]:
    """What is wrong with a compose file."""
    document = yaml.safe_load(interpolated(text, VARIABLES))
    schema = _compose_schema()
    validator = jsonschema.validators.validator_for(schema)(schema)
    faults = [
        f"schema: {error.json_path}: {error.message}" for error in validator.iter_errors(document)
    ]
    if faults:
        return faults
    services = services_of(text)
    for service in services:
        told = [*_safety(service), *_server(service), *_learner(service, services)]
        faults += [f"{service.name}: {fault}" for fault in told]
    return faults


def _safety(service: Service) -> Iterator[str]:
    raw = service.raw
    _, _, tag = raw["image"].rpartition(":")
    if ":" not in raw["image"] or tag == "latest":
        yield f"image {raw['image']} is not pinned"
    if "user" in raw and str(raw["user"]).split(":")[0] in ("0", "root"):
        yield "runs as root"
    for name in raw.get("environment", {}):
        if re.search("TOKEN|PASSWORD|SECRET|KEY", name) and not name.endswith("_FILE"):
            yield f"the environment holds {name}"
    for port in service.published:
        if not port.startswith("127.0.0.1:"):
            yield f"port {port} is published beyond the loopback"
    if "no-new-privileges:true" not in raw.get("security_opt", []) or raw.get("cap_drop") != [
        "ALL"
    ]:
        yield "keeps privileges"
    if (service.serves or service.learns) and not raw.get("read_only"):
        yield "the image may be written"


def _server(service: Service) -> Iterator[str]:
    if not service.serves:
        return
    if fault := command_fault(service.command):
        yield fault
        return
    given = parsed(service.command)
    if Path(given["token_file"]) not in _secret_files(service):
        yield f"{given['token_file']} is no secret of the service"
    if seconds(service.raw["stop_grace_period"]) < given["grace_seconds"] + ANSWERS_S + 10:
        yield "stop_grace_period leaves no time after --grace-seconds"
    for path in [given["model"], *given["allowed_media_dir"]]:
        mount = service.binds.get(str(path))
        if mount is None or mount["source"] != str(path) or not mount.get("read_only"):
            yield f"{path} is not mounted read-only at its own path"
    gpus = given["gpus"].split(",") if given["gpus"] else []
    if gpus != [str(number) for number in range(len(service.gpu_ids))]:
        yield f"--gpus {gpus} beside device_ids {service.gpu_ids}"
    if (given["device"] == "cpu") == bool(gpus):
        yield "neither GPUs nor the CPU, or both"
    if service.raw["restart"] != "on-failure":
        yield "is not started again for ever"
    if service.raw.get("entrypoint") != ["/usr/bin/tini", "-e", str(BAD_INPUT), "--"]:
        yield "is started again after bad input"
    yield from _health_check(service, given["port"])


def _health_check(service: Service, port: int) -> Iterator[str]:
    check = service.raw.get("healthcheck", {})
    kind, program, url = check.get("test", ["NONE", "", ""])
    if kind != "CMD" or not os.access(DEPLOY / program, os.X_OK):
        yield "no health check that the image has"
        return
    if program not in (DEPLOY / "Dockerfile").read_text(encoding="utf-8"):
        yield f"the image has no {program}"
    if url != f"http://127.0.0.1:{port}":
        yield f"the health check asks {url}, and the server listens on {port}"
    asked = re.findall(r'"\{.*?\}(/\w+/)"', (DEPLOY / program).read_text(encoding="utf-8"))
    if asked != ["/health/"] or "/health/" not in server_routes() & set(OPEN_PATHS):
        yield f"the health check asks for {asked}"
    if seconds(check["start_period"]) < 1800:
        yield "start_period is short for a large checkpoint"


def _learner(service: Service, services: list[Service]) -> Iterator[str]:
    if not service.learns:
        return
    needs = service.raw.get("depends_on", {})
    servers = {each.name: each for each in services if each.serves}
    named = [name for name in needs if name in servers]
    if len(named) != 1 or needs[named[0]].get("condition") != "service_healthy":
        yield "does not wait for a healthy server"
        return
    server = servers[named[0]]
    if service.raw["profiles"] != server.raw["profiles"]:
        yield "has other profiles than its server"
    if shared := set(service.gpu_ids) & set(server.gpu_ids):
        yield f"shares GPUs {sorted(shared)} with its server"
    if len(service.gpu_ids) == 0 and server.gpu_ids:
        yield "has no GPU"
    if service.raw["user"] != server.raw["user"]:
        yield "is another user than its server"
    token = service.raw.get("environment", {}).get("ROLLOUT_SERVER_TOKEN_FILE", "")
    if Path(token) not in _secret_files(service):
        yield "is not told the token's file"
    for path, mount in server.binds.items():
        if service.binds.get(path) != mount:
            yield f"{path} is not mounted as at its server"
    policy, _, retries = service.raw["restart"].partition(":")
    if policy != "on-failure":
        yield "is started again when it has finished"
    elif not retries and "entrypoint" not in service.raw:
        yield "is started again for ever after bad input"


def _secret_files(service: Service) -> set[Path]:
    return {Path("/run/secrets") / name for name in service.raw.get("secrets", [])}


_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def seconds(duration: str) -> float:
    """`90s`, `1h30m` (compose) or `30min` (systemd) in seconds."""
    parts = re.findall(r"(\d+)(min|ms|s|m|h)", duration)
    assert "".join(number + unit for number, unit in parts) == duration, duration
    return sum(int(number) * _UNITS[unit] for number, unit in parts)
