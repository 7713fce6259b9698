"""A checkpoint of some 600 MB for weight pushes."""

from pathlib import Path

from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from learner.models.toy import make_toy_tokenizer, toy_config, toy_processor
from learner.runs.atomic_files import publish_directory

WIDTH = 1024
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 3072,
    "num_hidden_layers": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def make_large(folder: Path) -> Path:
    """Make one of 150 million float32 parameters, in tensors of 4 to 12 MB."""
    out = folder / "large"
    with publish_directory(out) as part:
        tokenizer = make_toy_tokenizer()
        toy = toy_config(tokenizer, tie=False).to_dict()
        text, vision = toy.pop("text_config") | TEXT, toy.pop("vision_config")
        text["rope_parameters"] |= {"mrope_section": [22, 21, 21]}  # half of a head
        vision["out_hidden_size"] = WIDTH
        config = Qwen3VLConfig(text_config=text, vision_config=vision, **toy)
        model = Qwen3VLForConditionalGeneration(config)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(part)
        toy_processor(tokenizer).save_pretrained(part)
    return out
