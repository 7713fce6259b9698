"""What the product uses of vLLM: every name, in one room (SRV-02).

A new release of vLLM that breaks the server shows here, or in the tests of a push.
"""

import ast
import dataclasses
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import learner.api
from learner.types import MatchResult, ParsedObject, ParsedRollout, Target

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


def names_in(file: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


@pytest.mark.req("SRV-02")
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


@pytest.mark.req("SRV-02")
def test_every_attribute_that_is_no_member_of_the_engine_class_is_listed() -> None:
    engine = import_module("vllm.v1.engine.async_llm").AsyncLLM
    found = {name for file in ROOM.glob("*.py") for name in attributes_in(file)}
    assert len(found) > len(ATTRIBUTES)
    assert sorted(name for name in found if not hasattr(engine, name)) == sorted(ATTRIBUTES)


# Required positional parameters, in order.
FUNCTIONS = {
    "ContractError": "where found do",
    "RepeatGuard": "config object_key_token_ids",
    "build_target": "parsed ground_truth match tokenizer field_order",
    "channel_for_step": "step b_ratio",
    "decode_bin": "k",
    "encode_bin": "c",
    "load_config": "path",
    "mask_iou": "a b resolution",
    "match_objects": "predicted ground_truth config",
    "parse_rollout": "token_ids tokenizer",
    "plan_chunks": "n world_sizes",
    "plan_packs": "lengths capacity min_fill",
    "rank_chunk_size": "decode_batch_size world_sizes learner_world_size",
    "request_seed": "base micro_step_idx req_idx",
    "rollout_seed_base": "training_seed global_step",
    "select_segments": "lengths capacity",
    "serialize_append": "prefix_text objects start_index field_order",
    "sinkhorn_barycentric": "pred_points gt_points cost epsilon iters",
}
FIELDS: dict[Any, str] = {
    ParsedRollout: "objects dropped prefix_token_ids max_object_index truncated invalid_rollout",
    ParsedObject: "key index kind coords desc coord_token_indices token_span",
    MatchResult: "pairs false_positives false_negatives gated mask_iou",
    Target: "token_ids prefix_len fn_keys role",
}


@pytest.mark.req("ARCH-02")
def test_the_module_has_the_agreed_names_and_no_others() -> None:
    assert sorted(learner.api.__all__) == sorted([*FUNCTIONS, "RepeatTerminateConfig"])


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_takes_the_agreed_parameters_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(learner.api, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty]
    assert positional == required == FUNCTIONS[name].split()


@pytest.mark.req("ARCH-02")
def test_public_records_have_the_agreed_fields() -> None:
    for kind, names in FIELDS.items():
        assert set(names.split()) <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.req("ARCH-02")
def test_no_public_name_loads_torch() -> None:
    program = "import sys, learner.api; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
