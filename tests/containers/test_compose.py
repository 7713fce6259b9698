"""deploy/docker-compose.yaml on a Docker Engine: a CPU run with its faults (DEP-01).

The image is made around the environment of the tests; `docker build` makes that of users.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenacity import retry, stop_after_delay, wait_fixed

from learner.data.toy import make_data
from learner.models.toy import make_model
from tests.containers.engine import IMAGE, ROOT, Engine, import_image, mounts, running_engine

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
