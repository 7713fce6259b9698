"""A plugin of pytest: prints the timeout that each collected test has of its own."""

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        marked = item.get_closest_marker("timeout")
        if marked is not None:
            print(f"timeout {marked.args[0]:g} {item.nodeid}")
