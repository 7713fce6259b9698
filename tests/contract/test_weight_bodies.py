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
    for bucket, following in itertools.pairwise(buckets):
        used = sum(each.wire_bytes for each in bucket)
        assert used <= bucket_bytes or len(bucket) == 1
        assert used + following[0].wire_bytes > bucket_bytes
