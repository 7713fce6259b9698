"""The typed configuration of a training run (section 6 of the contract)."""

from learner.config.load import dump_resolved, load_config, load_mapping, parse_config
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from shared_contracts.yaml12 import merge

__all__ = [
    "Config",
    "dump_mapping",
    "dump_resolved",
    "load_config",
    "load_mapping",
    "merge",
    "parse_config",
]
