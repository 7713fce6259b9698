"""The address of a gloo group's network device."""

import socket

from shared_contracts.machine import address_towards


def test_loopback_is_reached_over_loopback() -> None:
    assert address_towards("127.0.0.1") == address_towards("localhost") == "127.0.0.1"


def test_it_is_an_address_that_can_be_listened_on() -> None:
    with socket.create_server((address_towards("127.0.0.2"), 0)) as listener:
        assert listener.getsockname()[0].startswith("127.")
