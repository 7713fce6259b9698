"""Checkpoints for weight pushes: one of some 600 MB, one of some 2,000 parameters of 4 KB."""

from pathlib import Path

from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from learner.models.toy import make_toy_tokenizer, toy_config, toy_processor
from learner.runs.atomic_files import publish_directory


def make_large(folder: Path) -> Path:
    """Eleven layers, 1,024 wide: 150 million float32 parameters in tensors of 4 to 12 MB."""
    return _make(folder / "large", width=1024, inner=3072, layers=11, heads=8)


def make_many(folder: Path) -> Path:
    """286 layers, 32 wide: seven matrices of 4 KB and some vectors in each."""
    return _make(folder / "many", width=32, inner=32, layers=286, heads=1)


def _make(out: Path, width: int, inner: int, layers: int, heads: int) -> Path:
    with publish_directory(out) as part:
        tokenizer = make_toy_tokenizer()
        config = _widened(toy_config(tokenizer, tie=False), width, inner, layers, heads)
        model = Qwen3VLForConditionalGeneration(config)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(part)
        toy_processor(tokenizer).save_pretrained(part)
    return out


def _widened(
    config: PreTrainedConfig, width: int, inner: int, layers: int, heads: int
) -> Qwen3VLConfig:
    """The toy architecture with another language model; the vision tower stays."""
    whole = config.to_dict()
    text, vision = whole.pop("text_config"), whole.pop("vision_config")
    text |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
    }
    text["rope_parameters"] = text["rope_parameters"] | {
        "mrope_section": _sections(width // heads // 2)
    }
    vision["out_hidden_size"] = width
    return Qwen3VLConfig(text_config=text, vision_config=vision, **whole)


def _sections(half: int) -> list[int]:
    """Rotary frequencies of the three position rows."""
    third = half // 3
    return [half - 2 * third, third, third]
