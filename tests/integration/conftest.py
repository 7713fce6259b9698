"""Two hosts that the tests of the network share."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.far_server import FarServer, ended
from tests.integration.two_hosts import Host, NotAllowed, two_hosts


@dataclass(frozen=True)
class Far:
    """A healthy rollout server, the host it is on, and another one that reaches it by a cable."""

    server: FarServer
    here: Host
    there: Host
    checkpoint: Path


@pytest.fixture(scope="session")
def far(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    """Skips where this machine lets nobody make network namespaces.

    A test leaves the cable whole and the server READY.
    """
    try:
        with two_hosts() as (here, there):
            server = FarServer(here, tied, tmp_path_factory.mktemp("far"))
            with ended(server.process):
                server.wait_for(200)
                yield Far(server, here, there, tied)
    except NotAllowed as reason:
        pytest.skip(str(reason))
