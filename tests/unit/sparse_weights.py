"""Safetensors files of any size that take no space: a header, and a hole for the numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

BYTES_PER_ELEMENT = 2


def write_sparse_weights(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Tensors of these shapes in bfloat16, all zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + BYTES_PER_ELEMENT * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    with file.open("wb") as content:
        content.write(len(text).to_bytes(8, "little") + text)
        content.truncate(content.tell() + end)
