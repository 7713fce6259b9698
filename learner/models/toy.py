"""The toy model of a family: a checkpoint of about two million random parameters.

It has every part of the real architecture (3-d patch embedding, multimodal RoPE, chat template,
image processor), and two CPU cores train it in minutes:

    qwen3_vl       patches of 8 pixels, deepstack, interleaved RoPE
    qwen2_5_vl     patches of 14 pixels, windows of 4 x 4 patches in all layers but the last
    qwen3_vl_moe   qwen3_vl with 4 experts in each layer, 2 of them for a token
    qwen3_5        patches of 8 pixels, three layers of linear attention and one of full attention
    qwen3_5_moe    qwen3_5 with 4 experts in each layer and one shared expert

An image of 64 x 64 pixels has 16 tokens in all of them.

The tokenizer is a byte-level BPE of Qwen3-VL's layout. It is trained on answers with the toy
descriptions, so that a word or a run of punctuation is one token. Unlike in Qwen's tokenizer, `}`
is always a token of its own: the end of an object is the end of a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

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
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.video_processing_utils import BaseVideoProcessor

from learner.data.toy import DESCRIPTIONS, IMAGE_SIDE, PROMPT
from learner.models.coord_tokens import add_coord_tokens, smooth_rows, vocab_modules
from learner.runs.atomic_files import publish_directory
from learner.stages.formats.coord_json import serialize_objects
from learner.stages.tokens import COORD_BINS, coord_token
from learner.types import FieldOrder, GroundTruthObject, Shape

ToyFamily = Literal["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]

MERGE_SIZE = 2
CONTEXT = 1024
TEXT_WIDTH = 128
INITIAL_STD = 0.05

# Boxes are learned better if position embeddings start large in relation to patches.
POSITION_STD = 0.5


@dataclass(frozen=True)
class _Toy:
    """patch_size: in pixels. smallest: least side of an image in pixels; smaller ones are enlarged.
    text, vision, rope: additions to the common config.
    """

    architecture: str
    processor: type[ProcessorMixin] = Qwen3VLProcessor
    video_processor: type[BaseVideoProcessor] = Qwen3VLVideoProcessor
    patch_size: int = 8
    smallest: int = 16
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: {"mrope_interleaved": True})


_POSITIONS = {"num_position_embeddings": (IMAGE_SIDE // 8) ** 2}
_DEEPSTACK = _POSITIONS | {"deepstack_visual_indexes": [1]}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,  # vLLM reads it
}
_LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # vLLM's CPU build has no kernel for others
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",  # as published: vLLM holds the recurrent state in it
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 192}
_QUARTER = {"mrope_interleaved": True, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
_TOYS: dict[ToyFamily, _Toy] = {
    "qwen3_vl": _Toy("Qwen3VLForConditionalGeneration", vision=_DEEPSTACK),
    "qwen2_5_vl": _Toy(
        "Qwen2_5_VLForConditionalGeneration",
        processor=Qwen2_5_VLProcessor,
        video_processor=Qwen2VLVideoProcessor,
        patch_size=14,
        smallest=112,
        vision={"window_size": 56, "fullatt_block_indexes": [2]},
        rope={},
    ),
    "qwen3_vl_moe": _Toy("Qwen3VLMoeForConditionalGeneration", text=_EXPERTS, vision=_DEEPSTACK),
    "qwen3_5": _Toy(
        "Qwen3_5ForConditionalGeneration", text=_LINEAR, vision=_POSITIONS, rope=_QUARTER
    ),
    "qwen3_5_moe": _Toy(
        "Qwen3_5MoeForConditionalGeneration",
        text=_LINEAR | _EXPERTS | _SHARED_EXPERT,
        vision=_POSITIONS,
        rope=_QUARTER,
    ),
}


def make_model(out: Path, seed: int, tie: bool = True, family: ToyFamily = "qwen3_vl") -> None:
    """Write the checkpoint: weights (float32), config, tokenizer, processors.

    tie: whether the output head shares the input embedding's weights.

    Raises ContractError if `out` is not empty.
    """
    with publish_directory(out) as part:
        tokenizer = make_toy_tokenizer()
        model = build_toy_model(toy_config(tokenizer, tie, family), seed)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(part)
        toy_processor(tokenizer, family).save_pretrained(part)


def build_toy_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model with random float32 weights; the global generator's state is kept.

    The rows of the coordinate tokens, the last of the vocabulary, are smooth in the bin.
    A vision tower's position embeddings have a standard deviation of `POSITION_STD`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        model: PreTrainedModel = model_class(config)
    rows = INITIAL_STD * smooth_rows(TEXT_WIDTH, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for module in vocab_modules(model):
            module.weight[-COORD_BINS:] = rows
        for name, positions in model.named_parameters():
            if name.endswith("visual.pos_embed.weight"):
                positions.mul_(POSITION_STD / positions.std())
    return model


def toy_config(
    tokenizer: PreTrainedTokenizerFast, tie: bool, family: ToyFamily = "qwen3_vl"
) -> PreTrainedConfig:
    """Return the config of a toy model, with the tokenizer's vocabulary and image ids."""
    token_id = tokenizer.get_vocab().__getitem__
    toy = _TOYS[family]
    config: PreTrainedConfig = AutoConfig.for_model(
        family,
        architectures=[toy.architecture],
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
                **toy.rope,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **toy.text,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 3,
            "patch_size": toy.patch_size,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "out_hidden_size": TEXT_WIDTH,
            "initializer_range": INITIAL_STD,
            **toy.vision,
        },
    )
    return config


def toy_processor(
    tokenizer: PreTrainedTokenizerFast, family: ToyFamily = "qwen3_vl"
) -> ProcessorMixin:
    """Return the processor; an image of at most 8 x 8 tokens keeps its size."""
    toy = _TOYS[family]
    largest = 8 * toy.patch_size * MERGE_SIZE
    pixels = {"shortest_edge": toy.smallest**2, "longest_edge": largest**2}
    geometry = {
        "patch_size": toy.patch_size,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return toy.processor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **geometry),
        tokenizer=tokenizer,
        video_processor=toy.video_processor(size=pixels, **geometry),
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
    """Train the text tokenizer, and append the 1000 coordinate tokens."""
    tokenizer = make_text_tokenizer()
    add_coord_tokens(tokenizer)
    return tokenizer


def make_text_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer: 256 bytes, merges, special tokens; without coordinate tokens."""
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
    """Yield chat headers, the prompt, and answers, split at the coordinate tokens."""
    yield from ("system\n", "user\n", "assistant\n", "\n", PROMPT)
    for desc in DESCRIPTIONS:
        pair = [GroundTruthObject(desc, Shape("bbox_2d", (0, 0, 0, 0)))] * 2
        for order in get_args(FieldOrder):
            yield from serialize_objects(pair, order).split(coord_token(0))
