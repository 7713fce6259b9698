"""What the product uses of vLLM: every name, in one room (SRV-02).

A new release of vLLM that breaks the server shows here, or in the tests of a push.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "rollout_server" / "engines" / "vllm"

# On a page of vLLM 0.32's documentation.
DOCUMENTED = [
    "vllm.config.VllmConfig",
    "vllm.config.weight_transfer.WeightTransferConfig",
    "vllm.distributed.weight_transfer.WeightTransferEngine",
    "vllm.distributed.weight_transfer.WeightTransferEngineFactory",
    "vllm.distributed.weight_transfer.base.WeightTransferInitInfo",
    "vllm.distributed.weight_transfer.base.WeightTransferInitRequest",
    "vllm.distributed.weight_transfer.base.WeightTransferUpdateInfo",
    "vllm.distributed.weight_transfer.base.WeightTransferUpdateRequest",
    "vllm.engine.arg_utils.AsyncEngineArgs",
    "vllm.engine.arg_utils.EngineArgs",
    "vllm.lora.request.LoRARequest",
    "vllm.model_executor.model_loader.reload.finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.initialize_layerwise_reload",
    "vllm.outputs.CompletionOutput",
    "vllm.outputs.RequestOutput",
    "vllm.sampling_params.RequestOutputKind",
    "vllm.sampling_params.SamplingParams",
    "vllm.v1.engine.async_llm.AsyncLLM",
]
# In its source alone, or in the generated reference.
UNDOCUMENTED = [
    "vllm.entrypoints.launchers.api_server.app_state.init_app_state",
    "vllm.entrypoints.launchers.cli_args.make_arg_parser",
    "vllm.entrypoints.openai.chat_completion.api_router.router",
    "vllm.entrypoints.openai.models.api_router.router",
    "vllm.entrypoints.serve.exception_handling.register.init_exception_handler",
    "vllm.exceptions.VLLMClientError",
    "vllm.renderers.params.ChatParams",
    "vllm.v1.sample.logits_processor.LogitsProcessor",
]

pytestmark = pytest.mark.req("SRV-02")


def names_in(file: Path) -> set[str]:
    """Return every name that a module imports from vLLM."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


def test_every_name_of_vllm_is_listed() -> None:
    found = {name for file in ROOM.glob("*.py") for name in names_in(file)}
    assert sorted(found) == sorted([*DOCUMENTED, *UNDOCUMENTED])
    assert len(found) <= 30
    assert len(UNDOCUMENTED) <= 8
