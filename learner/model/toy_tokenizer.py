"""The toy model's tokenizer: a byte-level BPE of Qwen3-VL's layout, trained on the spot.

Its text is the assistant format around the toy descriptions, so that a word or a run of
punctuation is one token. Unlike Qwen's it keeps `}` apart: an object's end is then a
token's end, and cutting a rollout there never leaves a piece of a token.
"""

import json
from collections.abc import Iterator

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

from learner.data.toy import DESCRIPTIONS, PROMPT

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
COORD_TOKENS = tuple(f"<|coord_{k}|>" for k in range(1000))

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
    """Train the tokenizer: 256 bytes, merges, special tokens, 1000 coordinate tokens."""
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
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in COORD_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _training_text() -> Iterator[str]:
    """Chat headers, the prompt and answers, with coordinates left out as the BPE sees them."""
    for role in ("system", "user", "assistant"):
        yield f"{role}\n"
    yield from ("\n", PROMPT)
    for desc in DESCRIPTIONS:
        entry = {"desc": desc, "bbox_2d": ["|"] * 4}
        reverse = dict(reversed(entry.items()))
        yield from json.dumps({"object_1": entry, "object_2": entry}).split("|")
        yield from json.dumps({"object_1": reverse, "object_2": reverse}).split("|")
