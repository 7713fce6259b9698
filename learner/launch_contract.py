"""What a launcher in shell needs of a training YAML, as shell assignments (CFG-09).

ROLLOUT_CONTRACT_JSON      one line of JSON and a newline: `rollout_contract`
ROLLOUT_SERVER_TIMEOUT_S   seconds a rollout server may take to answer; empty without one
"""

import json
import shlex
from typing import TypedDict

from learner.config import Config
from shared_contracts.rollout_config import ServerConfig


class RolloutContract(TypedDict):
    """vllm_mode: `colocate` or `server`, None without vLLM; server_base_urls: as declared."""

    rollout_backend: str
    vllm_mode: str | None
    server_base_urls: list[str]


def rollout_contract(config: Config) -> RolloutContract:
    """Which backend generates, and its servers, also of a run that asks them nothing."""
    rollout = config.rollout_matching
    server = _server(config)
    return {
        "rollout_backend": rollout.rollout_backend,
        "vllm_mode": None if rollout.backend == "hf" else rollout.vllm.mode,
        "server_base_urls": [entry.base_url for entry in server.servers] if server else [],
    }


def shell_assignments(config: Config) -> str:
    """Text that assigns the variables in any POSIX shell that evaluates it."""
    server = _server(config)
    values = {
        "ROLLOUT_CONTRACT_JSON": f"{json.dumps(rollout_contract(config))}\n",
        "ROLLOUT_SERVER_TIMEOUT_S": str(server.timeout_s) if server else "",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _server(config: Config) -> ServerConfig | None:
    """How to reach the servers, of a run that has some."""
    rollout = config.rollout_matching
    return rollout.vllm.server if rollout.backend == "server" else None
