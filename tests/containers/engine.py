"""A Docker Engine, and an image around the environment of the tests.

The engine is that of `scripts/docker_engine`, in namespaces of its own: it changes nothing on the
machine, and no process or container outlives them. Without it, the engine of the machine is used.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest
from tenacity import retry, stop_after_delay, wait_fixed

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
