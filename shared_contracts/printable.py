"""Text of files, of models and of other programs, as it may be shown on a terminal."""


def printable(text: object, *, lines: bool = False) -> str:
    r"""What would steer the terminal or is not seen, as Python writes it: `\x1b`, `\t`, `\u200b`.

    lines: ends of lines stay.
    """
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in str(text)
    )
