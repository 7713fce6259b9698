"""Who generates, and where, in words: for the terminal and the run's record."""

from learner.config.schema import Config
from learner.rollout.colocate import Placement


def describe_backend(config: Config, placement: Placement | None) -> str:
    """One line. placement: of a colocated server, where one is started."""
    rollout = config.rollout_matching
    if rollout.backend == "hf":
        return "transformers, in the learner"
    if rollout.backend == "colocate":
        where = "" if placement is None else f" on {placement}"
        return f"a rollout server of the learner's own{where}"
    assert rollout.vllm.server is not None
    return ", ".join(server.base_url for server in rollout.vllm.server.servers)
