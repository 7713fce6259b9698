"""A plug-in of ms-swift 4.6 that attaches the repeat guard to `swift rollout` (REP-04).

    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON='{"enabled": true, ...}' \\
        swift rollout --external_plugins rollout_server/engines/vllm/swift_plugin.py ...

ms-swift imports this file in the server and in each process that builds an engine. The import adds
the logits processor to the arguments of every later engine and selects the model runner V1.
A triggered sequence ends with the end-of-sequence token; ms-swift's answers do not mark it.
"""

import os

from vllm.engine.arg_utils import EngineArgs

from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    PROCESSOR,
    V1_RUNNER,
    repeat_config_from_environment,
)
from shared_contracts.errors import ContractError

_complete = EngineArgs.__post_init__


def _complete_with_guard(args: EngineArgs) -> None:
    _complete(args)  # type: ignore[no-untyped-call]
    args.logits_processors = [*(args.logits_processors or []), PROCESSOR]


_config = repeat_config_from_environment(os.environ)
if _config is None:
    raise ContractError(CONFIG_JSON, "it is not set", f"Set it, or {CONFIG_JSON_PATH}")
if _config.enabled:
    os.environ.update(V1_RUNNER)
    EngineArgs.__post_init__ = _complete_with_guard  # type: ignore[method-assign]
