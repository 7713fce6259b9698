"""The refusal of a bad input."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared_contracts.errors import ContractError


@contextmanager
def refused(where: str, found: str = "", do: str = "") -> Iterator[None]:
    """The block raises a `ContractError` at this place; found, do: patterns in its other parts."""
    with pytest.raises(ContractError) as caught:
        yield
    assert caught.value.where == where
    assert re.search(found, caught.value.found)
    assert re.search(do, caught.value.do)
