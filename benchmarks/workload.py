"""What every side of a comparison is given: engine settings, and prompts in two forms."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from learner.data.toy import PROMPT, make_scene
from rollout_server.settings.options import ServerSettings

ANSWER_TOKENS = 128


@dataclass(frozen=True)
class Scene:
    """image: a data URL, or None for a prompt of text alone."""

    text: str
    image: str | None


def engine_settings(checkpoint: Path) -> ServerSettings:
    """Settings of one engine on the CPU, for both sides."""
    return ServerSettings(
        model=checkpoint,
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_gib=0.5,
    )


def make_scenes(seed: int, count: int, with_image: bool) -> list[Scene]:
    """Prompts that differ from each other and from those of other seeds."""
    rng = np.random.default_rng(seed)
    return [
        Scene(f"{PROMPT} Scene {seed}-{i}.", _data_url(rng) if with_image else None)
        for i in range(count)
    ]


def _data_url(rng: np.random.Generator) -> str:
    image, _ = make_scene(rng)
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def infer_call(scenes: list[Scene], tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """Body of a greedy `POST /infer/`, ours or ms-swift's."""
    requests = [
        {
            "messages": [{"role": "user", "content": "<image>" * bool(scene.image) + scene.text}],
            "images": [scene.image] if scene.image else [],
        }
        for scene in scenes
    ]
    config = {"max_tokens": tokens, "temperature": 0.0, "return_details": True}
    return {"infer_requests": requests, "request_config": config}


def openai_messages(scene: Scene) -> list[dict[str, Any]]:
    """The conversation as vLLM's chat renderer and OpenAI's API take it."""
    text = {"type": "text", "text": scene.text}
    image = {"type": "image_url", "image_url": {"url": scene.image}}
    return [{"role": "user", "content": [image, text] if scene.image else [text]}]
