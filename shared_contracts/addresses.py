"""Which address of this machine another one is reached from."""

import socket

_ANY_PORT = 9


def address_towards(host: str) -> str:
    """This machine's IP address on its route to `host`; `host`'s own where that is here.

    Raises OSError when there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # UDP: chooses a route, sends nothing
        address: str = probe.getsockname()[0]
    return address
