"""Whether a server answers, lets the learner in, and is what the config takes it for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from learner.config.schema import Config
from learner.doctor.findings import Finding, of_error, ok
from learner.preflight import differences
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.distribution import rank_chunk_size
from shared_contracts.errors import ContractError
from shared_contracts.rollout_config import ServerAddress, ServerConfig
from shared_contracts.server_info import TOKEN_VARIABLE, Info
from shared_contracts.weights import Transport

HTTP, TOKEN, SETTINGS, TOGETHER = "http", "token", "settings", "servers together"
# How long a server that is not there is waited for; a run waits for `timeout_s`.
PATIENCE_S = 5.0
_UNAUTHORIZED = 401


@dataclass(frozen=True)
class Reached:
    """info: None where the server is not there, not ready or lets nobody in."""

    address: ServerAddress
    findings: list[Finding]
    client: RolloutClient | None = None
    info: Info | None = None


def reach(address: ServerAddress, server: ServerConfig, token: str) -> Reached:
    """Look at a server's health and token, and ask what it is.

    token: of the environment, empty without one.
    """
    url = address.base_url
    try:
        client = RolloutClient(url, server.timeout_s, server.infer_timeout_s)
        with RolloutClient(url, min(server.timeout_s, PATIENCE_S)) as looking:
            looking.wait_until_pushable()
    except ContractError as error:
        check = TOKEN if error.where == TOKEN_VARIABLE else HTTP
        return Reached(address, of_error(check, error, url))
    there = ok(HTTP, "healthy", url)
    try:
        wanted = _wants_token(url)
        info = client.info()
    except ContractError as error:
        return Reached(address, [there, *of_error(TOKEN, error, url)])
    except (httpx.HTTPError, *SERVER_ERRORS) as error:
        do = "See that nothing but a rollout server of this release answers there"
        return Reached(address, [there, Finding(TOKEN, url, "fail", str(error), do)])
    return Reached(address, [there, judge_token(wanted, bool(token), url)], client, info)


def judge_token(wanted: bool, given: bool, url: str) -> Finding:
    """Of a token that the server did not refuse."""
    if wanted or not given:
        return ok(TOKEN, "accepted" if wanted else "none is wanted, none is given", url)
    found = f"{TOKEN_VARIABLE} is set, and the server takes calls without a token"
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
    """Whether the servers together can keep every learner process busy (DIST-04)."""
    batch, sizes = config.rollout_matching.decode_batch_size, [info.world_size for info in infos]
    try:
        each = rank_chunk_size(batch, sizes, processes)
    except ContractError as error:
        return of_error(TOGETHER, error)
    return [ok(TOGETHER, f"{sum(sizes)} devices, {each} requests at once of each process")]


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
