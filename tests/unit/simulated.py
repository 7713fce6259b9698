"""A config of small simulations: nothing of it is on any disk."""

from pathlib import Path
from typing import Any

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config

WARMUP = Path(__file__).parents[2] / "configs" / "demo" / "warmup.yaml"


def simulated_config(**sections: Any) -> Config:
    """Both channels in turn, 16 samples a step over one server; `sections` are merged over it."""
    base = {
        "training": {"max_steps": 12, "save_steps": 12, "effective_batch_size": 16},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {"decode_batch_size": 4},
    }
    return parse_config(merge(merge(load_mapping(WARMUP), base), sections))
