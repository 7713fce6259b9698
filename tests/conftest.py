"""Fixtures that several folders share; a started server serves the whole test run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.running_server import RunningServer, draw_scene, running_server
from tests.contract.toy_checkpoints import make_checkpoint


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
