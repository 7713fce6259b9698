"""The toy model: a Qwen3-VL of about two million random parameters.

It has every part of the real architecture (3-d patch embedding, deepstack, interleaved
mRoPE, chat template, image processor), at a size two CPU cores train in minutes.

Its tokenizer is a byte-level BPE of Qwen3-VL's layout, trained on the spot on the assistant format
around the toy descriptions, so that a word or a run of punctuation is one token. Unlike Qwen's it
keeps `}` apart: cutting a rollout at an object's end never leaves a piece of a token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from learner.data.toy import PROMPT
from learner.data.toy_scenes import DESCRIPTIONS, IMAGE_SIDE
from learner.models.coord_tokens import add_coord_tokens, smooth_rows, vocab_modules
from learner.runs.atomic_files import publish_directory
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats.coord_json import serialize_objects
from learner.types import FieldOrder, GroundTruthObject, Shape

PATCH_SIZE = 8
MERGE_SIZE = 2
CONTEXT = 1024
TEXT_WIDTH = 128
INITIAL_STD = 0.05

# Boxes are learnt better when positions are loud against the patches from the start.
POSITION_STD = 0.5


def make_model(out: Path, seed: int, tie: bool = True) -> None:
    """Write the checkpoint: weights (float32), config, tokenizer, processors.

    tie: whether the output head shares the input embedding's weights.

    Raises:
        ContractError: `out` is not empty.
    """
    with publish_directory(out) as part:
        tokenizer = make_toy_tokenizer()
        model = build_toy_model(toy_config(tokenizer, tie), seed)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(part)
        toy_processor(tokenizer).save_pretrained(part)


def build_toy_model(config: Qwen3VLConfig, seed: int) -> Qwen3VLForConditionalGeneration:
    """Random float32 weights from `seed`; the global generator is left as it was.

    The rows of the coordinate tokens, the last of the vocabulary, are smooth in the bin.
    The vision tower's position embeddings have a standard deviation of `POSITION_STD`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    rows = INITIAL_STD * smooth_rows(TEXT_WIDTH, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for module in vocab_modules(model):
            module.weight[-COORD_BINS:] = rows
        positions = model.model.visual.pos_embed.weight
        positions.mul_(POSITION_STD / positions.std())
    return model


def toy_config(tokenizer: PreTrainedTokenizerFast, tie: bool) -> Qwen3VLConfig:
    """The architecture, with the tokenizer's vocabulary and image ids."""
    token_id = tokenizer.get_vocab().__getitem__
    grid_side = IMAGE_SIDE // PATCH_SIZE
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=tie,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "initializer_range": INITIAL_STD,
            "tie_word_embeddings": tie,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 3,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": grid_side**2,
            "deepstack_visual_indexes": [1],
            "initializer_range": INITIAL_STD,
        },
    )


def toy_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Image, video and text processing; an image of 16 to 128 pixels keeps its size."""
    cell = PATCH_SIZE * MERGE_SIZE
    pixels = {"shortest_edge": cell**2, "longest_edge": (8 * cell) ** 2}
    geometry = {
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **geometry),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=pixels, **geometry),
        chat_template=tokenizer.chat_template,
    )


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
