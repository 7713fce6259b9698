"""How parameters are cut into buckets: a pure function both sides call."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_contracts.weights import DTYPE_BYTES, ParameterMeta, plan_buckets


def parameter(*shape: int, dtype: str = "float32") -> ParameterMeta:
    return ParameterMeta.model_validate({"name": "p", "dtype": dtype, "shape": list(shape)})


@pytest.mark.req("SYNC-03")
def test_a_bucket_takes_parameters_while_they_fit() -> None:
    sizes = [parameter(4), parameter(4), parameter(4), parameter(4)]  # 16 bytes each
    assert plan_buckets(sizes, 32) == [range(2), range(2, 4)]
    assert plan_buckets(sizes, 47) == [range(2), range(2, 4)]
    assert plan_buckets(sizes, 48) == [range(3), range(3, 4)]


def test_a_parameter_larger_than_a_bucket_travels_alone() -> None:
    sizes = [parameter(4), parameter(100), parameter(4)]
    assert plan_buckets(sizes, 32) == [range(1), range(1, 2), range(2, 3)]


def test_nothing_needs_no_bucket() -> None:
    assert plan_buckets([], 32) == []


def test_padding_aligns_the_next_parameter() -> None:
    assert parameter(3, dtype="bfloat16").num_bytes == 6
    assert parameter(3, dtype="bfloat16").wire_bytes == 16
    assert parameter(8, dtype="bfloat16").wire_bytes == 16
    assert parameter().wire_bytes == 16
    assert parameter(0, 7).wire_bytes == 0


def test_byte_sizes_are_those_of_torch() -> None:
    import torch

    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES


shapes = st.lists(st.integers(0, 40), max_size=3)
parameters = st.lists(
    st.builds(
        lambda dtype, shape: parameter(*shape, dtype=dtype),
        st.sampled_from(sorted(DTYPE_BYTES)),
        shapes,
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
