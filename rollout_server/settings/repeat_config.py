"""The repeat guard's settings in environment variables (REP-04).

    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON          the settings, a JSON mapping
    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH     a file with the same; overrides it
    COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION     0 refuses settings that are enabled

`enabled` in the settings decides whether the guard is on. An empty variable counts as unset.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.strict_model import contract_errors, shown

INJECTION = "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"
CONFIG_JSON = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
CONFIG_JSON_PATH = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"

# The class that vLLM loads by name, and the model runner whose interface the class has.
PROCESSOR = "rollout_server.engines.vllm.repeat_processor:RepeatProcessor"
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

# The remedy if the guard is inactive.
ACTIVATION = (
    f"It is activated by the logits processor {PROCESSOR} (vLLM's logits_processors), with "
    f"{CONFIG_JSON} and VLLM_USE_V2_MODEL_RUNNER=0 in the engine's environment: make sure that "
    "all three reach the engine, or set repeat_terminate.enabled to false"
)


def repeat_environment(config: RepeatTerminateConfig) -> dict[str, str]:
    """Return the variables for `config`; they replace those of the environment."""
    own = {INJECTION: "", CONFIG_JSON: config.model_dump_json(), CONFIG_JSON_PATH: ""}
    return own | V1_RUNNER if config.enabled else own


def repeat_config_from_environment(environ: Mapping[str, str]) -> RepeatTerminateConfig | None:
    """Return the settings in `environ`, or None.

    Raises ContractError at the variable that is missing, invalid or contradicts the settings.
    """
    switch = environ.get(INJECTION, "")
    if switch not in ("", "0", "1"):
        raise ContractError(INJECTION, f"{shown(switch)} is not accepted", "Use 0 or 1")
    if path := environ.get(CONFIG_JSON_PATH):
        source, text = CONFIG_JSON_PATH, _read(Path(path))
    elif text := environ.get(CONFIG_JSON, ""):
        source = CONFIG_JSON
    elif switch == "1":
        found, do = f"it is not set and {INJECTION} is 1", f"Set it, or {CONFIG_JSON_PATH}"
        raise ContractError(CONFIG_JSON, found, do)
    else:
        return None
    try:
        config = RepeatTerminateConfig.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise ContractError(source, f"it is not JSON ({error})", "Correct it") from None
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, RepeatTerminateConfig, source)) from None
    refuse_switched_off(environ, config, source)
    return config


def refuse_switched_off(
    environ: Mapping[str, str], config: RepeatTerminateConfig, source: str
) -> None:
    """Raise ContractError if the switch is 0 and `config`, of `source`, is enabled."""
    if config.enabled and environ.get(INJECTION) == "0":
        found, do = f"it is 0 and {source} has enabled: true", "Unset it, or set enabled to false"
        raise ContractError(INJECTION, found, do)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path} cannot be read ({error})"
        raise ContractError(CONFIG_JSON_PATH, found, "Name a readable JSON file") from None
