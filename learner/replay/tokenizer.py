"""The tokenizer that a run was made with: that of `model.model`, or of a checkpoint of the run."""

from pathlib import Path
from typing import Any, NamedTuple

from learner.checkpoint import checkpoints_in
from learner.config.schema import Config
from learner.resume import data_digest
from learner.run_folder import RunFolder
from learner.tokens import Tokenizer
from shared_contracts.errors import ContractError

TOKENIZER = "tokenizer.json"


class Found(NamedTuple):
    """note: what a reader should know of where it is from; empty for nothing."""

    folder: Path
    note: str


def find_tokenizer(run: RunFolder, config: Config, given: Path | None) -> Found:
    """The folder with the tokenizer of a run. given: to look in alone.

    Raises ContractError where it is gone or another one, and says of each folder which.
    """
    wanted = run.facts().get("tokenizer_sha256")
    if wanted is None:
        raise ContractError(
            str(run.path / "run.json"),
            "it does not say which tokenizer the run had: it is of an earlier version",
            "Read it with the version of Rollmatch that wrote it (`versions` in run.json)",
        )
    first = Path(config.model.model)
    folders = [given] if given else [first, *checkpoints_in(run.path)]
    wrong: list[str] = []
    for folder in folders:
        if (problem := _problem(folder / TOKENIZER, wanted)) is None:
            note = f"{wrong[0]}; that of {folder} is the same" if wrong else ""
            return Found(folder, note)
        wrong.append(f"{folder} {problem}")
    raise ContractError(
        "--tokenizer" if given else f"model.model of {run.path}",
        "; ".join(wrong),
        f"Name a folder with the {TOKENIZER} of the run with --tokenizer (SHA-256 {wanted})",
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """As training loads it."""
    from transformers import AutoTokenizer  # seconds

    loaded: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer: Tokenizer = loaded
    return tokenizer


def _problem(file: Path, wanted: str) -> str | None:
    if not file.parent.is_dir():
        return "is gone"
    if not file.is_file():
        return f"has no {TOKENIZER}"
    if data_digest(file) != wanted:
        return f"has another {TOKENIZER} than when the run was started"
    return None
