"""Options of commands that cannot be run here, by the programs' own parsers where they have one.

Each check raises `Unknown` for what the program would not take.
"""

import ast
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import typer.main
import yaml
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

import learner.cli
import rollout_server.cli
from tests.docs.commands import PLAIN, Command, command
from tests.docs.documents import ROOT

Found = TyperCommand | TyperGroup

OURS = {"learner": learner.cli.app, "rollout-server": rollout_server.cli.app}
# Of programs whose parser is not at hand.
RAY = {"start": {"--head", "--port", "--address"}}
COMPOSE = {
    "build": {"--pull"},
    "config": {"--quiet", "-q"},
    "down": {"--volumes", "-v", "--timeout", "-t"},
    "logs": {"--follow", "-f", "--tail"},
    "ps": {"--all", "-a"},
    "pull": set[str](),
    "run": {"--rm", "--no-deps", "--entrypoint"},
    "exec": {"-T"},
    "up": {"--build", "--wait", "--detach", "-d", "--abort-on-container-exit", "--exit-code-from"},
}
DOCKER_RUN = {"--rm", "--user", "-v", "--gpus", "--shm-size", "-p", "-e", "--network"}
SYSTEMCTL = {"daemon-reload", "disable", "enable", "restart", "start", "status", "stop"}
UV_PIP_INSTALL = {"--no-deps", "--override", "--require-hashes", "-r"}
NVIDIA_SMI = {"--query-gpu", "--query-compute-apps", "--format"}
SIGNALS = {"-TERM", "-INT", "-KILL", "-9", "-15"}


class Unknown(AssertionError):
    """A program, command, option or file that is not there."""


def check(asked: Command) -> None:
    """Hold a command against what its program takes."""
    for simple in asked.simple:
        _check_one(simple)
    if asked.not_run is not None:
        _files_of(asked)


def _check_one(asked: Command) -> None:
    if asked.program in OURS:
        parse_ours(asked.words)
    elif asked.program == "kill":
        _require(set(option_names(asked.words[1:])) <= SIGNALS, asked)
    elif asked.program in _CHECKS:
        _CHECKS[asked.program](asked)
    elif asked.program not in ("curl", "export", *PLAIN):
        raise Unknown(f"{asked}: {asked.program} is no program that the documents may use")


def parse_ours(words: list[str]) -> dict[str, Any]:
    """Arguments of a whole command line of one of the two programs, by name."""
    found, rest = _program(words[0]), words[1:]
    while isinstance(found, TyperGroup):
        found, rest = _command_below(found, rest[0] if rest else "", words), rest[1:]
    try:
        return dict(found.make_context(words[0], list(rest)).params)
    except TyperException as error:
        raise Unknown(f"{' '.join(words)}: {error.format_message()}") from None


def option_names(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z0-9]", word)]


def mentioned(words: list[str]) -> None:
    """Hold a part of a command of ours, as prose names it, against the program."""
    found, rest = _program(words[0]), words[1:]
    while isinstance(found, TyperGroup) and rest:
        word, *rest = rest
        if not word.startswith("-"):
            found = _command_below(found, word, words)
    if not isinstance(found, TyperGroup):
        _require_arguments(found, rest, words)
    known = options_of(found)
    for option in option_names(words[1:]):
        if option not in known:
            raise Unknown(f"{' '.join(words)}: there is no {option}; there are {sorted(known)}")


def _require_arguments(found: Found, rest: list[str], words: list[str]) -> None:
    """It takes as many as stand there."""
    with suppress(TyperException):  # prose may leave out the value of an option
        _, left, _ = found.make_parser(found.context_class(found)).parse_args(list(rest))
        if left:
            raise Unknown(f"{' '.join(words)}: it does not take {left[0]!r}")


def options_of(found: Found) -> set[str]:
    names = [name for p in found.params for name in (*p.opts, *p.secondary_opts)]
    return {"-h", "--help", *(name for name in names if name.startswith("-"))}


def all_options() -> set[str]:
    """Every option of both programs."""
    pending = [_program(name) for name in OURS]
    known: set[str] = set()
    while pending:
        found = pending.pop()
        known |= options_of(found)
        pending += _below(found).values() if isinstance(found, TyperGroup) else ()
    return known


def _program(name: str) -> Found:
    return cast(Found, typer.main.get_command(OURS[name]))


def _below(group: TyperGroup) -> dict[str, Found]:
    return cast(dict[str, Found], group.commands)


def _command_below(group: TyperGroup, word: str, words: list[str]) -> Found:
    found = _below(group).get(word)
    if found is None:
        raise Unknown(f"{' '.join(words)}: no command {word!r}; there are {sorted(group.commands)}")
    return found


def torchrun_options() -> set[str]:
    from torch.distributed.run import get_args_parser

    return set(re.findall(r"--[a-z][a-z-]+", get_args_parser().format_help()))


def _torchrun(asked: Command) -> None:
    from torch.distributed.run import get_args_parser

    numbered = [re.sub(r"^\$[A-Z]+$", "0", word) for word in asked.words[1:]]
    try:
        parsed = get_args_parser().parse_args(numbered)
    except SystemExit:
        raise Unknown(f"{asked}: torchrun does not take that") from None
    below = [parsed.training_script, *parsed.training_script_args]
    _require(parsed.no_python and below[0] in OURS, asked)
    parse_ours(below)


def _make(asked: Command) -> None:
    words = asked.words[3:] if asked.words[1] == "-C" else asked.words[1:]
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    _require(done.returncode == 0, asked, done.stderr)
    # A variable that the Makefile does not read does nothing.
    known = set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known.add("PYTHON")
    given = {word.partition("=")[0] for word in words if "=" in word}
    _require(given <= known, asked, f"the Makefile reads {sorted(known)}")


def _python(asked: Command) -> None:
    """A line of Python: it is one. What it imports is on another machine."""
    _require(asked.words[1] == "-c" and len(asked.words) == 3, asked)
    ast.parse(asked.words[2])


def _ray(asked: Command) -> None:
    _require(set(option_names(asked.words[2:])) <= RAY.get(asked.words[1], set()), asked)


def _uv(asked: Command) -> None:
    """`uv pip install`: its options, the locked requirements, and a wheel of this version."""
    _require(asked.words[1:3] == ["pip", "install"], asked)
    _require(set(option_names(asked.words[3:])) <= UV_PIP_INSTALL, asked)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in asked.words[3:]:
        if word.startswith("requirements/"):
            _require((ROOT / word).is_file(), asked, f"no {word}")
        if wheel := re.fullmatch(r"dist/(.*?)(?:\[(\w+)\])?", word):
            _require(wheel[1] == f"rollmatch-{project['version']}-py3-none-any.whl", asked, word)
            _require(wheel[2] in (None, *project["optional-dependencies"]), asked, word)


def _nvidia_smi(asked: Command) -> None:
    _require(set(option_names(asked.words[1:])) <= NVIDIA_SMI, asked)


def _swift(asked: Command) -> None:
    _require(asked.words[1] == "sft", asked)
    known = set(_fields(_package("swift") / "arguments"))
    unknown = [name for name in option_names(asked.words[2:]) if name[2:] not in known]
    _require(not unknown, asked, f"swift sft has no {unknown}")


def _fields(folder: Path) -> Iterator[str]:
    """Fields of all classes of a package: without an import, which takes ten seconds."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def _vllm(asked: Command) -> None:
    _require(asked.words[1] == "serve", asked)
    source = (_package("vllm") / "engine" / "arg_utils.py").read_text()
    for option in option_names(asked.words[2:]):
        _require(f'"{option}"' in source, asked, option)
    for module, name in re.findall(r"\b(\w+(?:\.\w+)+):(\w+)", asked.text):
        path = ROOT / f"{module.replace('.', '/')}.py"
        _require(path.is_file() and f"class {name}" in path.read_text(), asked, f"{module}:{name}")


def _docker(asked: Command) -> None:
    """`docker compose [-f FILE] [--profile P] COMMAND ... SERVICE ...` and `docker build`."""
    words = asked.words[1:]
    if words[0] == "build":
        _require(set(option_names(words[1:])) <= {"-f", "-t", "--target", "--build-arg"}, asked)
        return
    if words[0] == "run":
        ours = next((i for i, word in enumerate(words) if word in OURS), len(words))
        _require(set(option_names(words[1:ours])) <= DOCKER_RUN, asked)
        if ours < len(words):
            parse_ours(words[ours:])
        return
    _require(words[0] == "compose", asked)
    rest = words[1:]
    file, profiles = ROOT / "deploy" / "docker-compose.yaml", []
    while rest and rest[0].startswith("-"):
        name, value = rest[0], rest[1]
        _require(name in ("-f", "--file", "--profile", "--env-file", "-p"), asked, name)
        file = ROOT / value if name in ("-f", "--file") else file
        profiles += [value] if name == "--profile" else []
        rest = rest[2:]
    _require(file.is_file(), asked, f"no {file}")
    services = yaml.safe_load(file.read_text())["services"]
    offered = {p for service in services.values() for p in service.get("profiles", ())}
    _require(set(profiles) <= offered, asked, f"profiles are {sorted(offered)}")
    _require(rest[0] in COMPOSE and set(option_names(rest[1:])) <= COMPOSE[rest[0]], asked)
    named = [word for word in rest[1:] if not word.startswith("-")]
    if rest[0] in ("run", "exec"):
        named = named[:1]
    _require(set(named) <= set(services), asked, f"services are {sorted(services)}")


def _systemctl(asked: Command) -> None:
    _require(asked.words[1] in SYSTEMCTL, asked)
    _require(set(option_names(asked.words[2:])) <= {"--now", "--no-pager"}, asked)
    units = [word for word in asked.words[2:] if not word.startswith("-")]
    for unit in units:
        file = ROOT / "deploy" / "systemd" / f"{unit.removesuffix('.service')}.service"
        _require(file.is_file(), asked, f"no {file.name}")


def _sbatch(asked: Command) -> None:
    """Its script is checked as a file; its own options by the list of those that are used."""
    _require(set(option_names(asked.words[1:])) <= {"--nodes", "--gres", "--time"}, asked)


def _train_stage2(asked: Command) -> None:
    script = (ROOT / asked.program).read_text()
    for option in option_names(asked.words[1:]):
        _require(option in script, asked, f"no {option}")


def _files_of(asked: Command) -> None:
    """Files of the repository that it names, wherever that is installed, are there."""
    for word in asked.words:
        named = re.match(r"(?:\S*/)?((?:deploy|configs|learner|scripts|docs)/[^\s:]+)$", word)
        if named and not list(ROOT.glob(named[1].rstrip("/"))):
            raise Unknown(f"{asked}: no {named[1]}")


def python_module(text: str) -> None:
    """`.venv/bin/python -m benchmarks.NAME --option ...`: the module, and options it names."""
    words = command("", 0, text).words
    module = words[2]
    path = ROOT / f"{module.replace('.', '/')}.py"
    if words[1] != "-m" or not path.is_file():
        raise Unknown(f"{text}: there is no {module}")
    source = path.read_text() + (ROOT / "benchmarks" / "command.py").read_text()
    for option in option_names(words[3:]):
        if f'"{option}"' not in source:
            raise Unknown(f"{text}: {module} has no {option}")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _require(holds: bool, asked: Command, why: str = "it does not take that") -> None:
    if not holds:
        raise Unknown(f"{asked}: {why}")


_CHECKS = {
    ".venv/bin/python": _python,
    "torchrun": _torchrun,
    "make": _make,
    "nvidia-smi": _nvidia_smi,
    "ray": _ray,
    "swift": _swift,
    "uv": _uv,
    "vllm": _vllm,
    "docker": _docker,
    "systemctl": _systemctl,
    "sbatch": _sbatch,
    "deploy/train_stage2.sh": _train_stage2,
}
