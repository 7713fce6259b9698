"""What the product uses of vLLM: every name, in one room (SRV-02).

A new release of vLLM that breaks the server shows here, or in the tests of a push.
"""

import ast
from importlib import import_module
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

# Attributes of vLLM's objects that are no members of the class `AsyncLLM`: its instances have the
# first two, layers of a model the others, which `push_engine` uses on the CPU alone.
ATTRIBUTES = ["model_config", "renderer"]
ATTRIBUTES += [
    "base_layer",
    "moe_kernel",
    "process_weights_after_loading",
    "quant_method",
    "weight",
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
    parts = [name.rpartition(".") for name in found]
    assert [own for module, _, own in parts if not hasattr(import_module(module), own)] == []


def attributes_in(file: Path) -> set[str]:
    """Return the attributes of a room's `_llm`, and of a model's layers, that a module uses."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            of, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of, name = node.args[0], ast.unparse(node.args[1]).strip("'")
        else:
            continue
        if ast.unparse(of) in ("self._llm", "llm", "module", "method"):
            found.add(name)
    return found


def test_every_attribute_that_is_no_member_of_the_engine_class_is_listed() -> None:
    engine = import_module("vllm.v1.engine.async_llm").AsyncLLM
    found = {name for file in ROOM.glob("*.py") for name in attributes_in(file)}
    assert len(found) > len(ATTRIBUTES)
    assert sorted(name for name in found if not hasattr(engine, name)) == sorted(ATTRIBUTES)
