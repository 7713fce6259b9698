"""Who generates, and where, in words: for the terminal and the run's record."""

from collections.abc import Mapping

from learner.config.schema import Config
from learner.rollout.colocate import place, visible_gpus


def describe_backend(config: Config, environment: Mapping[str, str]) -> str:
    """One line; raises what `place` raises."""
    rollout = config.rollout_matching
    if rollout.backend == "hf":
        return "transformers, in the learner"
    if rollout.backend == "colocate":
        placement = place(rollout.vllm, visible_gpus(environment))
        return f"a rollout server of the learner's own on {placement}"
    assert rollout.vllm.server is not None
    return ", ".join(server.base_url for server in rollout.vllm.server.servers)
