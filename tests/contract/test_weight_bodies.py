"""Bodies of a push, and how their parameters are cut into buckets."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from shared_contracts.weights import (
    DTYPE_BYTES,
    AdapterMeta,
    HostMemory,
    InitCommunicator,
    ParameterMeta,
    SharedMemory,
    StartWeightUpdate,
    plan_buckets,
    unfused,
)

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
    (ParameterMeta, {"shape": [-1]}),
    (ParameterMeta, {"shape": [2**30, 2**30]}),
    (ParameterMeta, {"shape": [1] * 17}),
    (ParameterMeta, {"name": "\ud800"}),
    (StartWeightUpdate, {"version": 2**64}),
    (StartWeightUpdate, {"parameters": []}),
    (InitCommunicator, {"bucket_bytes": 2**64}),
    (InitCommunicator, {"attempt": "\ud800"}),
    (InitCommunicator, {"attempt": ""}),
    (InitCommunicator, {"senders": 0}),
    (AdapterMeta, {"r": 2**64}),
    (AdapterMeta, {"lora_alpha": float("inf")}),
    (AdapterMeta, {"lora_alpha": float("nan")}),
    (AdapterMeta, {"target_modules": []}),
    (SharedMemory, {"slot_bytes": 2**64}),
    *((HostMemory, {"path": path}) for path in ("/etc/passwd", "/proc/self/fd/3", "")),
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


def parameter(*shape: int, dtype: str = "float32") -> ParameterMeta:
    return ParameterMeta.model_validate({"name": "p", "dtype": dtype, "shape": list(shape)})


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("a.experts.gate_up_proj", [2, 6, 4], ["gate_proj", "up_proj"]),
        ("a.experts.down_proj", [2, 4, 3], ["down_proj"]),
        ("a.experts.gate_up_proj_bias", [2, 6], None),
        ("a.experts.down_proj", [4, 3], None),
        ("a.mlp.down_proj", [2, 4, 3], None),
    ],
)
def test_fused_experts_come_apart(name: str, shape: list[int], parts: list[str] | None) -> None:
    """Other tensors stay whole."""
    expected = [(name, shape)]
    if parts is not None:
        matrix = [shape[1] // len(parts), shape[2]]
        expected = [(f"a.experts.{e}.{part}.weight", matrix) for e in range(2) for part in parts]
    assert unfused(name, shape) == expected


parameters = st.lists(
    st.builds(
        lambda dtype, shape: parameter(*shape, dtype=dtype),
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
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket, following in itertools.pairwise(buckets):
        used = sum(sizes[i].wire_bytes for i in bucket)
        assert used <= bucket_bytes or len(bucket) == 1
        assert used + sizes[following[0]].wire_bytes > bucket_bytes
