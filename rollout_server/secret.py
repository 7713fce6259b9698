"""The token calls must carry, and when there must be one (SRV-06); no FastAPI here."""

import ipaddress
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from rollout_server.settings import ServerSettings
from shared_contracts.errors import ContractError
from shared_contracts.server_info import TOKEN_VARIABLE

logger = logging.getLogger(__name__)


def read_token(settings: ServerSettings, environment: Mapping[str, str]) -> SecretStr | None:
    """The token of `token_file` or of ROLLOUT_SERVER_TOKEN, without white space around it.

    None where neither is given. Raises ContractError for one that cannot be used, and for
    two that differ.
    """
    in_file = None if settings.token_file is None else _token_in(settings.token_file)
    in_variable = environment.get(TOKEN_VARIABLE)
    if in_variable is not None:
        in_variable = _checked(in_variable, TOKEN_VARIABLE)
    if in_file and in_variable and in_file != in_variable:
        raise ContractError(
            "token_file", f"it holds another token than {TOKEN_VARIABLE}", "Give one of the two"
        )
    token = in_file or in_variable
    return None if token is None else SecretStr(token)


def check_access(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ContractError where others could reach the server and need no token."""
    if read_token(settings, environment) is None and not is_loopback(settings.host):
        raise ContractError(
            "--host",
            f"{settings.host!r} can be reached from other machines, and there is no token",
            f"Give --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_in(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read()
            mode = os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ContractError(
            "token_file", f"{path} cannot be read ({reason})", "Name a readable text file"
        ) from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("other users may read the token in %s; chmod 600 it", path)
    return _checked(content, "token_file")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise ContractError(where, "the token is empty", "Write one, such as 32 random characters")
    if not all("!" <= letter <= "~" for letter in token):
        raise ContractError(
            where,
            "the token holds white space or other characters a header does not carry",
            "Use letters and digits",
        )
    return token
