"""What plain transformers says: the reference for prompts and greedy answers."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration


def prompt_ids(checkpoint: Path, text: str, images: list[Path]) -> list[int]:
    """Token ids of one user turn, image placeholders expanded."""
    ids: list[int] = _encode(checkpoint, text, images)["input_ids"][0].tolist()
    return ids


def greedy_ids(checkpoint: Path, text: str, images: list[Path], new_tokens: int) -> list[int]:
    """The ids a greedy decode in float32 appends, end-of-sequence cut off."""
    inputs = _encode(checkpoint, text, images)
    model = _model(checkpoint)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    eos = _processor(checkpoint).tokenizer.eos_token_id
    return ids[: ids.index(eos)] if eos in ids else ids


def logprobs(checkpoint: Path, text: str, images: list[Path], ids: list[int]) -> list[float]:
    """Return the log-probability of each of `ids`, an answer, in nats."""
    inputs = _encode(checkpoint, text, images)
    said = torch.tensor([ids])
    prompt = inputs["input_ids"].shape[1]
    for name, value in (("input_ids", said), ("attention_mask", torch.ones_like(said))):
        inputs[name] = torch.cat([inputs[name], value], 1)
    if "mm_token_type_ids" in inputs:
        types = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(said)], 1)
    with torch.no_grad():
        logits = _model(checkpoint)(**inputs).logits[0, prompt - 1 : -1]
    chosen: list[float] = logits.log_softmax(-1).gather(1, said.T).squeeze(1).tolist()
    return chosen


def decode(checkpoint: Path, ids: list[int]) -> str:
    text: str = _processor(checkpoint).tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _encode(checkpoint: Path, text: str, images: list[Path]) -> Any:
    content: list[dict[str, Any]] = [
        {"type": "image", "image": Image.open(path).convert("RGB")} for path in images
    ]
    content.append({"type": "text", "text": text})
    return _processor(checkpoint).apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


@cache
def _processor(checkpoint: Path) -> Any:
    return AutoProcessor.from_pretrained(checkpoint)


@cache
def _model(checkpoint: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
