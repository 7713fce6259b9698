"""Folders of checkpoints, and of peft adapters with their base checkpoints."""

import json
from pathlib import Path

from shared_contracts.errors import ContractError

ADAPTER = "adapter_config.json"


def checkpoint_chain(folder: Path, where: str) -> list[Path]:
    """Return the folder, its base checkpoint, and so on; the last is no adapter.

    Raises ContractError at `where` for an adapter without a base checkpoint on this machine.
    """
    chain = [folder]
    while (file := chain[-1] / ADAPTER).is_file():
        try:
            base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
            over = Path(base)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{file} does not name the base checkpoint ({error!r})"
            raise ContractError(where, found, "Save the adapter again with peft") from error
        if not over.is_dir() or over in chain:
            found = f"{chain[-1]} is an adapter over {base}, which is no other folder here"
            do = f"Name the folder of that checkpoint in {file}, as base_model_name_or_path"
            raise ContractError(where, found, do)
        chain.append(over)
    return chain


def folder_with(folder: Path, name: str, where: str) -> Path:
    """Return the first folder of `checkpoint_chain` with the file; `folder` if none has it."""
    chain = checkpoint_chain(folder, where)
    return next((each for each in chain if (each / name).is_file()), folder)


def weight_files(folder: Path, where: str) -> list[Path]:
    """Return the `*.safetensors` of a checkpoint; raises ContractError at `where` without any."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = f"{folder} holds no *.safetensors file"
        raise ContractError(where, found, "Save the weights as safetensors")
    return files
