"""Fixtures that several folders share, how hypothesis runs, and which tests stay together.

A started server serves the whole test run.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.contract.running_server import RunningServer, draw_scene, running_server
from tests.contract.toy_checkpoints import make_checkpoint

# How many examples a property is tried with: the same ones in every run of CI, new ones in every
# run of `pytest --hypothesis-profile=nightly`, and few for each mutant of `make mutants`, of which
# it is enough to know that one of them fails. No deadlines: machines differ in speed.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=500)
settings.register_profile("nightly", deadline=None, max_examples=20_000)
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci")


# Two processes share two cores (`make test`): each keeps to one, and what it starts too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Files outside of `contract` that use a fixture of the whole run.
_SHARING = {"test_async": "server", "test_doctor": "server", "test_kills": "server"} | {
    "test_network_cut": "hosts",
    "test_two_hosts": "hosts",
    "test_commands": "docs",
    "test_outputs": "docs",
}


class _Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """The tests of a file run in one process, and so do files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return "server" if file.parent.name == "contract" else _SHARING.get(file.stem, str(file))


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
    """One server on the CPU with one replica, for every test that does not stop it.

    A test that pushes weights leaves it READY with those of `tied` (see `pushing`).
    """
    with running_server(tied, tmp_path_factory.mktemp("server")) as server:
        draw_scene(server.media / "scene.png")
        yield server


@pytest.fixture(scope="session")
def scene(server: RunningServer) -> Path:
    """A local image the shared server may read."""
    return server.media / "scene.png"
