"""What the pure stages know about a tokenizer, and bins of coordinates."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learner.stages.tokens import (
    COORD_BINS,
    IM_END,
    CoordVocab,
    Edit,
    TokenText,
    coord_token,
    decode_bin,
    decode_exactly,
    encode_bin,
)
from tests.unit.answers import pieces
from tests.unit.refusals import refused


def bare_tokenizer(*extra: str) -> PreTrainedTokenizerFast:
    """Bytes and nothing else, but for `extra` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer.add_tokens(list(extra))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ([IM_END], "<|coord_0|>"),
        ([IM_END, *(coord_token(k) for k in range(999))], "<|coord_999|>"),
        ([coord_token(k) for k in range(1000)], IM_END),
    ],
)
def test_a_tokenizer_that_lacks_tokens_is_refused(extra: list[str], missing: str) -> None:
    do = "`learner toy make-model --expand-vocab DIR` adds the coordinate tokens"
    with refused("model.model", f"its tokenizer has no token {missing}", do):
        CoordVocab.from_tokenizer(bare_tokenizer(*extra))


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32])
def test_unknown_ids_have_no_text(tokenizer: PreTrainedTokenizerFast, token_id: int) -> None:
    assert pieces(tokenizer, [token_id]) == [""]


def test_all_edits_of_one_token_are_made_and_other_tokens_keep_their_ids() -> None:
    tokenizer = bare_tokenizer("abcd", "efg")
    ids = tokenizer.encode("efgabcdefg")
    edits = [Edit(3, 4, "x"), Edit(5, 6, "yz"), Edit(9, 10, "")]
    text = TokenText([decode_exactly(tokenizer, [each]) for each in ids])
    edited = text.edited(ids, edits, tokenizer)
    assert decode_exactly(tokenizer, edited) == "efgxbyzdef"
    assert edited[0] == ids[0]


@pytest.mark.req("DATA-02", "ARCH-02")
@pytest.mark.scenario(
    "Upper bound is 999 and decodes to 1.0", "Lower bound is 0 and decodes to 0.0"
)
def test_the_edges_of_the_image_are_bins_0_and_999() -> None:
    assert (encode_bin(0.0), encode_bin(1.0)) == (0, 999)
    assert (decode_bin(0), decode_bin(999)) == (0.0, 1.0)
    assert [encode_bin(decode_bin(k)) for k in range(COORD_BINS)] == list(range(COORD_BINS))


@pytest.mark.req("DATA-02")
@given(st.floats(allow_nan=False) | st.floats(0, 1))
@example(0.5 / 999)
@example(1.5 / 999)
def test_a_coordinate_goes_to_its_nearest_bin_and_never_beyond_the_edges(c: float) -> None:
    k = encode_bin(c)
    assert 0 <= k <= 999
    assert k == round(999 * min(max(c, 0.0), 1.0))
    assert abs(decode_bin(k) - min(max(c, 0.0), 1.0)) <= 0.5 / 999 + 1e-12
