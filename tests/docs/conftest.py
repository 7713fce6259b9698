"""One prepared world, and one server, for every command of the documents."""

from collections.abc import Iterator

import pytest

from tests.docs.world import World, only


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("docs"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="session")
def served(world: World) -> World:
    """The world with the documented server of the CPU, the job that the documents stop."""
    world.serve(only("rollout-server", "cpu"), beside=only("kill"))
    return world
