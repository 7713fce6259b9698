"""Trains with a throw-away objective or recipe, which is added to the registry first.

    python -m tests.unit.seams.registered_run objective|recipe MODEL DATA OUT

DATA: a folder of `make_data`. Prints JSON: the refusal of a wrong config, the schema, the page of
metrics, the logged steps.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

from learner.objectives import OBJECTIVES
from learner.objectives.variants import VARIANTS, Variant
from tests.unit.seams.sharpness import SharpnessModule

ENTRY = {"name": "sharpness", "enabled": True, "weight": 0.5, "channels": ["A"]}


def register() -> None:
    """One line per registry. The config types are made from them at import."""
    OBJECTIVES.append(SharpnessModule)
    recipe = "tests.unit.seams.sharp_recipe:SharpRecipe"
    VARIANTS["sharp"] = Variant(recipe, "throw-away", "stage2_ab", polygons=False)


def run(what: str, model: Path, data: Path, out: Path) -> dict[str, Any]:
    from rich.console import Console

    from learner.config import parse_config
    from learner.config.json_schema import schema_text
    from learner.data.toy import ToyData
    from learner.training.input_checks import check_inputs
    from learner.training.train import train
    from scripts.metrics_reference import page
    from shared_contracts.errors import ContractErrors
    from tests.unit.small_run import small_mapping

    files = ToyData.under(data)
    mapping = small_mapping(model, files, out, training={"max_steps": 2, "save_steps": 2})
    modules = mapping["stage2_ab"]["pipeline"]["objective"]
    if what == "recipe":
        mapping["custom"]["trainer_variant"] = "sharp"
    else:
        modules.append({**ENTRY, "config": {"entropy_weight": -1.0}})
    refused = ""
    try:
        parse_config(mapping)
    except ContractErrors as errors:
        refused = str(errors)
    if what == "objective":
        modules[-1]["config"] = {"entropy_weight": 2.0}
    config = parse_config(mapping)
    folder = train(config, check_inputs(config), [], Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "refused": refused,
        "schema": schema_text(),
        "reference": page(),
        "steps": [line for line in lines if "grad_norm" in line],
    }


if __name__ == "__main__":
    register()
    print(json.dumps(run(sys.argv[1], *map(Path, sys.argv[2:]))))
