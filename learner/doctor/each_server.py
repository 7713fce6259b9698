"""All checks of the servers of a config, one server after another."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from transformers import AutoProcessor, ProcessorMixin

from learner.backends import transport_of
from learner.config.schema import Config
from learner.doctor import asking, gpus, ports, servers, versions, weights
from learner.doctor.findings import Finding, of_error, skipped
from learner.doctor.inputs import CHECKPOINT, Looked
from learner.doctor.sizes import Sizes
from learner.preflight import learner_processes
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import Info

# What waits for a server to answer and to let the learner in, in the order of the table.
_NEEDS_IT = (
    servers.SETTINGS,
    versions.CHECK,
    ports.ADDRESS,
    ports.GROUP_PORT,
    weights.RENDEZVOUS,
    weights.TENSOR,
    asking.MEDIA,
    asking.PROMPT,
    asking.ROLLOUT,
)

_OF_WEIGHTS = (ports.GROUP_PORT, weights.RENDEZVOUS, weights.TENSOR)


@dataclass(frozen=True)
class _Run:
    """What is known of the run. sizes, processor: None without a usable checkpoint."""

    config: Config
    samples: Sequence[Sample]
    sizes: Sizes | None
    processor: ProcessorMixin | None
    versions: Mapping[str, str]


def examine(
    config: Config,
    looked: Looked,
    sizes: Sizes | None,
    ours: Mapping[str, str],
    here: gpus.Here,
) -> Iterator[Finding]:
    """ours: versions of the learner. here: its GPUs."""
    server = config.rollout_matching.vllm.server
    assert server is not None, "checked with the config"
    with ExitStack() as closing:
        reached = [servers.reach(address, server, closing) for address in server.servers]
        yield from _all(config, looked, sizes, ours, here, reached)


def _all(
    config: Config,
    looked: Looked,
    sizes: Sizes | None,
    ours: Mapping[str, str],
    here: gpus.Here,
    reached: Sequence[servers.Reached],
) -> Iterator[Finding]:
    known = {one.address.base_url: one.info for one in reached if one.info is not None}
    if len(known) == len(reached):
        yield from _together(config, list(known.values()))
    else:
        yield skipped(servers.TOGETHER, "waits for all servers")
    yield from gpus.overlap(here, known)
    processor, broken = _processor(config, looked)
    yield from broken
    run = _Run(config, looked.samples, sizes, processor, ours)
    addresses: list[str] = []
    for one in reached:
        yield from one.findings
        if one.client is None or one.info is None:
            url = one.address.base_url
            failed = next(f.check for f in one.findings if f.status == "fail")
            waits = f"waits for {failed}"
            yield from (skipped(check, waits, url) for check in _NEEDS_IT)
            continue
        found, ip = ports.address(one.address.base_url, _host(one.address), one.info.host)
        if ip is not None:
            addresses.append(ip)
        yield from _one(run, one.client, one.info, one.address, found, ip)
    if (name := ports.own_name(addresses, os.environ)) is not None:
        yield name


def _together(config: Config, infos: Sequence[Info]) -> list[Finding]:
    try:
        processes = learner_processes(os.environ)
    except ContractError as error:
        return of_error(servers.TOGETHER, error)
    return servers.judge_together(config, infos, processes)


def _one(
    run: _Run,
    client: RolloutClient,
    info: Info,
    address: ServerAddress,
    reached_at: Finding,
    ip: str | None,
) -> Iterator[Finding]:
    url, transport = address.base_url, transport_of(run.config)
    yield from servers.judge_settings(run.config, url, info, transport)
    yield versions.compare(run.versions, info.versions, transport, url)
    yield reached_at
    yield from _way_of_weights(run, client, address, ip)
    if run.processor is None:
        later = (asking.MEDIA, asking.PROMPT, asking.ROLLOUT)
        yield from (skipped(check, "waits for the processor", url) for check in later)
        return
    yield from asking.check(run.config, client, run.samples, run.processor)


def _way_of_weights(
    run: _Run, client: RolloutClient, address: ServerAddress, ip: str | None
) -> Iterator[Finding]:
    """The server is asked again: since all were reached, a run may have come to push to it."""
    url = address.base_url
    try:
        info = client.info()
    except (ContractError, *SERVER_ERRORS) as error:
        yield Finding(ports.GROUP_PORT, url, "fail", str(error), "See the server's log")
        yield from _no_weights(url, ports.GROUP_PORT)
        return
    if (why := weights.untouchable(info)) is not None:
        yield from (skipped(check, why, url) for check in _OF_WEIGHTS)
        return
    if ip is None:
        yield skipped(ports.GROUP_PORT, f"waits for {ports.ADDRESS}", url)
        yield from _no_weights(url, ports.ADDRESS)
        return
    port = ports.group_port(url, ip, address.group_port)
    yield port
    waits = ""
    if port.status == "fail":
        waits = ports.GROUP_PORT
    elif run.sizes is None:
        waits = CHECKPOINT
    elif info.weight_transport != transport_of(run.config):
        waits = servers.SETTINGS
    if waits or run.sizes is None:
        yield from _no_weights(url, waits)
        return
    yield from weights.check(run.config, client, address.group_port, run.sizes)


def _no_weights(url: str, waits: str) -> Iterator[Finding]:
    for check in (weights.RENDEZVOUS, weights.TENSOR):
        yield skipped(check, f"waits for {waits}", url)


def _processor(config: Config, looked: Looked) -> tuple[ProcessorMixin | None, list[Finding]]:
    """The checkpoint's; else what is wrong with it, where nobody has said so yet."""
    if not looked.has_checkpoint:
        return None, []
    try:
        return AutoProcessor.from_pretrained(config.model.model), []
    except (OSError, ValueError) as error:
        do = "Give the folder of a checkpoint saved with its processor"
        return None, [Finding("processor", str(config.model.model), "fail", str(error), do)]


def _host(address: ServerAddress) -> str:
    host = urlsplit(address.base_url).hostname
    assert host is not None, "checked with the config"
    return host
