"""Runs that use the one server all tests share: its address, and its first weights given back."""

from pathlib import Path
from typing import Any

from learner.rollout.server_process import free_ports
from tests.contract.running_server import RunningServer
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group


def address_of(base_url: str) -> dict[str, Any]:
    """An entry of `rollout_matching.vllm.server.servers`, with a free port for the group."""
    (group_port,) = free_ports(1)
    return {"base_url": base_url, "group_port": group_port}


def give_back(server: RunningServer, checkpoint: Path) -> None:
    """Push the weights that the shared server started with."""
    version = server.http.get("/info/").json()["weights_version"] + 1
    (port,) = free_ports(1)
    with weight_group(server.http, port, timeout_s=30.0) as sender:
        push(server.http, sender, read_weights(checkpoint), version)
