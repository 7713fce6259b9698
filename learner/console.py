"""Lines for people and their scripts."""

from rich.console import Console
from rich.text import Text


def tell(console: Console, line: str | Text) -> None:
    """Print a line as it is: never broken, no part of a path taken for markup or an emoji."""
    console.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)
