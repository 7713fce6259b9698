"""The wire types: those of ms-swift (WIRE-01, WIRE-02), the bodies of a push and its manifest."""

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from transformers import AutoConfig

from learner.models.toy import ToyFamily
from learner.rollout.sync.weights import MergedWeights
from rollout_server.weights.manifest import check_manifest, checkpoint_parameters
from shared_contracts import infer as ours
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    DTYPE_BYTES,
    AdapterMeta,
    DtypeName,
    HostMemory,
    InitCommunicator,
    ParameterMeta,
    SharedMemory,
    StartWeightUpdate,
    plan_buckets,
)
from tests.contract.toy_checkpoints import make_checkpoint

MESSAGE = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """ms-swift's protocol module (seconds of imports)."""
    return importlib.import_module("swift.infer_engine.protocol")


@pytest.mark.req("WIRE-01")
def test_requests_have_the_same_fields_and_are_accepted_with_their_defaults(theirs: Any) -> None:
    for name in ("RolloutInferRequest", "RequestConfig"):
        fields = {field.name for field in dataclasses.fields(getattr(theirs, name))}
        assert set(getattr(ours, name).model_fields) == fields
    request = dataclasses.asdict(theirs.RolloutInferRequest(messages=[MESSAGE]))
    config = dataclasses.asdict(theirs.RequestConfig())
    rest = dict.fromkeys(("metrics", "template", "use_tqdm", "adapter_request"))
    call = {"infer_requests": [request], "request_config": config} | rest
    ours.InferCall.model_validate(call)
    actual = ours.RequestConfig().model_dump()
    assert {name: value or None for name, value in actual.items()} == {
        name: value or None for name, value in config.items()
    }


@pytest.mark.req("WIRE-02")
def test_fields_of_answers_are_among_theirs(theirs: Any) -> None:
    for model, other in (
        (ours.ChatCompletionResponse, theirs.ChatCompletionResponse),
        (ours.Choice, theirs.ChatCompletionResponseChoice),
        (ours.ChatMessage, theirs.ChatMessage),
        (ours.Usage, theirs.UsageInfo),
    ):
        assert set(model.model_fields) <= {field.name for field in dataclasses.fields(other)}


@pytest.mark.req("WIRE-01")
def test_unserved_fields_are_refused_by_name() -> None:
    configs: dict[str, Any] = {"num_beams": 2, "stream": True, "structured_outputs_regex": "a*"}
    for field, value in {"videos": ["a"], "objects": {"bbox": []}, "tools": [{"a": 1}]}.items():
        with pytest.raises(ValidationError, match=f"field '{field}' is not served"):
            ours.RolloutInferRequest.model_validate({"messages": [MESSAGE], field: value})
    for field, value in configs.items():
        with pytest.raises(ValidationError, match=f"field '{field}' is not served"):
            ours.RequestConfig.model_validate({field: value})
    with pytest.raises(ValidationError, match="add_eos"):
        ours.RolloutInferRequest.model_validate({"messages": [MESSAGE], "add_eos": True})
    with pytest.raises(ValidationError, match="adapter_request"):
        ours.InferCall.model_validate({"infer_requests": [], "adapter_request": {"name": "a"}})


@pytest.mark.req("LOGP-01")
def test_log_probability_is_a_number_of_json() -> None:
    values = [-0.25, 0.0, 1e-7, float("-inf"), float("nan"), -20000.0]
    least = ours.LEAST_LOGPROB
    content = ours.ChoiceLogprobs.of(values).model_dump()["content"]
    assert [each["logprob"] for each in content] == [-0.25, 0.0, 0.0, least, least, least]
    with pytest.raises(ValidationError):
        ours.TokenLogprob(logprob=0.5)


# --- bodies of a push


PARAMETER = {"name": "a", "dtype": "float32", "shape": [2, 3]}
START = {"version": 1, "parameters": [PARAMETER], "attempt": "a"}
INIT = {"host": "127.0.0.1", "port": 6000, "world_size": 2, "attempt": "a"}
ADAPTER = {"r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj"]}

MEMORY = {"path": "/proc/1/fd/3"}

SOUND: dict[type[BaseModel], dict[str, Any]] = {
    ParameterMeta: PARAMETER,
    AdapterMeta: ADAPTER,
    InitCommunicator: INIT,
    StartWeightUpdate: START,
    HostMemory: MEMORY,
    SharedMemory: {"slot_bytes": 1, "memory": MEMORY},
}
UNSOUND: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ParameterMeta, {"shape": [2**64]}),
    (ParameterMeta, {"shape": [1] * 17}),
    (ParameterMeta, {"name": "\ud800"}),
    (StartWeightUpdate, {"version": 2**64}),
    (StartWeightUpdate, {"parameters": []}),
    (InitCommunicator, {"attempt": "\ud800"}),
    (InitCommunicator, {"attempt": ""}),
    (AdapterMeta, {"lora_alpha": float("nan")}),
    (AdapterMeta, {"target_modules": []}),
    (SharedMemory, {"slot_bytes": 2**64}),
    (HostMemory, {"path": "/etc/passwd"}),
    (HostMemory, {"path": "/proc/1/fd/../mem"}),
]


@pytest.mark.req("SYNC-05", "WIRE-05", "SRV-06")
@pytest.mark.parametrize(("body", "fields"), UNSOUND)
def test_a_body_with_an_invalid_field_is_refused(
    body: type[BaseModel], fields: dict[str, Any]
) -> None:
    body.model_validate(SOUND[body])
    with pytest.raises(ValidationError):
        body.model_validate(SOUND[body] | fields)


parameters = st.lists(
    st.builds(
        lambda dtype, shape: ParameterMeta(name="p", dtype=dtype, shape=shape),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 40), max_size=3),
    ),
    max_size=30,
)


@given(parameters, st.integers(1, 50_000))
def test_buckets_are_consecutive_whole_and_as_few_as_greed_allows(
    sizes: list[ParameterMeta], bucket_bytes: int
) -> None:
    buckets = plan_buckets(sizes, bucket_bytes)
    assert [each for bucket in buckets for each in bucket] == sizes
    assert all(each.wire_bytes % 16 == 0 <= each.wire_bytes - each.num_bytes < 16 for each in sizes)
    for bucket, following in itertools.pairwise(buckets):
        used = sum(each.wire_bytes for each in bucket)
        assert used <= bucket_bytes or len(bucket) == 1
        assert used + following[0].wire_bytes > bucket_bytes


# --- the manifest that a server expects


EXPECTED = {"a": [2, 3], "b": [4]}


@pytest.mark.req("SYNC-02", "SYNC-05", "SYNC-06")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", get_args(ToyFamily))
def test_a_learner_sends_what_the_server_expects(
    tmp_path: Path, family: ToyFamily, tie: bool
) -> None:
    folder = make_checkpoint(tmp_path / "model", seed=0, tie=tie, family=family)
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    model = getattr(transformers, architecture).from_pretrained(folder)
    manifest = MergedWeights(model).metadata("bfloat16")
    check_manifest(manifest, checkpoint_parameters(folder), "bfloat16")
    wide = {each.name.rpartition(".")[2] for each in manifest if each.dtype == "float32"}
    assert wide == ({"A_log"} if family.startswith("qwen3_5") else set())
    sent = {each.name: each.shape for each in manifest}
    assert checkpoint_parameters(folder) == sent
    assert ("lm_head.weight" in sent) == (not tie)
    assert any(".experts.0.gate_proj." in name for name in sent) == family.endswith("_moe")


def parameter(name: str, *shape: int, dtype: DtypeName = "float32") -> ParameterMeta:
    return ParameterMeta(name=name, dtype=dtype, shape=list(shape))


A, B = parameter("a", 2, 3), parameter("b", 4)


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ([A], r"1 parameter.* b is sent as nothing, and the model has float32 \[4\]"),
        ([A, B, A], r"a is sent as float32 \[2, 3\] and float32 \[2, 3\]"),
        ([A, B, parameter("c", 1)], "c is sent as float32 .1., and the model has no such"),
        ([A, parameter("b", 2, 2)], r"1 .* b is sent as float32 \[2, 2\], .* float32 \[4\]"),
        ([A, parameter("b", 4, dtype="bfloat16")], "b is sent as bfloat16"),
        ([], "2 parameter.* a is sent as nothing"),
    ],
)
def test_the_first_fault_is_named(sent: list[ParameterMeta], found: str) -> None:
    with pytest.raises(ProblemError, match=found) as caught:
        check_manifest(sent, EXPECTED, "float32")
    assert (caught.value.problem.kind, caught.value.problem.status) == ("manifest-mismatch", 422)
    check_manifest([B, A], EXPECTED, "float32")
