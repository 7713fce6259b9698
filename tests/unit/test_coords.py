"""Quantization of coordinates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.coords import COORD_BINS, coord_token, decode_bin, encode_bin


@pytest.mark.req("DATA-02", "ARCH-02")
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
@given(st.floats(-1e6, 1e6))
def test_no_coordinate_leaves_the_bins(c: float) -> None:
    k = encode_bin(c)
    assert 0 <= k <= 999
    if 0 <= c <= 1:
        assert abs(decode_bin(k) - c) <= 0.5 / 999 + 1e-12


def test_coordinate_tokens_are_named_by_their_bin() -> None:
    assert coord_token(12) == "<|coord_12|>"
