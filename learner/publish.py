"""Files and directories that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_contracts.errors import ContractError


@contextmanager
def publish_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`; rename it to `out` when the block succeeds.

    When the block raises, nothing is left behind.

    Raises:
        ContractError: `out` is a file or a directory with something in it.
    """
    require_free(out)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def require_free(out: Path) -> None:
    """Raise ContractError unless `out` is absent or an empty directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ContractError(
            str(out),
            "it exists already and is not an empty directory",
            "Name a new directory, or remove this one first.",
        )


def publish_text(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, then rename it to `path`."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)
