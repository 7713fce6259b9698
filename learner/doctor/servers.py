"""Whether a server answers, lets the learner in, and is what the config takes it for."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from learner.config.schema import Config
from learner.doctor.findings import Finding, of_error, ok, skipped
from learner.preflight import differences
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.distribution import rank_chunk_size
from shared_contracts.errors import ContractError
from shared_contracts.rollout_config import ServerAddress, ServerConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Info
from shared_contracts.token_file import given_token
from shared_contracts.weights import Transport

HTTP, TOKEN, SETTINGS, TOGETHER = "http", "token", "settings", "servers together"
# How long a server that is not there is waited for; a run waits for `timeout_s`.
PATIENCE_S = 5.0
_UNAUTHORIZED = 401
_WAITS = f"waits for {TOKEN}"


@dataclass(frozen=True)
class Reached:
    """info: None where the server is not there, not ready or lets nobody in."""

    address: ServerAddress
    findings: list[Finding]
    client: RolloutClient | None = None
    info: Info | None = None


def reach(address: ServerAddress, server: ServerConfig, closing: ExitStack) -> Reached:
    """Look at a server's health and token, and ask what it is.

    closing: closes the connections at its end.
    """
    url = address.base_url
    try:
        given_by = _token_source(os.environ)
    except ContractError as error:
        return Reached(address, [*of_error(TOKEN, error, url), skipped(HTTP, _WAITS, url)])
    client = RolloutClient(url, server.timeout_s, server.infer_timeout_s)
    closing.callback(client.close)
    try:
        with RolloutClient(url, min(server.timeout_s, PATIENCE_S)) as looking:
            looking.wait_until_pushable()
    except ContractError as error:
        return Reached(address, of_error(HTTP, error, url))
    there = ok(HTTP, "healthy", url)
    try:
        wanted = _wants_token(url)
        info = client.info()
    except ContractError as error:
        return Reached(address, [there, *of_error(TOKEN, error, url)])
    except (httpx.HTTPError, *SERVER_ERRORS) as error:
        do = "See that nothing but a rollout server of this release answers there"
        return Reached(address, [there, Finding(TOKEN, url, "fail", str(error), do)])
    return Reached(address, [there, judge_token(wanted, given_by, url)], client, info)


def _token_source(environment: Mapping[str, str]) -> str:
    """The variable that gives the token of calls; empty without one.

    Raises ContractError for a token that cannot be read or sent.
    """
    if given_token(environment) is None:
        return ""
    return TOKEN_FILE_VARIABLE if environment.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE


def judge_token(wanted: bool, given_by: str, url: str) -> Finding:
    """Of a token that the server did not refuse. given_by: its variable; empty without one."""
    if wanted or not given_by:
        return ok(TOKEN, "accepted" if wanted else "none is wanted, none is given", url)
    found = f"{given_by} is set, and the server takes calls without a token"
    do = "Start the server with the token too, or unset it here"
    return Finding(TOKEN, url, "warn", found, do)


def judge_settings(config: Config, url: str, info: Info, transport: Transport) -> list[Finding]:
    """The server's settings beside those of the config."""
    wrong = differences(config, url, info)
    findings = [finding for error in wrong for finding in of_error(SETTINGS, error)]
    if info.weight_transport != transport:
        findings.append(
            Finding(
                SETTINGS,
                url,
                "fail",
                f"its weights travel over {info.weight_transport}, the learner's over {transport}",
                "Start it with `--run-config` and the YAML of this run, or set "
                "rollout_matching.vllm.sync.transport",
            )
        )
    return findings or [ok(SETTINGS, describe(info), url)]


def judge_together(config: Config, infos: Sequence[Info], processes: int) -> list[Finding]:
    """Whether the servers together can keep every learner process busy (DIST-04).

    processes: as WORLD_SIZE says, which only a launcher sets.
    """
    batch, sizes = config.rollout_matching.decode_batch_size, [info.world_size for info in infos]
    try:
        each = rank_chunk_size(batch, sizes, processes)
    except ContractError as error:
        return of_error(TOGETHER, error)
    found = (
        f"{sum(sizes)} devices; with {processes} learner process(es), which WORLD_SIZE=N says "
        f"otherwise, {each} requests at once of each"
    )
    return [ok(TOGETHER, found)]


def describe(info: Info) -> str:
    guard = "on" if info.repeat_terminate.active else "off"
    return (
        f"{Path(info.model).name}, {len(info.replicas)} replica(s) on {info.world_size} device(s), "
        f"weights {info.weights_version} {info.weights_state}, repeat guard {guard}"
    )


def _wants_token(url: str) -> bool:
    """Whether a call without one is refused."""
    answer = httpx.get(f"{url}/info/", timeout=PATIENCE_S, trust_env=False)
    return answer.status_code == _UNAUTHORIZED
