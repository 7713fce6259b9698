"""The toy model's tokenizer: a byte-level BPE of Qwen3-VL's layout, trained on the spot.

Its text is the assistant format around the toy descriptions, so that a word or a run of
punctuation is one token. Unlike Qwen's it keeps `}` apart: an object's end is then a
token's end, and cutting a rollout there never leaves a piece of a token.
"""

from collections.abc import Iterator
from typing import get_args

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from learner.coords import coord_token
from learner.data.toy import DESCRIPTIONS, PROMPT
from learner.model.coord_tokens import add_coord_tokens
from learner.serialize import serialize_objects
from learner.types import FieldOrder, GroundTruthObject, Shape

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Qwen's ChatML with vision tags, for text and for lists of text and image parts.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- elif part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_WORDS_AND_PUNCTUATION = r" ?[\p{L}_]+|\p{N}|\}|[^\p{L}\p{N}_}]+"


def make_toy_tokenizer() -> PreTrainedTokenizerFast:
    """The text tokenizer with the 1000 coordinate tokens behind it."""
    tokenizer = make_text_tokenizer()
    add_coord_tokens(tokenizer)
    return tokenizer


def make_text_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer: 256 bytes, merges, special tokens; no coordinate tokens yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS_AND_PUNCTUATION), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _training_text() -> Iterator[str]:
    """Chat headers, the prompt, and answers split at the coordinate tokens."""
    yield from ("system\n", "user\n", "assistant\n", "\n", PROMPT)
    for desc in DESCRIPTIONS:
        pair = [GroundTruthObject(desc, Shape("bbox_2d", (0, 0, 0, 0)))] * 2
        for order in get_args(FieldOrder):
            yield from serialize_objects(pair, order).split(coord_token(0))
