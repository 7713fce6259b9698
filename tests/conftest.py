"""Fixtures that several folders share, how hypothesis runs, and which tests stay together.

A started server serves all tests of a process.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from learner.data.toy import ToyData, make_data
from tests.contract.running_server import RunningServer, draw_scene, running_server
from tests.contract.toy_checkpoints import make_checkpoint

# How many examples a property is tried with: the same 100 in every run, the same 500 in CI, new
# ones in every run of `pytest --hypothesis-profile=nightly`, and few for each mutant of `make
# mutants`, of which it is enough to know that one of them fails. No deadlines: machines differ.
settings.register_profile("local", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("ci", settings.get_profile("local"), max_examples=500)
settings.register_profile("nightly", deadline=None, max_examples=20_000)
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# Two processes share two cores (`make test`): each keeps to one, and what it starts too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Files that use one fixture which takes long to make.
TOGETHER = {
    "integration/test_network_cut": "hosts",
    "integration/test_two_hosts": "hosts",
    "docs/test_commands": "docs",
    "docs/test_outputs": "docs",
}
# Files whose tests share nothing, and take a minute or more each.
APART = ("integration/test_demo", "integration/test_launch")
# What takes longest is started first, so that both processes end at the same time.
FIRST = (
    "integration/test_demo",
    "docs",
    "integration/test_loop",
    "contract/test_replicas",
    "contract/test_adapter",
    "integration/test_backends",
    "contract/test_repeat_terminate",
    "integration/test_processes",
    "integration/test_kills_and_resumes",
    "integration/test_kills",
    "hosts",
    "contract/test_learner_killed",
    "integration/test_sharded_push",
    "integration/test_adapter_serving",
    "integration/test_launch",
)


def _group(nodeid: str) -> str:
    file = nodeid.partition(".py::")[0].removeprefix("tests/")
    # Two tests on the same GPUs at once would be in each other's way.
    return "gpu" if file.startswith("gpu/") else TOGETHER.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {group: place for place, group in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(_group(item.nodeid), len(order)))


class _Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """The tests of a file run in one process, and so do files that share what takes long."""

    def _split_scope(self, nodeid: str) -> str:
        group = _group(nodeid)
        return nodeid if group in APART else group


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Together(config, log)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tied(checkpoints: Path) -> Path:
    """What the shared server starts with."""
    return make_checkpoint(checkpoints / "tied", seed=1)


@pytest.fixture(scope="session")
def other_tied(checkpoints: Path) -> Path:
    return make_checkpoint(checkpoints / "other_tied", seed=2)


@pytest.fixture(scope="session")
def server(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server on the CPU with one replica, for every test of a process that does not stop it.

    A test that pushes weights leaves it READY with those of `tied` (see `pushing`).
    """
    with running_server(tied, tmp_path_factory.mktemp("server")) as server:
        draw_scene(server.media / "scene.png")
        yield server


@pytest.fixture(scope="session")
def scene(server: RunningServer) -> Path:
    """A local image the shared server may read."""
    return server.media / "scene.png"


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model with its processor, seed 0."""
    from learner.models.toy import make_model  # seconds, which the pure tests can do without

    path = tmp_path_factory.mktemp("toy_checkpoint") / "model"
    make_model(path, seed=0)
    return path


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    """24 scenes to train on and 4 held out, seed 0."""
    return make_data(tmp_path_factory.mktemp("toy_data") / "data", train=24, val=4, seed=0)
