"""The token calls must carry, and when there must be one (SRV-06); no FastAPI here."""

import ipaddress
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import SecretStr

from rollout_server.settings import ServerSettings
from shared_contracts.errors import ContractError
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from shared_contracts.token_file import checked_token, read_token_file

logger = logging.getLogger(__name__)


def read_token(settings: ServerSettings, environment: Mapping[str, str]) -> SecretStr | None:
    """The token of `token_file` or of the environment, without white space around it.

    None where nothing gives one. Raises ContractError for one that cannot be used, and for
    two that differ.
    """
    found = _tokens(settings, environment)
    if not found:
        return None
    (where, token), *others = found.items()
    for other, value in others:
        if value != token:
            raise ContractError(
                where, f"it holds another token than {other}", "Give one of the two"
            )
    return SecretStr(token)


def _tokens(settings: ServerSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Every token that is given, by what gives it."""
    found = {where: read_token_file(path, where) for path, where in _files(settings, environment)}
    if (token := environment.get(TOKEN_VARIABLE)) is not None:
        found[TOKEN_VARIABLE] = checked_token(token, TOKEN_VARIABLE)
    return found


def _files(settings: ServerSettings, environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Files that a token is given in, and by what."""
    if settings.token_file is not None:
        yield settings.token_file, "token_file"
    if path := environment.get(TOKEN_FILE_VARIABLE):
        yield Path(path), TOKEN_FILE_VARIABLE


def check_access(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ContractError where others could reach the server and need no token.

    Warns of a file that other users may read.
    """
    for path, _ in _files(settings, environment):
        if os.path.isfile(path) and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("other users may read the token in %s; chmod 600 it", path)
    if read_token(settings, environment) is None and not is_loopback(settings.host):
        raise ContractError(
            "--host",
            f"{settings.host!r} can be reached from other machines, and there is no token",
            f"Give --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
