"""Settings of small simulations: nothing of them is on any disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.operate.simulate import Setting
from learner.operate.simulate.inputs import Drawn, LengthsFile, Speeds

WARMUP = Path(__file__).parents[2] / "configs" / "demo" / "warmup.yaml"

# Lengths that spread, and lengths that do not.
SPREAD = LengthsFile(samples=200, prompt=[40, 60, 90], answer=[5, 20, 80], target=[10, 25, 85])
EQUAL = LengthsFile(samples=200, prompt=[50, 50], answer=[20, 20], target=[25, 25])


def simulated_config(**sections: Any) -> Config:
    """Both channels in turn, 16 samples a step over one server; `sections` are merged over it."""
    base = {
        "training": {"max_steps": 12, "save_steps": 12, "effective_batch_size": 16},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {"decode_batch_size": 4},
    }
    return parse_config(merge(merge(load_mapping(WARMUP), base), sections))


def setting(
    speeds: dict[str, Any] | None = None,
    lengths: LengthsFile = SPREAD,
    servers: int = 1,
    ranks: int = 1,
    seed: int = 0,
    **sections: Any,
) -> Setting:
    config = simulated_config(**sections)
    drawn = Drawn(lengths, seed)
    return Setting(config, Speeds.model_validate(speeds or {}), drawn, servers, ranks)


def in_step_mode_and_ahead(**kwargs: Any) -> tuple[Setting, Setting]:
    """The same setting, asynchronous mode off and on."""
    off = setting(**kwargs)
    asynchronous = {"rollout_matching": {"async_rollout": {"enabled": True}}}
    return off, replace(off, config=setting(**merge(kwargs, asynchronous)).config)
