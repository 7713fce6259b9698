"""The resolved config as YAML, with the origin of each value beside it (CFG-10)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from learner.config.load import check_written, read_written
from learner.config.yaml12 import Steps, dump_annotated


def show_config(path: Path, all_origins: bool = False) -> str:
    """YAML text that loads to an equal config.

    The comment beside a value is the `file:line` that decides it, `derived` from another
    key, or `default`. all_origins: after it, the lines that were overridden.

    Raises:
        ContractErrors: as `load_config`.
    """
    written = read_written(path)
    config = check_written(written)
    derived = set(_derived(config))

    def note(steps: Steps) -> str:
        if steps in derived and _value(written.mapping, steps) is None:
            return "derived"
        places = written.origins.get(steps, ("default",))
        return " over ".join(places if all_origins else places[:1])

    return dump_annotated(config.model_dump(), note)


def _derived(model: BaseModel, at: Steps = ()) -> Iterator[Steps]:
    """Keys whose default is computed from other keys."""
    for name, field in type(model).model_fields.items():
        if field.default_factory_takes_validated_data:
            yield (*at, name)
        value = getattr(model, name)
        for step, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(item, BaseModel):
                yield from _derived(item, (*at, name) if step is None else (*at, name, step))


def _value(mapping: Any, steps: Steps) -> Any:
    """What is written at a path; None where nothing is."""
    for step in steps:
        if not isinstance(mapping, dict | list):
            return None
        mapping = mapping.get(step) if isinstance(mapping, dict) else mapping[int(step)]
    return mapping
