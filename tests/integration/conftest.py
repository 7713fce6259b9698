"""Learner processes that start quickly."""

from collections.abc import Iterator

import pytest

from tests.integration.ranks import Nursery, nursery


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as ranks:
        yield ranks
