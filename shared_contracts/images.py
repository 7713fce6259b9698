"""Image formats, and the conversion to RGB for learner and server (WIRE-04).

Training is correct only if both programs get the same pixels from Pillow. Importing this module
does not import Pillow.

    mode of Pillow                                       pixels
    1, L, P, RGB, CMYK                                   the colours, 8 bits each
    LA, RGBA; 1, L, P or RGB with a transparent colour   the image on white
    I;16 (16-bit grey)                                   the high byte of each value
    16 bits with a transparent colour                    refused

Files of FORMATS have no other mode. Of 16-bit colour, Pillow itself keeps the high byte. vLLM and
qwen-vl-utils also put white behind transparent pixels.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")

_GREY_16 = "I;16"
_HIGH_BYTES: list[float] = [value >> 8 for value in range(2**16)]
_WHITE: list[float] = [255.0] * 3 * 256


class ModeRefused(ValueError):
    """An image without defined 8-bit RGB pixels; the message has the reason."""


def require_mode(image: "Image") -> None:
    """Raise ModeRefused for an image that `as_rgb` does not convert."""
    colour = image.info.get("transparency")
    if (image.mode == _GREY_16 and colour is not None) or _largest(colour) > 255:
        raise ModeRefused(f"has 16 bits a value and the transparent colour {colour}")


def as_rgb(image: "Image") -> "Image":
    """Return the 8-bit RGB pixels of a model's input. Raises ModeRefused."""
    require_mode(image)
    if image.mode == _GREY_16:
        image = image.convert("I").point(_HIGH_BYTES, "L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    coloured = image.convert("RGBA")
    white = coloured.convert("RGB").point(_WHITE, None)
    white.paste(coloured, None, coloured.getchannel("A"))
    return white


def _largest(colour: Any) -> int:
    """Return the largest value of a transparent colour; bytes are the alpha of a palette."""
    if isinstance(colour, tuple):
        return int(max(colour))
    return colour if isinstance(colour, int) else 0
