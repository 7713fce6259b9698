"""Whether servers can be started where a config says that they are."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Live
from shared_contracts.token_file import given_token

_SERVERS = "rollout_matching.vllm.server.servers"
_ELSEWHERE = (
    "Start that server where it is to run, with `rollout-server serve`, and then the learner "
    "with deploy/train_stage2.sh or `learner train`"
)
_LOOK_S = 2.0
_HTTP_PORT = 80
_EVERY_HOST = "0.0.0.0"


@dataclass(frozen=True)
class Listen:
    """Where a server listens. host: an IPv4 address of this machine."""

    base_url: str
    host: str
    port: int


def addresses_here(
    servers: Sequence[ServerAddress], environment: Mapping[str, str] = os.environ
) -> list[Listen]:
    """Where each server of the config will listen, on this machine, at ports that are free.

    Raises:
        ContractErrors: each that cannot, and why.
    """
    errors: list[ContractError] = []
    found: list[Listen] = []
    protected = _protected(environment, errors)
    for index, server in enumerate(servers):
        try:
            listen = _address(server.base_url, f"{_SERVERS}[{index}].base_url")
            _require_token(listen, protected)
            found.append(listen)
        except ContractError as error:
            errors.append(error)
            continue
        errors += _taken(listen, server.group_port, index)
    errors += _double(found, servers) if len(found) == len(servers) else []
    if errors:
        raise ContractErrors(errors)
    return found


def _address(base_url: str, where: str) -> Listen:
    parts = urlsplit(base_url)
    if parts.scheme != "http" or parts.path:
        found = f"{base_url}, and a server that is launched answers plain http without a path"
        raise ContractError(where, found, f"Write it like http://127.0.0.1:8000. {_ELSEWHERE}")
    assert parts.hostname, "checked with the config"
    port = parts.port or _HTTP_PORT
    try:
        host = socket.getaddrinfo(parts.hostname, port, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise ContractError(
            where, f"{base_url} is no known host ({error.strerror})", _ELSEWHERE
        ) from None
    assert isinstance(host, str), "of IPv4"
    if _refusal(host, 0) is not None:
        raise ContractError(where, f"{base_url} is another host than this one", _ELSEWHERE)
    return Listen(base_url, host, port)


def _protected(environment: Mapping[str, str], errors: list[ContractError]) -> bool:
    """Whether servers will want a token; one that cannot be used is told, and counts as one."""
    try:
        return given_token(environment) is not None
    except ContractError as error:
        errors.append(error)
        return True


def _require_token(listen: Listen, protected: bool) -> None:
    if ipaddress.ip_address(listen.host).is_loopback or protected:
        return
    raise ContractError(
        TOKEN_VARIABLE,
        f"not set, nor {TOKEN_FILE_VARIABLE}, and {listen.base_url} can be reached from other "
        "machines",
        "Set it to a secret of your own, such as 32 random characters; or use 127.0.0.1",
    )


def _taken(listen: Listen, group_port: int, index: int) -> Iterator[ContractError]:
    """Faults of the two ports of a server."""
    if (error := _refusal(listen.host, listen.port)) is not None:
        where = f"{_SERVERS}[{index}].base_url"
        if error.errno == errno.EADDRINUSE:
            found, do = _who_listens(listen.base_url)
        else:
            found = f"port {listen.port} cannot be listened at ({error.strerror})"
            do = "Give the server another port"
        yield ContractError(where, found, do)
    if (error := _refusal(listen.host, group_port)) is not None:
        yield ContractError(
            f"{_SERVERS}[{index}].group_port",
            f"port {group_port} of {listen.host} cannot be listened at ({error.strerror})",
            "Give the server another group_port, or end what listens there "
            f"(`ss -ltnp sport = :{group_port}` names it)",
        )


def _who_listens(base_url: str) -> tuple[str, str]:
    """What was found at a port that is taken, and what to do.

    Whose port it is is not known yet, so it is not told the token.
    """
    try:
        answer = httpx.get(f"{base_url}/live/", timeout=_LOOK_S, trust_env=False)
        Live.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPError, ValidationError):
        port = urlsplit(base_url).port or _HTTP_PORT
        return (
            f"another program listens at {base_url}",
            f"Stop it (`ss -ltnp sport = :{port}` names it), or give the server another port",
        )
    return (
        f"a rollout server is up at {base_url} already, and `learner launch` starts its own",
        "Stop that server; or keep it, and start the learner alone with "
        "deploy/train_stage2.sh or `learner train`",
    )


def _double(found: Sequence[Listen], servers: Sequence[ServerAddress]) -> Iterator[ContractError]:
    """Ports that two servers would share, or the two uses of one server."""
    seen: list[tuple[str, int, str]] = []
    for index, (listen, server) in enumerate(zip(found, servers, strict=True)):
        for key, port in (("base_url", listen.port), ("group_port", server.group_port)):
            where = f"{_SERVERS}[{index}].{key}"
            other = next((w for h, p, w in seen if p == port and _meet(h, listen.host)), None)
            if other is not None:
                yield ContractError(
                    where, f"port {port} of {listen.host} is that of {other} too", "Give another"
                )
            seen.append((listen.host, port, where))


def _meet(host: str, other: str) -> bool:
    """Whether two that listen there would take one port from each other."""
    return host == other or _EVERY_HOST in (host, other)


def _refusal(host: str, port: int) -> OSError | None:
    """Why this machine does not let one listen there, as a server would; None if it does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            return error
    return None
