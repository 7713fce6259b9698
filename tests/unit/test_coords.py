"""Quantization of coordinates."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from learner.stages.coords import COORD_BINS, coord_token, decode_bin, encode_bin


@pytest.mark.req("DATA-02", "ARCH-02")
@pytest.mark.scenario(
    "Upper bound is 999 and decodes to 1.0", "Lower bound is 0 and decodes to 0.0"
)
def test_the_edges_of_the_image_are_bins_0_and_999() -> None:
    assert (encode_bin(0.0), encode_bin(1.0)) == (0, 999)
    assert (decode_bin(0), decode_bin(999)) == (0.0, 1.0)


@pytest.mark.req("DATA-02")
@pytest.mark.parametrize("k", [1, 333, 500, 998])
def test_a_bin_is_k_over_999(k: int) -> None:
    assert decode_bin(k) == k / 999


@pytest.mark.req("DATA-02")
def test_every_bin_survives_decoding_and_encoding() -> None:
    assert [encode_bin(decode_bin(k)) for k in range(COORD_BINS)] == list(range(COORD_BINS))


@pytest.mark.req("DATA-02")
@given(st.floats(allow_nan=False) | st.floats(0, 1))
@example(0.5 / 999)
@example(1.5 / 999)
def test_a_coordinate_goes_to_its_nearest_bin_and_never_beyond_the_edges(c: float) -> None:
    k = encode_bin(c)
    assert 0 <= k <= 999
    assert abs(decode_bin(k) - min(max(c, 0.0), 1.0)) <= 0.5 / 999 + 1e-12


@pytest.mark.req("DATA-02")
@given(st.floats(-1e300, 1e300) | st.floats(-0.1, 1.1))
def test_clamping_first_or_last_is_the_same(c: float) -> None:
    assert encode_bin(c) == min(max(round(999 * c), 0), 999)


@pytest.mark.req("DATA-02")
@given(st.floats(-0.1, 1.1), st.floats(-0.1, 1.1))
def test_the_order_of_coordinates_is_the_order_of_their_bins(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert encode_bin(low) <= encode_bin(high)


def test_coordinate_tokens_are_named_by_their_bin() -> None:
    assert coord_token(12) == "<|coord_12|>"
