"""The engines by name: each a package behind `engine_protocol`."""

from importlib import import_module
from typing import cast

from rollout_server.engines.engine_protocol import EnginePackage

ENGINES = {"vllm": "rollout_server.engines.vllm"}
DEFAULT_ENGINE = "vllm"


def engine_package(name: str = DEFAULT_ENGINE) -> EnginePackage:
    """The package of an engine."""
    return cast(EnginePackage, import_module(ENGINES[name]))
