"""`learner doctor`: every check of a set-up, in the order in which they build on each other.

    files        checkpoint, data, images, run folder          inputs.py
    here         trackers, versions, GPUs,                     inputs.py, machine.py,
                 weights, disk, memory                         memory.py
    each server  http, token, settings, versions, GPUs         servers.py, machine.py
                 address, group port                           weights.py
                 media, prompt, rollout                        servers.py

A check that fails ends none but those that wait for it, which are `skipped`.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from transformers import ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config
from learner.models.load import read_processor
from learner.operate.doctor import inputs, machine, memory, servers, weights
from learner.operate.doctor.findings import Finding, of_error, skipped
from learner.operate.doctor.inputs import Looked
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.colocate import Placement
from learner.training.backends import transport_of
from learner.training.start_checks import generates
from shared_contracts.errors import ContractError
from shared_contracts.machine import query_gpu_use, visible_gpus
from shared_contracts.rollout_config import ServerAddress

_SERVERS = "servers"


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, as it is made. Asks the config's servers for answers, and changes nothing."""
    disable_progress_bar()
    looked = inputs.look(config)
    yield from looked.findings
    yield from inputs.trackers(config, os.environ, Path.home())
    ours = machine.versions_here()
    own_server = generates(config) and config.rollout_matching.backend == "colocate"
    yield machine.versions_of_learner(ours, own_server)
    visible: list[int] | None = None
    try:
        visible = visible_gpus(os.environ)
    except ContractError as error:
        yield from of_error(machine.GPUS, error)
    use = query_gpu_use() if visible else None
    if visible is not None:
        yield from machine.gpus_of_learner(visible, use)
    placement = looked.whole.placement if looked.whole is not None else None
    weighed = memory.weigh(config, looked, visible, use, placement)
    yield from weighed.findings
    if (why := _nobody_to_ask(config, placement)) is not None:
        yield skipped(_SERVERS, why)
        return
    here = machine.Here(socket.gethostname(), visible or [], use)
    yield from _servers(config, looked, ours, here)


def _nobody_to_ask(config: Config, placement: Placement | None) -> str | None:
    """Why there is no server to look at, and what stands for it; None where there are some."""
    if not generates(config):
        return "the run asks for no rollouts (b_ratio 0, eval_strategy no)"
    match config.rollout_matching.backend:
        case "hf":
            return "rollout_backend hf generates in the learner: no server is asked"
        case "colocate":
            where = f" on {placement}" if placement is not None else ""
            return (
                f"colocate: `learner train` starts its own{where}, on free loopback ports, with a "
                "token of its own and the folders of the images; what can stand in its way is "
                "looked at above (versions, gpus, memory)"
            )
        case "server":
            return None


_OF_ANSWERS = (servers.MEDIA, servers.PROMPT, servers.ROLLOUT)
# What waits for a server to answer and to let the learner in, in the order of the table.
_NEEDS_IT = (
    servers.SETTINGS,
    machine.VERSIONS,
    weights.ADDRESS,
    weights.GROUP_PORT,
    *_OF_ANSWERS,
)


def _servers(
    config: Config, looked: Looked, ours: Mapping[str, str], here: machine.Here
) -> Iterator[Finding]:
    """ours: versions of the learner. here: its GPUs."""
    server = config.rollout_matching.vllm.server
    assert server is not None, "checked with the config"
    with ExitStack() as closing:
        reached = [servers.reach(each, server, closing) for each in server.servers]
        known = {one.address.base_url: one.info for one in reached if one.info is not None}
        if len(known) == len(reached):
            yield from servers.judge_together(config, list(known.values()))
        else:
            yield skipped(servers.TOGETHER, "waits for all servers")
        yield from machine.shared_gpus(here, known)
        processor: ProcessorMixin | None = None
        if looked.has_checkpoint:  # else it was told
            try:
                processor = read_processor(config.model.model)
            except (OSError, ValueError) as error:
                do = "Give the folder of a checkpoint saved with its processor"
                yield Finding("processor", str(config.model.model), "fail", str(error), do)
        needed = 0
        if looked.longest_prompt is not None:
            needed = looked.longest_prompt + config.rollout_matching.max_new_tokens
        addresses: list[str] = []
        for one in reached:
            yield from one.findings
            url, transport = one.address.base_url, transport_of(config)
            if one.client is None or one.info is None:
                failed = next(f.check for f in one.findings if f.status == "fail")
                yield from _skipped(_NEEDS_IT, f"waits for {failed}", url)
                continue
            host = urlsplit(url).hostname
            assert host is not None, "checked with the config"
            found, ip = weights.address(url, host, one.info.host)
            addresses += [ip] if ip is not None else []
            yield from servers.judge_settings(config, url, one.info, transport, needed)
            yield machine.compare_versions(ours, one.info.versions, url)
            yield found
            yield _way_of_weights(one.client, one.address, ip)
            if processor is None:
                yield from _skipped(_OF_ANSWERS, "waits for the processor", url)
            else:
                yield from servers.check_answers(config, one.client, looked.samples, processor)
    if (name := weights.own_name(addresses, os.environ)) is not None:
        yield name


def _skipped(checks: Sequence[str], why: str, url: str) -> Iterator[Finding]:
    return (skipped(check, why, url) for check in checks)


def _way_of_weights(client: RolloutClient, address: ServerAddress, ip: str | None) -> Finding:
    """The server is asked again: a run may have come to push to it meanwhile."""
    url = address.base_url
    try:
        warning = weights.owned(client.info(), url)
    except (ContractError, *SERVER_ERRORS) as error:
        return Finding(weights.GROUP_PORT, url, "fail", str(error), "See the server's log")
    if warning is not None:
        return warning
    if ip is None:
        return skipped(weights.GROUP_PORT, f"waits for {weights.ADDRESS}", url)
    return weights.group_port(url, ip, address.group_port)
