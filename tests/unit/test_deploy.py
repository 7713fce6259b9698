"""deploy/ without an engine: the compose file, the image's recipe, examples, README (DEP-01).

Every check is seen to fail: each test of a file has one beside it in which one thing is broken.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import load_config
from learner.training.run_log import software
from rollout_server.settings.options import load_settings
from shared_contracts.errors import Problem
from tests.unit.deployment import (
    DEPLOY,
    ROOT,
    VARIABLES,
    MissingVariable,
    Service,
    command_fault,
    commands_in,
    compose_faults,
    interpolated,
    parsed,
    required_variables,
    services_of,
    shell_of,
)
from tests.unit.scripted_server import HangUp, Route, problem, scripted_server

COMPOSE = (DEPLOY / "docker-compose.yaml").read_text(encoding="utf-8")
DOCKERFILE = DEPLOY / "Dockerfile"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((DEPLOY / "config").glob("*.yaml"))
PROGRAMS = Path(sys.executable).parent

pytestmark = pytest.mark.req("DEP-01")


# --- docker-compose.yaml ----------------------------------------------------------------


def servers() -> list[Service]:
    return [service for service in services_of(COMPOSE) if service.serves]


def test_the_compose_file_is_sound() -> None:
    assert compose_faults(COMPOSE) == []


def test_there_are_a_server_on_three_gpus_a_learner_on_the_fourth_and_both_on_a_cpu() -> None:
    gpus = {service.name: service.gpu_ids for service in services_of(COMPOSE)}
    assert gpus["server"] == ["0", "1", "2"]
    assert gpus["learner"] == ["3"]
    assert gpus["server-cpu"] == gpus["learner-cpu"] == []
    profiles = {service.name: service.raw["profiles"] for service in services_of(COMPOSE)}
    assert profiles["server"] == profiles["learner"] == ["gpu"]
    assert profiles["server-cpu"] == profiles["learner-cpu"] == ["cpu"]


@pytest.mark.req("FULL-07")
@pytest.mark.parametrize("name", ["server", "learner"])
def test_both_ends_of_a_push_between_containers_use_several_sockets(name: str) -> None:
    """As one socket does not fill a fast network; both ends have the same number of them."""
    (service,) = [service for service in services_of(COMPOSE) if service.name == name]
    threads, each = (
        int(service.raw["environment"][variable])
        for variable in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    )
    assert (threads, each) == (4, 2)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("stop_grace_period: 60s", "stop_grace_perod: 60s", "schema"),
        ("stop_grace_period: 60s", "stop_grace_period: 20s", "no time after --grace-seconds"),
        ("prom/prometheus:v3.5.0", "prom/prometheus:latest", "not pinned"),
        ("grafana/grafana:12.1.1", "grafana/grafana", "not pinned"),
        ("${RUN_UID:-10001}:${RUN_GID:-10001}", "0:0", "runs as root"),
        ("127.0.0.1:${HTTP_PORT:-8000}:8000", "8000:8000", "beyond the loopback"),
        ("ROLLOUT_SERVER_TOKEN_FILE: /run/secrets/rollout_server_token", "ROLLOUT_SERVER_TOKEN: x",
         "the environment holds ROLLOUT_SERVER_TOKEN"),
        ("TOKEN_FILE: /run/secrets/rollout_server_token", "TOKEN_FILE: /run/secrets/other",
         "is not told the token's file"),
        ("--token-file=/run/secrets/rollout_server_token", "--token-file=/token", "no secret"),
        ("--grace-seconds=30", "--grace-second=30", "No such option"),
        ("--gpus=0,1,2", "--gpus=0,1,3", "--gpus"),
        ("--device=cpu", "--device=gpu", "neither GPUs nor the CPU"),
        ('device_ids: ["3"]', 'device_ids: ["2"]', "shares GPUs ['2']"),
        ("--port=8000", "--port=8001", "listens on 8001"),
        ("server_healthy.py\", \"http", "server_is_fine.py\", \"http", "no health check"),
        ("start_period: 60m", "start_period: 30s", "start_period"),
        ("condition: service_healthy", "condition: service_started", "does not wait"),
        ("--allowed-media-dir=${IMAGES}", "--allowed-media-dir=/data", "/data is not mounted"),
        ("target: ${IMAGES}\n    read_only: true", "target: ${IMAGES}", "not mounted read-only"),
        ("restart: on-failure:5", "restart: always", "started again when it has finished"),
        ("restart: on-failure:5", "restart: on-failure", "for ever after bad input"),
        ("restart: on-failure\n", "restart: on-failure:5\n", "not started again for ever"),
        ('entrypoint: [/usr/bin/tini, -e, "2", --]', "entrypoint: [/usr/bin/tini, --]",
         "is started again after bad input"),
        ("cap_drop: [ALL]", "cap_drop: [NET_RAW]", "keeps privileges"),
        ("  read_only: true\n  # Kernels", "  # Kernels", "the image may be written"),
    ],
)  # fmt: skip
def test_a_broken_compose_file_is_caught(old: str, new: str, found: str) -> None:
    assert old in COMPOSE
    faults = compose_faults(COMPOSE.replace(old, new))
    assert any(found in fault for fault in faults), faults


def test_a_variable_that_is_not_set_is_told_by_name() -> None:
    assert required_variables(COMPOSE) == set(VARIABLES)
    for name in VARIABLES:
        rest = {key: value for key, value in VARIABLES.items() if key != name}
        with pytest.raises(MissingVariable, match=f"{name}: the "):
            interpolated(COMPOSE, rest)


def test_every_variable_is_explained_at_the_top_of_the_file() -> None:
    head, _, body = COMPOSE.partition("\nname: ")
    for name in set(re.findall(r"\$\{(\w+)", body)):
        assert re.search(rf"\b{name}\b", head), name


def test_prometheus_and_grafana_get_files_that_name_services_and_mounts_of_compose() -> None:
    by_name = {service.name: service.raw for service in services_of(COMPOSE)}
    mounts = dict(
        m.split(":")[:2] for n in ("prometheus", "grafana") for m in by_name[n]["volumes"]
    )
    inside = {path: DEPLOY / source for source, path in mounts.items() if source[0] == "."}
    scraping = yaml.safe_load((inside["/etc/prometheus"] / "prometheus.yml").read_text())
    (job,) = scraping["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    for service in servers():
        port = parsed(service.command)["port"]
        assert target in [f"{name}:{port}" for name in service.host_names]
    secret = Path(job["authorization"]["credentials_file"])
    assert secret.name in by_name["prometheus"]["secrets"]
    provisioning = inside["/etc/grafana/provisioning"]
    (source,) = _yaml_of(provisioning / "datasources")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = _yaml_of(provisioning / "dashboards")["providers"]
    assert list(inside[provider["options"]["path"]].glob("*.json"))


def _yaml_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.yaml")
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


# --- The examples -----------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reaches_the_server_of_every_profile(example: Path) -> None:
    config = load_config(example)
    assert config.training.resume == "auto", "else a container that starts again is refused"
    assert config.rollout_matching.vllm.server is not None
    (address,) = config.rollout_matching.vllm.server.servers
    for service in servers():
        options = parsed(service.command)
        urls = [f"http://{name}:{options['port']}" for name in service.host_names]
        assert address.base_url in urls
        assert str(address.group_port) in service.raw["expose"]
        assert not any(str(address.group_port) in port for port in service.published)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_server_of_the_compose_file_starts_with_the_settings_of_an_example(example: Path) -> None:
    for service in servers():
        given = parsed(service.command)
        options = {
            "model": given["model"],
            "device": given["device"],
            "gpus": [int(gpu) for gpu in (given["gpus"] or "").split(",") if gpu],
            "grace_seconds": given["grace_seconds"],
        }
        settings = load_settings(None, options, example, {})
        assert settings.max_num_seqs == load_config(example).rollout_matching.decode_batch_size


# --- The Dockerfile ---------------------------------------------------------------------


def lint(dockerfile: Path) -> str:
    done = subprocess.run([PROGRAMS / "hadolint", dockerfile], capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert lint(DOCKERFILE) == ""


def test_what_hadolint_is_told_to_ignore_is_explained() -> None:
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    ignores = [number for number, line in enumerate(lines) if "hadolint ignore" in line]
    assert len(ignores) == 3
    for number in ignores:
        assert lines[number - 1].startswith("# ")
        assert not lines[number - 1].startswith("# ---") or "  # " in lines[number]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("FROM ${PYTHON_IMAGE} AS system-cpu", "FROM python:latest AS system-cpu", "DL3007"),
        ("install -y --no-install", "install --no-install", "DL3014"),
        ('ENTRYPOINT ["/usr/bin/tini", "--"]', "ENTRYPOINT /usr/bin/tini --", "DL3025"),
        ("WORKDIR /var", "WORKDIR var", "DL3000"),
        ("USER ${UID}:${UID}", "USER root", "DL3002"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
    ],
)
def test_hadolint_catches_a_broken_dockerfile(
    tmp_path: Path, old: str, new: str, rule: str
) -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "Dockerfile").write_text(text.replace(old, new))
    assert rule in lint(tmp_path / "Dockerfile")


def recipe_faults(text: str) -> list[str]:
    """What hadolint does not know: hashes, the stages of EXTRA, what the context has, secrets."""
    faults = []
    for words in re.findall(r"pip (?:(?!pip ).)*?(?= \.\n|&&|\n\n|\n[A-Z#]|\Z)", text, re.DOTALL):
        if "install" in words and "--require-hashes" not in words and "--no-index" not in words:
            faults.append(f"unhashed: {words}")
    for extra in ("cpu", "gpu"):
        if not re.search(rf"^FROM \S+ AS system-{extra}$", text, re.MULTILINE):
            faults.append(f"no stage for {extra}")
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            for name in {source.replace("${EXTRA}", extra) for extra in ("cpu", "gpu")}:
                if f"!{name}" not in allowed or not (ROOT / name).exists():
                    faults.append(f"not in the context: {name}")
    faults += re.findall(r"^(?:ENV|ARG).*(?:TOKEN|PASSWORD|SECRET|INDEX_URL).*", text, re.MULTILINE)
    last = text.rpartition("\nFROM ")[2]
    users = re.findall(r"^USER (.*)", last, re.MULTILINE)
    if users != ["${UID}:${UID}"] or not re.search(r"^ARG UID=[1-9]\d+$", last, re.MULTILINE):
        faults.append(f"the image's user is {users}")
    return faults


def test_the_image_takes_hashed_packages_known_files_and_no_secret() -> None:
    assert recipe_faults(DOCKERFILE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (" --require-hashes", "", "unhashed"),
        ("AS system-cpu", "AS plain", "no stage for cpu"),
        ("COPY learner learner", "COPY runs runs", "not in the context: runs"),
        ("ARG UID=10001", "ARG UID=0", "the image's user"),
        ("USER ${UID}:${UID}", "", "the image's user"),
        ("ARG EXTRA=gpu", "ARG PIP_INDEX_URL=x", "ARG PIP_INDEX_URL"),
    ],
)
def test_a_recipe_that_would_not_do_is_caught(old: str, new: str, found: str) -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert old in text
    faults = recipe_faults(text.replace(old, new))
    assert any(found in fault for fault in faults), faults


def test_nothing_but_what_is_named_goes_into_the_context() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule for rule in rules[1:] if not rule.startswith("!")} == {"**/__pycache__"}


# --- The health check -------------------------------------------------------------------


def healthy(base_url: str) -> tuple[int, str]:
    program = [sys.executable, str(DEPLOY / "server_healthy.py"), base_url]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()


def constant(answer: object) -> Route:
    return lambda _: answer


def test_the_health_check_takes_a_ready_server_and_one_that_waits_for_a_push() -> None:
    with scripted_server() as server:
        assert healthy(server.base_url) == (0, "")
        for kind in ("push-needed", "weights-poisoned"):
            answer = problem(kind, "push", "replica 0")
            server.routes["GET /health/"] = constant(answer)
            assert healthy(f"{server.base_url}/") == (0, "")
        assert {route for route, _ in server.calls} == {"GET /health/"}
        assert set(server.authorizations) == {None}


def test_the_health_check_says_what_is_wrong() -> None:
    with scripted_server() as server:
        server.routes["GET /health/"] = lambda _: problem("not-ready", "it starts", "replica 0")
        code, told = healthy(server.base_url)
        assert (code, "503" in told, "it starts" in told) == (1, True, True)
        # Another server's problem that only speaks of one of ours.
        other = Problem.of("internal", "urn:rollmatch:push-needed", "GET /health/")
        server.routes["GET /health/"] = lambda _: (500, other)
        assert healthy(server.base_url)[0] == 1
        server.routes["GET /health/"] = lambda _: (502, "<html>")
        assert healthy(server.base_url) == (1, "502: <html>")
        server.routes["GET /health/"] = lambda _: HangUp()
        assert healthy(server.base_url)[0] == 1
        gone = server.base_url
    assert healthy(gone)[0] == 1
    assert "refused" in healthy(gone)[1]


@pytest.mark.req("DEP-01", "MET-03")
def test_a_run_needs_no_git_which_the_image_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    assert software()["commit"] is None


@pytest.mark.req("MET-03")
def test_a_package_within_another_checkout_has_none_of_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    installed = tmp_path / ".venv" / "runlog.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr("learner.training.run_log.__file__", str(installed))
    assert software()["commit"] is None


# --- README and scripts -----------------------------------------------------------------


def test_the_programs_take_every_command_of_the_readme() -> None:
    commands = list(commands_in(shell_of(README)))
    assert {words[1] for words in commands} == {"launch", "toy"}
    assert [fault for words in commands if (fault := command_fault(words))] == []


@pytest.mark.parametrize(
    "line",
    [
        "rollout-server serve --modell /m",
        "A=1 learner train --config",
        "cd /x && /opt/bin/learner tran --config y.yaml",
        "torchrun --no-python learner train --config a.yaml --epochs 3",
    ],
)
def test_a_command_that_the_programs_do_not_take_is_caught(line: str) -> None:
    (words,) = commands_in(line)
    assert command_fault(words) is not None


def test_the_readme_names_files_and_profiles_that_are_there() -> None:
    for name in re.findall(r"deploy/[\w./-]+\w", README):
        assert (ROOT / name).exists(), name
    used = set(re.findall(r"--profile (\w+)", README + COMPOSE.partition("\nname: ")[0]))
    there = {p for service in services_of(COMPOSE) for p in service.raw["profiles"]}
    assert used == there


SCRIPTS = [".ci/run", "scripts/setup", "scripts/lock", "scripts/system_packages"] + [
    str(path.relative_to(ROOT)) for path in sorted(DEPLOY.rglob("*.s[hb]*"))
]


def shell_faults(script: Path) -> str:
    """What bash and shellcheck say of a script."""
    done = [
        subprocess.run([*program, script], capture_output=True, text=True)
        for program in (["bash", "-n"], [str(PROGRAMS / "shellcheck")])
    ]
    return "".join(each.stdout + each.stderr for each in done)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    assert shell_faults(ROOT / name) == ""


@pytest.mark.parametrize("broken", ["if true; then\n", "rm -rf $1/$2\n"])
def test_shellcheck_catches_a_broken_script(tmp_path: Path, broken: str) -> None:
    (tmp_path / "script").write_text(f"#!/usr/bin/env bash\n{broken}")
    assert shell_faults(tmp_path / "script") != ""
