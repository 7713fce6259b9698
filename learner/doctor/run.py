"""`learner doctor`: every check of a set-up, in the order in which they build on each other.

    files        checkpoint, data, images, run folder          inputs.py
    here         versions, GPUs, weights, memory               versions.py, gpus.py, room.py
    each server  http, token, settings, versions, GPUs         each_server.py, servers.py
                 address, group port, rendezvous, one tensor   ports.py, weights.py
                 media, prompt, rollout                        asking.py

A check that fails ends none but those that wait for it, which are `skipped`.
"""

import os
import socket
from collections.abc import Iterator

from learner.config.schema import Config
from learner.doctor import each_server, gpus, inputs, room, versions
from learner.doctor.findings import Finding, of_error, skipped
from learner.preflight import generates
from learner.rollout.colocate import Placement, visible_gpus
from shared_contracts.errors import ContractError
from shared_contracts.gpu_use import query_gpu_use

_SERVERS = "servers"


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, as it is made. Asks the config's servers for answers, and changes nothing."""
    looked = inputs.look(config)
    yield from looked.findings
    ours = versions.here()
    own_server = generates(config) and config.rollout_matching.backend == "colocate"
    yield versions.of_learner(ours, own_server)
    visible: list[int] | None = None
    try:
        visible = visible_gpus(os.environ)
    except ContractError as error:
        yield from of_error(gpus.CHECK, error)
    use = query_gpu_use() if visible else None
    if visible is not None:
        yield from gpus.learners(visible, use)
    placement = looked.whole.placement if looked.whole is not None else None
    weighed = room.weigh(config, looked, visible, use, placement)
    yield from weighed.findings
    if (why := _nobody_to_ask(config, placement)) is not None:
        yield skipped(_SERVERS, why)
        return
    here = gpus.Here(socket.gethostname(), visible or [], use)
    yield from each_server.examine(config, looked, weighed.sizes, ours, here)


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
