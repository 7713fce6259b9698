"""Errors of loading: transformers tells in five types what a checkpoint folder lacks."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from shared_contracts.errors import ContractError

_OF_THE_FOLDER = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)


@contextmanager
def loading(where: str, what: str, fix: str) -> Iterator[None]:
    """Raise ContractError for what cannot be loaded in the block.

    where: what a person named; what: is loaded; fix: what to do.
    """
    try:
        yield
    except _OF_THE_FOLDER as error:
        raise ContractError(where, f"{what} cannot be loaded ({error})", fix) from error
