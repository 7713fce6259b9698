"""Which image files both programs open, and the pixels that a model sees of each.

The learner and the server decode the same files by themselves, and training is only right where
both see the same pixels. Pillow decodes on both sides; the rule for its modes is written once,
here, against the methods of its images.

    gives                       modes of Pillow
    its colours, 8 bits         1, L, P, RGB, CMYK, YCbCr, LAB
    the same on white           LA, PA, RGBA; L, P, RGB or 1 with a transparent colour
    the high byte of each value I;16, I;16B (16-bit grey), as Pillow itself does for 16-bit colour
    refused, by name            everything else: I (32-bit integers), F (floats), La, ...

White is also what vLLM and qwen-vl-utils put behind transparent pixels.
"""

from typing import Any, Protocol, Self, TypeVar

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")

_COLOURS = {"1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB"}
_WITH_ALPHA = {"LA", "PA", "RGBA"}
_GREY_16 = {"I;16", "I;16B"}
_NAMES = {"I": "32-bit integers", "F": "floating-point numbers", "La": "premultiplied alpha"}

_HIGH_BYTES: list[float] = [value >> 8 for value in range(2**16)]
_WHITE: list[float] = [255.0] * 3 * 256


class Header(Protocol):
    """What is known of a `PIL.Image.Image` that was opened and not yet decoded."""

    info: dict[Any, Any]

    @property
    def mode(self) -> str: ...


class PillowImage(Header, Protocol):
    """The methods of a `PIL.Image.Image` that the rule is written in."""

    @property
    def has_transparency_data(self) -> bool: ...
    def convert(self, mode: str, /) -> Self: ...
    def point(self, lut: list[float], mode: str | None, /) -> Self: ...
    def getchannel(self, channel: str, /) -> Self: ...
    def paste(self, im: Any, box: None, mask: Any, /) -> None: ...


Opened = TypeVar("Opened", bound=PillowImage)


class ModeRefused(ValueError):
    """An image whose values have no agreed meaning as 8-bit colours; the message says why."""


def require_mode(image: Header) -> None:
    """Raises ModeRefused for an image that `as_rgb` does not take."""
    if image.mode not in _COLOURS | _WITH_ALPHA | _GREY_16:
        name = _NAMES.get(image.mode)
        told = f"holds {name} (mode {image.mode})" if name else f"has mode {image.mode}"
        raise ModeRefused(f"{told}, not 8-bit colours or 16-bit grey")
    colour = image.info.get("transparency")
    if (image.mode in _GREY_16 and colour is not None) or _largest(colour) > 255:
        raise ModeRefused(f"has 16 bits a value and the transparent colour {colour}")


def as_rgb(image: Opened) -> Opened:
    """The 8-bit RGB pixels that a model sees of an image; raises ModeRefused."""
    require_mode(image)
    if image.mode in _GREY_16:
        image = image.convert("I").point(_HIGH_BYTES, "L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    coloured = image.convert("RGBA")
    white = coloured.convert("RGB").point(_WHITE, None)
    white.paste(coloured, None, coloured.getchannel("A"))
    return white


def _largest(colour: Any) -> int:
    """Of the values of a transparent colour; bytes are the alpha of each palette entry."""
    if isinstance(colour, tuple):
        return int(max(colour))
    return colour if isinstance(colour, int) else 0
