"""A figure as a small PNG."""

import io

from matplotlib.figure import Figure
from PIL import Image


def small_png(figure: Figure, colours: int) -> bytes:
    """Drawn with a palette of so many colours."""
    drawn, png = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(colours).save(png, "PNG", optimize=True)
    return png.getvalue()
