"""What the pure stages know about a tokenizer, and bins of coordinates."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learner.stages.coords import COORD_BINS, coord_token, decode_bin, encode_bin
from learner.stages.tokens import (
    IM_END,
    PLACEHOLDERS,
    CoordVocab,
    TokenText,
    spell_leading,
)
from shared_contracts.errors import ContractError
from tests.unit.answers import encode, pieces, with_placeholders


def bare_tokenizer(*extra: str) -> PreTrainedTokenizerFast:
    """Bytes and nothing else, but for `extra` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer.add_tokens(list(extra))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_coordinate_ids_are_those_of_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    vocab = CoordVocab.from_tokenizer(tokenizer)
    assert len(set(vocab.ids)) == 1000
    assert encode(tokenizer, coord_token(12)) == [vocab.ids[12]]
    assert vocab.bins[vocab.ids[999]] == 999
    assert vocab.end_id not in vocab.bins
    assert pieces(tokenizer, [vocab.end_id]) == [IM_END]


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ([IM_END], "<|coord_0|>"),
        ([IM_END, *(coord_token(k) for k in range(999))], "<|coord_999|>"),
        ([coord_token(k) for k in range(1000)], IM_END),
    ],
)
def test_a_tokenizer_that_lacks_tokens_is_refused(extra: list[str], missing: str) -> None:
    with pytest.raises(ContractError) as error:
        CoordVocab.from_tokenizer(bare_tokenizer(*extra))
    assert error.value.where == "model.model"
    assert error.value.found == f"its tokenizer has no token {missing}"
    assert error.value.do == (
        "Use a model with the 1000 coordinate tokens and <|im_end|>; "
        "`learner toy make-model --expand-vocab DIR` adds the coordinate tokens"
    )


@pytest.mark.req("PARSE-02")
def test_the_tokens_of_images_end_an_answer_where_the_tokenizer_has_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    vocab = CoordVocab.from_tokenizer(tokenizer)
    assert vocab.end_ids == {vocab.end_id}
    seeing = CoordVocab.from_tokenizer(with_placeholders(tokenizer))
    (image,), (video,) = (encode(with_placeholders(tokenizer), token) for token in PLACEHOLDERS)
    assert seeing.end_ids == {vocab.end_id, image, video}


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32])
def test_an_id_outside_of_the_vocabulary_has_no_text(
    tokenizer: PreTrainedTokenizerFast, token_id: int
) -> None:
    assert pieces(tokenizer, [token_id]) == [""]


def test_each_character_has_the_token_that_holds_it_and_empty_tokens_hold_none() -> None:
    tokens = TokenText(["", "ab", "", "", "c", ""])
    assert tokens.text == "abc"
    assert [tokens.token_at(place) for place in range(3)] == [1, 1, 4]
    assert [tokens.start_of(token) for token in range(7)] == [0, 0, 2, 2, 2, 3, 3]
    assert tokens.tokens_between(0, 3) == [1, 4]
    assert tokens.tokens_between(1, 2) == [1]


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize("leading", ["}", "}}"])
def test_the_leading_text_of_a_token_is_spelled_by_ids_that_are_the_usual_ones_for_it(
    qwen_tokenizer: PreTrainedTokenizerFast, leading: str
) -> None:
    (fused,) = encode(qwen_tokenizer, "}},\n")
    assert spell_leading(qwen_tokenizer, fused, leading) == encode(qwen_tokenizer, leading)


# ---- bins ----------------------------------------------------------------------------


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
