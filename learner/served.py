"""What a valid config may ask for and this version does not run yet.

The configuration covers the whole contract; a run stops here, before it loads anything.
"""

from collections.abc import Iterator

from learner.config.schema import Config
from shared_contracts.errors import ContractError, ContractErrors


def check_served(config: Config) -> None:
    """Raise ContractErrors naming every key whose value is not run yet."""
    if errors := list(_not_served(config)):
        raise ContractErrors(errors)


def _not_served(config: Config) -> Iterator[ContractError]:
    if config.rollout_matching.async_rollout.enabled:
        yield _refused("rollout_matching.async_rollout.enabled", "true", "Set it to false")


def _refused(where: str, value: str, do: str) -> ContractError:
    return ContractError(where, f"{value} is valid, but this version does not run it yet", do)
