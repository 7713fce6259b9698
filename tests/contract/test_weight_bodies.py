"""Bodies of weight updates, and how their parameters are cut into buckets."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from shared_contracts.weights import (
    DTYPE_BYTES,
    AdapterMeta,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    UpdateWeights,
    plan_buckets,
)

PARAMETER = {"name": "a", "dtype": "float32", "shape": [2, 3]}
START = {"version": 1, "parameters": [PARAMETER], "attempt": None}
UPDATE = {"version": 1, "attempt": None}
INIT = {"host": "127.0.0.1", "port": 6000, "world_size": 2, "attempt": "a"}
ADAPTER = {"r": 8, "lora_alpha": 16.0, "target_modules": ["q_proj"]}

UNSOUND: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ParameterMeta, PARAMETER | {"shape": [2**64]}),
    (ParameterMeta, PARAMETER | {"shape": [-1]}),
    (ParameterMeta, PARAMETER | {"shape": [2**30, 2**30]}),
    (ParameterMeta, PARAMETER | {"shape": [1] * 17}),
    (ParameterMeta, PARAMETER | {"name": "\ud800"}),
    (StartWeightUpdate, START | {"version": 2**64}),
    (UpdateWeights, UPDATE | {"version": 2**64}),
    (FinishWeightUpdate, UPDATE | {"version": 2**64}),
    (
        FinishWeightUpdate,
        UPDATE | {"digests": [{"name": "a", "columns": [2**64], "digest": "0" * 16}]},
    ),
    (InitCommunicator, INIT | {"bucket_bytes": 2**64}),
    (InitCommunicator, INIT | {"attempt": "\ud800"}),
    (AdapterMeta, ADAPTER | {"r": 2**64}),
    (AdapterMeta, ADAPTER | {"lora_alpha": float("inf")}),
    (AdapterMeta, ADAPTER | {"lora_alpha": float("nan")}),
]


@pytest.mark.req("SYNC-05", "WIRE-05")
@pytest.mark.parametrize(("body", "fields"), UNSOUND)
def test_a_body_with_huge_or_invalid_numbers_or_text_is_refused(
    body: type[BaseModel], fields: dict[str, Any]
) -> None:
    sound = {ParameterMeta: PARAMETER, AdapterMeta: ADAPTER, InitCommunicator: INIT}
    sound |= {StartWeightUpdate: START, UpdateWeights: UPDATE, FinishWeightUpdate: UPDATE}
    body.model_validate(sound[body])
    with pytest.raises(ValidationError):
        body.model_validate(fields)


def parameter(*shape: int, dtype: str = "float32") -> ParameterMeta:
    return ParameterMeta.model_validate({"name": "p", "dtype": dtype, "shape": list(shape)})


@pytest.mark.req("SYNC-03")
def test_a_bucket_takes_parameters_while_they_fit() -> None:
    """A parameter has 16 bytes here; one that is larger than a bucket is alone."""
    four = [parameter(4)] * 4
    assert plan_buckets(four, 47) == [range(2), range(2, 4)]
    assert plan_buckets(four, 48) == [range(3), range(3, 4)]
    assert plan_buckets([parameter(4), parameter(100), parameter(4)], 32) == [
        range(1),
        range(1, 2),
        range(2, 3),
    ]
    assert plan_buckets([], 32) == []


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
