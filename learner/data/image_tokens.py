"""How many tokens an image takes, by the rule of Qwen's image processor.

The processor resizes to whole blocks of `patch_size * merge_size` pixels, about the same aspect
and a number of pixels within its bounds; each block becomes one token. Written down here because
transformers' processor cannot be imported without torch; a test holds it against that one.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from shared_contracts.errors import ContractError

# The processor refuses images that are longer than this many times their other side.
MAX_ASPECT = 200


class ImageRule(NamedTuple):
    """block: side of one token's pixels; the other two bound the pixels of a resized image."""

    block: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "ImageRule":
        """The rule in the checkpoint's files; ContractError where there is none or another."""
        where, processor = _processor(folder)
        if not str(processor.get("image_processor_type")).startswith("Qwen2VLImageProcessor"):
            raise _not_of_qwen(
                where, f"image_processor_type {processor.get('image_processor_type')}"
            )
        size = processor.get("size") or {}
        try:
            sides = [processor["patch_size"], processor["merge_size"]]
            bounds = [
                processor.get("min_pixels") or size["shortest_edge"],
                processor.get("max_pixels") or size["longest_edge"],
            ]
        except (KeyError, TypeError) as error:
            raise _not_of_qwen(where, f"no {error}") from None
        if not all(type(value) is int and value > 0 for value in sides + bounds):
            raise _not_of_qwen(where, f"sides {sides} and bounds of pixels {bounds}")
        return cls(sides[0] * sides[1], *bounds)

    def tokens(self, width: int, height: int) -> int | None:
        """Tokens of an image, None for one that is too narrow for the processor."""
        if max(width, height) / min(width, height) > MAX_ASPECT:
            return None
        return self._blocks(width, height)

    def _blocks(self, width: int, height: int) -> int:
        block = self.block
        columns, rows = round(width / block), round(height / block)
        if columns * rows * block * block > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns = max(1, math.floor(width / shrink / block))
            rows = max(1, math.floor(height / shrink / block))
        elif columns * rows * block * block < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            columns = math.ceil(width * grow / block)
            rows = math.ceil(height * grow / block)
        return columns * rows


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The settings of the image processor and the file they are in, as transformers finds them."""
    nested, alone = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested.is_file() and "image_processor" in (settings := read_json(nested)):
        if not isinstance(settings["image_processor"], dict):
            raise _not_of_qwen(nested, "an image_processor that is no object")
        return nested, settings["image_processor"]
    if not alone.is_file():
        raise ContractError(
            str(folder),
            f"no {nested.name} with an image_processor, and no {alone.name}",
            "Give the folder of a checkpoint saved with its processor",
        )
    return alone, read_json(alone)


def _not_of_qwen(where: Path, found: str) -> ContractError:
    return ContractError(
        str(where), found, "Use a model of the Qwen-VL family, whose image tokens are known here"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ContractError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(str(path), f"cannot be read ({error})", "Mend the file") from error
    if not isinstance(value, dict):
        raise ContractError(str(path), "it holds no JSON object", "Mend the file")
    return value
