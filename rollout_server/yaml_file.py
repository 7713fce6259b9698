"""A YAML file as the learner reads it: the same scalars, one mapping, plain errors."""

from pathlib import Path
from typing import Any

import yaml

from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import use_core_schema


class _Loader(yaml.SafeLoader):
    """Knows the scalars of YAML 1.2's core schema and no others."""


use_core_schema(_Loader, yaml.constructor.ConstructorError)


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """The mapping of a file named by `option`; ContractError for anything else."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)
    except OSError as error:
        raise ContractError(
            option, f"{path} cannot be read ({error.strerror})", "Name a readable file"
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # or an escape beyond Unicode
        raise ContractError(option, f"{path} is not YAML ({error})", "Correct it") from None
    except RecursionError:
        raise ContractError(option, f"{path} is nested too deep", "Write fewer levels") from None
    if not isinstance(content, dict):
        raise ContractError(option, f"{path} holds no mapping", "Write `key: value` lines")
    return content
