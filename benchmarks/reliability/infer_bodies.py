"""Valid bodies of `POST /infer/`, made by hypothesis: every one must be answered with 200."""

import base64
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

MOST_TOKENS = 8
MARK = "<image>"

_TEXTS = st.text(max_size=40).filter(lambda text: "<|" not in text and MARK not in text)
_TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _TEXTS), max_size=2)
_CONFIGS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, MOST_TOKENS)},
    optional={
        "temperature": st.sampled_from([None, 0.0, 0.7, 1.5]),
        "top_p": st.floats(0.1, 1.0),
        "top_k": st.integers(-1, 50),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "seed": st.integers(0, 2**62),
        "n": st.integers(1, 3),
        "stop": st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "return_details": st.booleans(),
    },
)


@st.composite
def infer_bodies(draw: st.DrawFn, media: Path) -> dict[str, Any]:
    """media: folder the server may read; pictures are put there as they are drawn."""
    body: dict[str, Any] = {
        "infer_requests": draw(st.lists(_requests(media), min_size=1, max_size=3)),
        "request_config": draw(_CONFIGS),
    }
    if draw(st.booleans()):
        body["expected_weights_version"] = 0
    config = body["request_config"]
    if not config.get("temperature"):
        config.pop("n", None)  # greedy decoding has one answer
    return body


@st.composite
def _requests(draw: st.DrawFn, media: Path) -> dict[str, Any]:
    """Marks in texts, or parts; pictures as files, data URLs or base64."""
    pictures = draw(st.lists(_pictures(media), max_size=2))
    text = draw(_TEXTS)
    content: Any = MARK * len(pictures) + text
    if draw(st.booleans()):
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    system = [{"role": "system", "content": draw(_TEXTS)}] if draw(st.booleans()) else []
    turns = [{"role": role, "content": said} for role, said in draw(_TURNS)]
    return {
        "messages": [*system, *turns, {"role": "user", "content": content}],
        "images": pictures,
    }


@st.composite
def _pictures(draw: st.DrawFn, media: Path) -> str:
    width, height, colour = draw(
        st.tuples(st.integers(16, 96), st.integers(16, 96), st.integers(0, 2**24 - 1))
    )
    png = _png(width, height, colour)
    form = draw(st.sampled_from(["file", "data URL", "base64"]))
    if form == "file":
        file = media / f"{width}x{height}-{colour:06x}.png"
        file.write_bytes(png)
        return str(file)
    encoded = base64.b64encode(png).decode()
    return f"data:image/png;base64,{encoded}" if form == "data URL" else encoded


@lru_cache(1024)
def _png(width: int, height: int, colour: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), f"#{colour:06x}").save(data, "PNG")
    return data.getvalue()
