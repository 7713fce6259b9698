"""The toy model: a Qwen3-VL of about two million random parameters.

It has every part of the real architecture (3-d patch embedding, deepstack, interleaved
mRoPE, chat template, image processor), at a size two CPU cores train in minutes.
"""

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from learner.coords import COORD_BINS
from learner.data.toy import IMAGE_SIDE
from learner.model.coord_tokens import smooth_rows, vocab_modules
from learner.model.toy_tokenizer import make_toy_tokenizer
from learner.publish import publish_directory

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
