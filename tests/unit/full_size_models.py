"""Folders of models of full size without weights, and samples that fill their packs.

The widths are those of the `config.json` of Qwen3-VL 2B, 4B, 8B and 30B-A3B, Qwen2.5-VL 7B, and
Qwen3.5 4B on the Hugging Face hub, whose vocabulary is larger. Tokenizer and processor are the
toy's; patches have 16 pixels (Qwen2.5-VL: 14), as in these models.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from learner.models.toy import ToyFamily, make_toy_tokenizer, toy_config, toy_processor
from learner.objectives.logit_stats import HEAD_ELEMENTS
from learner.types import GroundTruthObject, Sample, Shape

VOCABULARY = 152936  # with the 1,000 coordinate tokens
CHUNK = HEAD_ELEMENTS // VOCABULARY  # rows to which the head is applied at once
_HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY}
_TEXT: dict[str, dict[str, Any]] = {
    "2b": _HEADS
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "4b": _HEADS
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": True},
    "8b": _HEADS
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "30b-a3b": _HEADS
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "2.5-7b": _HEADS
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "3.5-4b": _HEADS
    | {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "head_dim": 256}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128},
}
_FAMILIES: dict[str, ToyFamily] = {
    "30b-a3b": "qwen3_vl_moe",
    "2.5-7b": "qwen2_5_vl",
    "3.5-4b": "qwen3_5",
}
WIDTHS = {size: int(text["hidden_size"]) for size, text in _TEXT.items()}
_ROPE: dict[ToyFamily, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}
}
_ROPE_OF_OTHERS = {"rope_theta": 5e6, "mrope_section": [24, 20, 20]}
_PATCHES = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SMALL_VISION = _PATCHES | {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": [5, 11, 17],
    "num_position_embeddings": 2304,
}
_LARGE_VISION = _SMALL_VISION | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_VISION: dict[str, dict[str, Any]] = {
    "2b": _SMALL_VISION,
    "4b": _SMALL_VISION,
    "8b": _LARGE_VISION,
    "30b-a3b": _LARGE_VISION,
    "2.5-7b": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    "3.5-4b": {
        name: of for name, of in _SMALL_VISION.items() if name != "deepstack_visual_indexes"
    },
}


def make_full_size(folder: Path, size: str, layers: int | None = None) -> Path:
    """Write config, tokenizer and processor of a model of this size, and no weights.

    layers: of text and vision, two or more; by default as many as the model of this size has.
    """
    tokenizer = make_toy_tokenizer()
    text = _TEXT[size] | {"max_position_embeddings": 262144}
    family = _FAMILIES.get(size, "qwen3_vl")
    described = toy_config(tokenizer, text["tie_word_embeddings"], family).to_dict()
    for own in ("layer_types", "num_local_experts"):  # of the toy
        described["text_config"].pop(own, None)
    described["text_config"] |= text
    described["text_config"]["rope_parameters"] |= _ROPE.get(family, _ROPE_OF_OTHERS)
    described["vision_config"] |= _VISION[size] | {"out_hidden_size": text["hidden_size"]}
    if layers is not None:
        described["text_config"]["num_hidden_layers"] = layers
        described["vision_config"]["depth"] = layers
        if "deepstack_visual_indexes" in _VISION[size]:
            described["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    toy_processor(tokenizer, family).save_pretrained(folder)
    file = folder / "processor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8"))
    for kind in ("image_processor", "video_processor"):
        limits = {"shortest_edge": 65536, "longest_edge": 16777216}
        patch = 14 if family == "qwen2_5_vl" else 16
        processor[kind] |= {"patch_size": patch, "size": limits}
    file.write_text(json.dumps(processor), encoding="utf-8")
    return folder


def make_samples(folder: Path, count: int, side: int = 1000) -> list[Sample]:
    """Samples with 14 boxes each. side: of their image, in pixels.

    Of one megapixel, 8 of them fill a pack of 12,000 tokens.
    """
    path = folder / "scene.png"
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    boxes = tuple(
        GroundTruthObject("red ellipse", Shape("bbox_2d", (10 + 10 * at, 20, 100 + 10 * at, 200)))
        for at in range(14)
    )
    return [Sample(f"s{number}", (path,), side, side, boxes) for number in range(count)]


def large(shapes: Iterable[tuple[int, ...]], length: int, width: int) -> Iterator[tuple[int, ...]]:
    """Shapes that no step may have: of L x L, or of V with more rows than a chunk on either side.

    length: L, tokens of the pack. width: of the head, whose weight has V.
    """
    for shape in shapes:
        rows = math.prod(shape) // VOCABULARY if VOCABULARY in shape else 0
        if shape.count(length) > 1 or (rows > CHUNK and rows != width):
            yield shape
