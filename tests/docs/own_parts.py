"""Registers the parts of CONTRIBUTING.md as it says, then uses them.

    python -m tests.docs.own_parts run|engine ...

The modules are importable by the names in their first lines. The config types are made from the
registries at import, so a process of its own adds to them first.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from learner.objectives import OBJECTIVES, VARIANTS, Variant
from shared_contracts.repeat_guard import ENTRY_CONTEXTS


def run(model: Path, data: Path, out: Path) -> None:
    """Train two steps with an objective, a recipe, a format and a family; print what they did."""
    OBJECTIVES.append(resolve_name("entropy:EntropyModule"))
    VARIANTS["alternating"] = Variant("alternating:Alternating", "A, B, A, B", ("stage2_ab",))
    ENTRY_CONTEXTS["spaced"] = ENTRY_CONTEXTS["objects_array"]

    from learner.config import parse_config
    from learner.config.load import schema_text
    from learner.config.registry import ANSWER_FORMATS, MODEL_FAMILIES
    from learner.data.toy import ToyData
    from scripts.metrics_reference import page
    from shared_contracts.errors import ContractErrors
    from tests.unit.small_run import metric_lines, run_quietly, small_mapping

    ANSWER_FORMATS["spaced"] = "spaced:SPACED"
    MODEL_FAMILIES["qwen3_vl"] = "deepstack:FAMILY"
    mapping = small_mapping(
        model,
        ToyData.under(data),
        out,
        training={"max_steps": 2, "save_steps": 2, "learning_rate": 1e-4, "vit_lr": 2e-4},
        custom={"trainer_variant": "alternating", "answer_format": "spaced"},
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"rollout_backend": "hf", "decode_batch_size": 4},
    )
    entry = {"name": "entropy", "enabled": True, "weight": 0.5, "channels": ["A"]}
    wrong, right = ({**entry, "config": {"entropy_weight": weight}} for weight in (-1.0, 2.0))
    mapping["stage2_ab"]["pipeline"]["objective"].append(wrong)
    refused = ""
    try:
        parse_config(mapping)
    except ContractErrors as errors:
        refused = str(errors)
    mapping["stage2_ab"]["pipeline"]["objective"][-1] = right
    folder = run_quietly(parse_config(mapping))
    answers = (folder / "rollouts/step_000002.jsonl").read_text().splitlines()
    print(
        json.dumps(
            {
                "refused": refused,
                "schema": schema_text(),
                "reference": page(),
                "steps": metric_lines(folder, "grad_norm"),
                "answers": len(answers),
            }
        )
    )


def engine(model: Path) -> None:
    """Have the engine answer a prompt; print how many tokens it says it has generated."""
    from rollout_server.engines.engine_protocol import PromptMessage
    from rollout_server.settings.options import ServerSettings
    from shared_contracts.infer import RequestConfig

    settings = ServerSettings(model=model, device="cpu", max_model_len=256)
    os.environ |= resolve_name("counting:environment")(settings)
    engine = resolve_name("counting:build")(settings, 0)

    async def answer() -> int:
        await engine.prepare()
        prompt = await engine.render([PromptMessage("user", ["Detect every object."])], [])
        config = RequestConfig(max_tokens=8)
        found = await engine.generate(prompt, config, 1, 8, "one", 1)
        return sum(len(each.token_ids) for each in found)

    tokens = asyncio.run(answer())
    print(json.dumps({"answered": tokens, "counted": engine.tokens}))
    engine.shutdown()


if __name__ == "__main__":
    uses: dict[str, Callable[..., None]] = {"run": run, "engine": engine}
    uses[sys.argv[1]](*map(Path, sys.argv[2:]))
