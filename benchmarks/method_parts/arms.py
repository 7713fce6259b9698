"""The arms of the experiment, and their configs.

An arm is one variant of the training. Every arm of a seed starts from the same checkpoint, takes
the same samples in the same order, and is evaluated on the same scenes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "demo"


@dataclass(frozen=True)
class Arm:
    """key: name of its folders. b_ratio: fraction of its steps that are channel B.

    clean: duplicates leave the prefix. unlikelihood: `duplicate_ul` is declared.
    """

    key: str
    title: str
    b_ratio: float
    clean: bool = False
    unlikelihood: bool = False


BASE = Arm("a_alone", "channel A alone", 0.0)
ARMS = (
    BASE,
    Arm("b_25", "A and B, b_ratio 0.25", 0.25),
    Arm("clean", "0.25, clean prefix", 0.25, clean=True),
    Arm("clean_75", "0.75, clean prefix", 0.75, clean=True),
    Arm("clean_ul", "0.25, clean prefix, unlikelihood", 0.25, clean=True, unlikelihood=True),
)
TITLES = {arm.key: arm.title for arm in ARMS}


@dataclass(frozen=True)
class Plan:
    """How much is run.

    pretraining_steps: of the vision tower; distinct_steps, crowded_steps: of channel A on distinct
    and on crowded scenes; all for all seeds. base_steps: of channel A on crowded scenes, in which
    the learning rate falls to zero; of each seed. unlabelled: share of the objects that the
    annotations of the seeds' own training lack. steps: of an arm. every: steps between two
    evaluations on `held_out` scenes. longest: steps of channel A alone, whose evaluations are also
    compared with arms that took as much time.
    """

    seeds: tuple[int, ...]
    scenes: int
    held_out: int
    pretraining_steps: int
    distinct_steps: int
    crowded_steps: int
    base_steps: int
    steps: int
    longest: int
    every: int
    unlabelled: float = 0.0


FULL = Plan((0, 1, 2, 3, 4), 4096, 256, 2400, 3000, 9000, 2000, steps=120, longest=240, every=60)
UNLABELLED = replace(FULL, unlabelled=0.3)
SMALL = Plan((0,), 2048, 128, 1200, 2000, 1000, 1000, steps=60, longest=60, every=60)
TRIAL = Plan((0,), 256, 32, 20, 20, 20, 20, steps=8, longest=16, every=4)
PLANS = {"full": FULL, "unlabelled": UNLABELLED, "small": SMALL, "trial": TRIAL}


@dataclass(frozen=True)
class Place:
    """Files and server of a run. model: the checkpoint it starts from. data: folder of a world."""

    train_jsonl: Path
    val_jsonl: Path
    model: Path
    output_dir: Path
    base_url: str
    group_port: int


def base_config(name: str, steps: int, seed: int, schedule: str, place: Place) -> Config:
    """A part of the crowded demo that comes before its channel B, for a number of steps.

    schedule: of the learning rate, as in `training.lr_scheduler_type`.
    """
    own = {"max_steps": steps, "save_steps": steps, "lr_scheduler_type": schedule}
    return _config(name, seed, place, {"training": own})


def arm_config(arm: Arm, plan: Plan, seed: int, place: Place) -> Config:
    """The last part of the crowded demo, evaluated on its way, with what the arm changes."""
    mapping = load_mapping(CONFIGS / "crowded_two_channel.yaml")
    objective = mapping["stage2_ab"]["pipeline"]["objective"]
    if not arm.unlikelihood:
        objective = [module for module in objective if module["name"] != "duplicate_ul"]
    sections: dict[str, Any] = {
        "training": {
            "max_steps": plan.longest if arm is BASE else plan.steps,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": plan.every,
        },
        "stage2_ab": {
            "schedule": {"b_ratio": arm.b_ratio},
            "channel_b": {"prefix": "clean" if arm.clean else "verbatim"},
            "pipeline": {"objective": objective},
        },
        "rollout_matching": {
            "eval_detection": {"enabled": True, "save_answers": True},
        },
    }
    return _config("crowded_two_channel", seed, place, sections)


def _config(name: str, seed: int, place: Place, sections: dict[str, Any]) -> Config:
    server = {"servers": [{"base_url": place.base_url, "group_port": place.group_port}]}
    places = {
        "model": {"model": str(place.model)},
        "data": {"train_jsonl": str(place.train_jsonl), "val_jsonl": str(place.val_jsonl)},
        "training": {"output_dir": str(place.output_dir), "seed": seed},
        "rollout_matching": {"vllm": {"server": server}},
    }
    return parse_config(merge(merge(load_mapping(CONFIGS / f"{name}.yaml"), places), sections))
