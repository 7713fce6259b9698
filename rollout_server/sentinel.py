"""The sentinel: the id that says a sequence was ended by the repeat guard (REP-05).

It is one of the request's stop ids, hidden from every sequence and forced on one that
repeats itself, so a sequence that stopped at it was ended by the guard and by nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Special tokens of the Qwen family that neither an answer nor a conversation uses, the
# least useful first.
RESERVED_TOKENS = (
    "<|fim_pad|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|video_pad|>",
)


def choose_sentinel(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> int | None:
    """An id below `vocab_size` (the width of the logits) that no answer contains.

    The highest one the tokenizer has no token for, as padded embeddings have; else the
    first of `RESERVED_TOKENS` that the chat template does not write and that is neither
    the end of a sequence nor padding. None where there is none.
    """
    vocab = tokenizer.get_vocab()
    unused = set(range(vocab_size)).difference(vocab.values())
    if unused:
        return max(unused)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    template = str(tokenizer.chat_template)
    for token in RESERVED_TOKENS:
        token_id = vocab.get(token)
        if token_id is not None and token_id not in ends and token not in template:
            return token_id
    return None
