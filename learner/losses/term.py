"""What the objectives return."""

from typing import Literal, NamedTuple

from torch import Tensor


class Term(NamedTuple):
    """One additive part of a module's loss: its name in the logs and its value, a scalar.

    family: what it looks at: text in the first forward, text in the last of several
        (`context_text`), or coordinates and gates.
    """

    name: str
    family: Literal["text", "context_text", "coord"]
    value: Tensor
