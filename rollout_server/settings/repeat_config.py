"""The repeat guard's settings in environment variables (REP-04): written here, read here.

    COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION     1 switches the guard on
    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON          its settings, a JSON mapping
    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH     a file with the same; overrides it

An empty variable is one that is not set.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.strict_model import contract_errors, joined, shown

INJECTION = "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"
CONFIG_JSON = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
CONFIG_JSON_PATH = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"

# The classes vLLM is given, by name, for its model runners V1 and V2, and the key of a
# request's own settings.
PROCESSOR = "rollout_server.engines.vllm.repeat_processor:RepeatProcessor"
PROCESSOR_V2 = f"{PROCESSOR}V2"
EXTRA_ARG = "repeat_terminate"

# What to look at where the guard does not work.
ACTIVATION = (
    f"It is activated by the logits processor {PROCESSOR} (vLLM's logits_processors), with "
    f"{INJECTION}=1 and {CONFIG_JSON} in the engine's environment: make sure that all three "
    "reach the engine, or set repeat_terminate.enabled to false"
)


def repeat_environment(config: RepeatTerminateConfig) -> dict[str, str]:
    """Return the variables for `config`; they replace those of the environment."""
    if not config.enabled:
        return {INJECTION: "0", CONFIG_JSON: "", CONFIG_JSON_PATH: ""}
    return {INJECTION: "1", CONFIG_JSON: config.model_dump_json(), CONFIG_JSON_PATH: ""}


def repeat_config_from_environment(environ: Mapping[str, str]) -> RepeatTerminateConfig | None:
    """Read the settings in `environ`; None if the guard is not switched on.

    Raises ContractError naming the variable that is missing or wrong.
    """
    switch = environ.get(INJECTION, "")
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise ContractError(INJECTION, f"{shown(switch)} is not accepted", "Use 1, or 0 for off")
    if path := environ.get(CONFIG_JSON_PATH):
        return _parse(CONFIG_JSON_PATH, _read(Path(path)))
    if text := environ.get(CONFIG_JSON):
        return _parse(CONFIG_JSON, text)
    raise ContractError(
        CONFIG_JSON, f"it is not set and {INJECTION} is 1", f"Set it, or {CONFIG_JSON_PATH}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        reason = f"{path} is not UTF-8 ({error.reason})"
    raise ContractError(CONFIG_JSON_PATH, reason, "Name a readable JSON file")


def _parse(variable: str, text: str) -> RepeatTerminateConfig:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ContractError(variable, f"it is not JSON ({error})", "Correct it") from None
    return validated(variable, content)


def validated(where: str, content: object) -> RepeatTerminateConfig:
    """Validate `content`; raises ContractErrors with every fault below `where`."""
    try:
        return RepeatTerminateConfig.model_validate(content)
    except ValidationError as error:
        found = contract_errors(error, RepeatTerminateConfig)
        raise ContractErrors(
            [ContractError(joined(where, fault.where), fault.found, fault.do) for fault in found]
        ) from None
