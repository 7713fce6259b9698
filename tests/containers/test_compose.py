"""deploy/docker-compose.yaml on a Docker Engine: a CPU run with its faults (DEP-01).

The image is made around the environment of the tests; `docker build` makes that of users. The
engine is that of `scripts/docker_engine`, in namespaces of its own: it changes nothing on the
machine, and no process or container outlives them. Without it, the engine of the machine is used.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenacity import retry, stop_after_delay, wait_fixed

from learner.data.toy import make_data
from learner.models.toy import make_model

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".docker-engine"
IMAGE = "rollmatch:cpu"
# A root that makes them mount points of the host's folders, and its own programs.
_BIN = "/opt/rollmatch/bin"
_FOLDERS = ("dev", "etc", "opt/rollmatch/bin", "proc", "sys", "tmp", "usr", "var/cache/rollmatch")
_OPEN = ("tmp", "var/cache/rollmatch")
_LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
_ENTER = ("nsenter", "--net", "--mount", "--pid", "--target")


@dataclass(frozen=True)
class Engine:
    """Commands for a running engine. inside: the command that enters its namespaces."""

    inside: list[str]
    environment: dict[str, str]

    def docker(self, *words: str, content: bytes | None = None) -> str:
        """Return what `docker` prints, both streams; fail the test if its exit code is not 0."""
        return self._run(["docker", *words], content)

    def compose(self, *words: str) -> str:
        return self._run(["docker-compose", *words], None)

    def _run(self, words: list[str], content: bytes | None) -> str:
        done = subprocess.run(
            [*self.inside, *words],
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | self.environment,
        )
        text = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"{words}: {done.returncode}\n{text}"
        return text


@contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Start the unpacked engine, or use that of the machine. Skips the test if there is none."""
    if not (UNPACKED / "complete").exists():
        machine = Engine([], {})
        if shutil.which("docker") is None or shutil.which("docker-compose") is None:
            pytest.skip("no Docker Engine: scripts/docker_engine unpacks one")
        if subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
            pytest.skip("Docker's engine does not run: scripts/docker_engine unpacks one")
        yield machine
        return
    if os.geteuid() != 0:
        pytest.skip("only root can start the engine of scripts/docker_engine")
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not there, and a Docker Engine needs them")
    libraries = UNPACKED / "usr/lib/x86_64-linux-gnu"
    environment = {
        "PATH": f"{UNPACKED}/usr/sbin:{UNPACKED}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(libraries),
        "XTABLES_LIBDIR": str(libraries / "xtables"),
        "DOCKER_HOST": f"unix://{folder}/socket",
        "DOCKER_CONFIG": str(folder / "config"),
    }
    options = [
        *("--host", environment["DOCKER_HOST"], "--pidfile", str(folder / "pid")),
        *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        *("--cgroup-parent", cgroup := f"rollmatch-tests-{os.getpid()}"),
    ]
    # Killing `unshare` kills the first process of its namespaces, and with it all others.
    command = [
        *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", 'ip link set lo up && exec dockerd "$@"', "dockerd", *options),
    ]
    with ExitStack() as stack:
        stack.callback(_remove_cgroups, cgroup)
        log = stack.enter_context((folder / "log").open("wb"))
        process = stack.enter_context(
            subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        )
        stack.callback(process.kill)

        @retry(stop=stop_after_delay(60), wait=wait_fixed(0.2), reraise=True)
        def first_process() -> Engine:
            if process.poll() is not None:
                text = (folder / "log").read_text(errors="replace").strip()
                pytest.skip(f"Docker's engine does not start here: {text[-300:]}")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            engine = Engine([*_ENTER, *children.split()], environment)
            engine.docker("info")
            return engine

        yield first_process()


def _remove_cgroups(name: str) -> None:
    for group in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        for folder in sorted(group.glob("**/"), reverse=True):
            folder.rmdir()


def import_image(engine: Engine) -> str:
    """Make `IMAGE`, with links to the programs of this environment. `mounts` has their folders."""
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name in _OPEN else 0o755
            tar.addfile(entry)
        programs = ("python3", "learner", "rollout-server")
        links = {f"{_BIN[1:]}/{name}": f"{sys.prefix}/bin/{name}" for name in programs}
        for name, target in (_LINKS | links).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        tar.add(UNPACKED / "usr/bin/tini-static", "tini")
        for name in ("server_healthy.py", "train_stage2.sh"):
            tar.add(ROOT / "deploy" / name, f"{_BIN[1:]}/{name}")
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(text := b"rollmatch:x:10001:10001::/var/cache/rollmatch:/bin/sh\n")
        tar.addfile(passwd, BytesIO(text))
    settings = [
        f"ENV PATH={_BIN}:/usr/local/bin:/usr/bin:/bin",
        "ENV HOME=/var/cache/rollmatch USER=rollmatch PYTHONUNBUFFERED=1",
        f"ENV PYTHONPATH={ROOT}",
        'ENTRYPOINT ["/tini", "--"]',
    ]
    changes = [word for setting in settings for word in ("--change", setting)]
    return engine.docker("import", *changes, "-", IMAGE, content=content.getvalue())


def mounts() -> list[str]:
    """Return the folders of the environment, which containers of `IMAGE` mount read-only."""
    python = str(Path(sys.executable).resolve().parents[1])
    return sorted({"/usr", python, str(ROOT), sys.prefix})


pytestmark = [pytest.mark.slow, pytest.mark.req("DEP-01")]

SERVER, LEARNER = "server-cpu", "learner-cpu"
LIMIT_S = 840  # below the limit of a test, for slow machines


@dataclass(frozen=True)
class Stack:
    """The CPU profile. folder: is WORK, with `runs/containers` as RUNS."""

    engine: Engine
    folder: Path
    uid: int

    def compose(self, *words: str) -> str:
        files = ("-f", str(ROOT / "deploy/docker-compose.yaml"), "-f", str(self.override))
        return self.engine.compose(*files, "--env-file", str(self.folder / ".env"), *words)

    @property
    def override(self) -> Path:
        return self.folder / "override.yaml"

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def runs(self) -> Path:
        return self.folder / "runs/containers"

    def container(self, service: str) -> str:
        return f"rollmatch-{service}-1"

    def inspect(self, service: str) -> Any:
        (found,) = json.loads(self.engine.docker("inspect", self.container(service)))
        return found

    def state(self, service: str) -> Any:
        return self.inspect(service)["State"]

    def restarts(self, service: str) -> int:
        """Return how often the engine started it again since `up`."""
        return int(self.inspect(service)["RestartCount"])

    def logs(self, service: str) -> str:
        return self.engine.docker("logs", self.container(service))

    def kill_program(self, service: str) -> None:
        """Kill what the container's first process, tini, started."""
        kill = "kill -9 $(cat /proc/1/task/1/children)"
        self.engine.docker("exec", self.container(service), "sh", "-c", kill)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The containers are created, and none is started."""
    folder = tmp_path_factory.mktemp("containers")
    folder.chmod(0o755)
    uid = os.getuid() or 10001
    make_data(folder / "runs/toy/data", train=16, val=1, seed=0)
    make_model(folder / "runs/toy/model", seed=0)
    (folder / "engine").mkdir()
    with running_engine(folder / "engine") as engine:
        stack = Stack(engine, folder, uid)
        stack.runs.mkdir()
        stack.token.write_text("a-token-of-the-container-tests")
        stack.token.chmod(0o400)
        os.chown(stack.runs, uid, uid)
        os.chown(stack.token, uid, uid)
        variables = {
            "COMPOSE_PROFILES": "cpu",
            "WORK": folder,
            "CONFIG": stack.config,
            "IMAGES": folder / "runs/toy/data",
            "CHECKPOINT": folder / "runs/toy/model",
            "RUNS": stack.runs,
            "TOKEN_FILE": stack.token,
            "RUN_UID": uid,
            "RUN_GID": uid,
            "HTTP_PORT": 0,
        }
        few = {"max_steps": 12, "save_steps": 4, "effective_batch_size": 4}
        run = {"extends": str(ROOT / "deploy/config/toy_cpu.yaml"), "training": few}
        stack.config.write_text(yaml.safe_dump(run))
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        (folder / ".env").write_text("".join(lines))
        environment = {"volumes": [f"{path}:{path}:ro" for path in mounts()]}
        learner = environment | {"entrypoint": ["/tini", "-e", "143", "--"]}
        services = {SERVER: environment, LEARNER: learner}
        stack.override.write_text(yaml.safe_dump({"services": services}))
        assert import_image(engine)
        yield stack
        stack.compose("down", "--volumes")
        assert engine.docker("ps", "--all", "--quiet") == ""
        engine.docker("image", "rm", IMAGE)


@retry(stop=stop_after_delay(LIMIT_S), wait=wait_fixed(0.2), reraise=True)
def until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    assert condition(), explain()


def test_a_run_ends_although_both_programs_were_killed(stack: Stack) -> None:
    run = stack.runs / "toy_cpu"
    log = partial(stack.logs, LEARNER)
    stack.compose("up", "--detach")
    until(lambda: (run / "metrics.jsonl").exists(), log)
    stack.kill_program(SERVER)
    until((run / "checkpoint-4").exists, log)
    stack.kill_program(LEARNER)
    until(lambda: stack.state(LEARNER)["Status"] == "exited", log)
    assert stack.state(LEARNER)["ExitCode"] == 0, log()
    # The learner went on with the server that was started again.
    assert (stack.restarts(SERVER), stack.restarts(LEARNER)) == (1, 1)
    assert re.search(rf"Going on from {run}/checkpoint-[48]\n", log())
    assert log().rstrip().endswith(f"Run folder: {run}")
    assert stack.state(SERVER)["Health"]["Status"] == "healthy", stack.logs(SERVER)


def test_a_token_that_cannot_be_read_ends_the_server_with_2(stack: Stack) -> None:
    stack.compose("down")
    stack.token.chmod(0)
    with pytest.raises(AssertionError, match=r"dependency failed to start"):
        stack.compose("up", "--detach")
    until(lambda: stack.state(SERVER)["Status"] == "exited", partial(stack.logs, SERVER))
    assert stack.state(SERVER)["ExitCode"] == 2
    assert stack.restarts(SERVER) == 5
    assert stack.state(LEARNER)["Status"] == "created"
    assert "error: token_file" in stack.logs(SERVER)
