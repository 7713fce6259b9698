"""Fixtures that several folders share, how hypothesis runs, and which tests one process runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from learner.data.toy import ToyData, make_data
from tests.contract.running_server import RunningServer, draw_scene, running_server
from tests.contract.toy_checkpoints import make_checkpoint
from tests.integration.ranks import Nursery, nursery

# How many examples a property is tried with: the same 25 in every run, the same 100 in CI, new
# ones with `--hypothesis-profile=nightly`, and for `make mutants` enough to see one fail. No
# deadlines: machines differ.
settings.register_profile("local", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("ci", settings.get_profile("local"), max_examples=100)
settings.register_profile("nightly", deadline=None, max_examples=20_000)
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# Sums depend on the number of threads: one here, and one in every process that a test starts.
torch.set_num_threads(1)
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process; those of the shared server or `tests/gpu`, too."""
    folder = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(folder)
        own = vars(item.module) if isinstance(item, pytest.Function) else {}
        shares = "server" in getattr(item, "fixturenames", ()) and "server" not in own
        # Two tests on the same GPUs at once would disturb each other.
        group = "gpu" if file.parts[0] == "gpu" else "server" if shares else str(file)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tied(checkpoints: Path) -> Path:
    """Options of the shared server."""
    return make_checkpoint(checkpoints / "tied", seed=1)


@pytest.fixture(scope="session")
def other_tied(checkpoints: Path) -> Path:
    return make_checkpoint(checkpoints / "other_tied", seed=2)


@pytest.fixture(scope="session")
def server(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server on the CPU with one replica, for every test of a run that does not stop it.

    A test that pushes weights leaves it READY with those of `tied` (see `pushing`).
    """
    with running_server(tied, tmp_path_factory.mktemp("server"), "--openai") as server:
        draw_scene(server.media / "scene.png")
        yield server


@pytest.fixture(scope="session")
def scene(server: RunningServer) -> Path:
    """A local image the shared server may read."""
    return server.media / "scene.png"


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts processes of `learner` quickly."""
    with nursery(tmp_path_factory.mktemp("nursery")) as ranks:
        yield ranks


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
