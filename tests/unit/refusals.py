"""The check of a refusal, which has three parts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared_contracts.errors import ContractError


@contextmanager
def refused(where: str, found: str = "", do: str = "") -> Iterator[None]:
    """The block raises one ContractError at `where`; its other parts contain `found` and `do`."""
    with pytest.raises(ContractError) as caught:
        yield
    (error,) = caught.value.errors
    assert error.where == where
    assert found in error.found
    assert do in error.do
