"""The arms of the experiment, and their configs.

An arm is one variant of the training. Every arm of a seed starts from the same checkpoint, takes
the same samples in the same order, and is evaluated on the same scenes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "demo"


@dataclass(frozen=True)
class Arm:
    """key: name of its folders. b_ratio: fraction of its steps that are channel B.

    prefix: as in `stage2_ab.channel_b`. unlikelihood: `duplicate_ul` is declared. rewards: `alone`
    are the objective of channel B, also with credit by `objects`, or are declared `beside` its
    other modules; None: there are no groups of answers. learning_rate: None for that of the demo.
    """

    key: str
    title: str
    b_ratio: float
    prefix: str = "verbatim"
    unlikelihood: bool = False
    rewards: Literal["alone", "objects", "beside"] | None = None
    learning_rate: float | None = None


BASE = Arm("a_alone", "channel A alone", 0.0)
ARMS = (
    BASE,
    Arm("b_25", "A and B, b_ratio 0.25", 0.25),
    Arm("clean", "0.25, clean prefix", 0.25, "clean"),
    Arm("clean_75", "0.75, clean prefix", 0.75, "clean"),
    Arm("clean_ul", "0.25, clean prefix, unlikelihood", 0.25, "clean", unlikelihood=True),
    Arm("matched", "0.25, prefix of matched objects", 0.25, "matched"),
    Arm("matched_75", "0.75, prefix of matched objects", 0.75, "matched"),
    Arm("group", "groups of 8 answers, rewards alone", 1.0, rewards="alone", learning_rate=3e-5),
    Arm("objects", "0.5, groups, credit by object", 0.5, rewards="objects", learning_rate=6e-5),
    Arm("both", "0.25, groups of 8 answers, missed objects", 0.25, rewards="beside"),
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
    compared with arms that took as much time. schedule: of the arms' learning rate.
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
    schedule: str = "constant_with_warmup"


FULL = Plan((0, 1, 2, 3, 4), 4096, 256, 2400, 3000, 9000, 2000, steps=120, longest=240, every=60)
UNLABELLED = replace(FULL, unlabelled=0.3)
# Evaluations differ less: the learning rate falls to zero, and four times as many scenes decide.
FALLING = replace(FULL, held_out=1024, longest=120, schedule="cosine")
SMALL = Plan((0,), 2048, 128, 1200, 2000, 1000, 1000, steps=60, longest=60, every=60)
TRIAL = Plan((0,), 256, 32, 20, 20, 20, 20, steps=8, longest=16, every=4)
PLANS = {
    "full": FULL,
    "falling": FALLING,
    "unlabelled": UNLABELLED,
    "small": SMALL,
    "trial": TRIAL,
}

# Nothing of it has been tuned.
POLICY_GRADIENT = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {"clip_low": 0.2, "clip_high": 0.28, "kl_weight": 0.0},
}
# A step has as many samples as one of every other arm, and so eight times as many answers.
GROUPED: dict[str, Any] = {
    "custom": {"trainer_variant": "stage2_group_relative"},
    "group_relative": {
        "group_size": 8,
        "advantage": "mean_std",
        "reward": {
            "f1_weight": 1.0,
            "duplicate_weight": 0.5,
            "duplicate_iou": 0.9,
            "oversized_weight": 0.5,
            "oversized_share": 0.95,
            "invalid_weight": 0.5,
        },
    },
    "rollout_matching": {
        "decode_mode": "sampling",
        "decoding": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "logprobs": True,
    },
}
# Of sampled objects 7 % repeat another one with an IoU of 0.5, and 0.3 % with 0.9; of annotations
# 0.1 % do with 0.5.
BY_OBJECT: dict[str, Any] = {
    "group_relative": {
        "credit": "object",
        "reward": {"duplicate_weight": 1.0, "duplicate_iou": 0.5},
    }
}


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
    if arm.rewards is not None:
        channels = ["A", "B"] if arm.rewards == "beside" else ["A"]
        beside = [module | {"channels": channels} for module in objective]
        weight = 3.0 if arm.rewards == "objects" else 1.0  # of gradients as large as channel A's
        objective = [*beside, POLICY_GRADIENT | {"weight": weight}]
    sections: dict[str, Any] = {
        "training": {
            "max_steps": plan.longest if arm is BASE else plan.steps,
            "lr_scheduler_type": plan.schedule,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": plan.every,
        },
        "stage2_ab": {
            "schedule": {"b_ratio": arm.b_ratio},
            "channel_b": {"prefix": arm.prefix},
            "pipeline": {"objective": objective},
        },
        "rollout_matching": {
            "eval_detection": {"enabled": True, "save_answers": True},
        },
    }
    if arm.rewards is not None:
        sections = merge(sections, GROUPED)
    if arm.rewards == "objects":
        sections = merge(sections, BY_OBJECT)
    if arm.learning_rate is not None:
        sections["training"]["learning_rate"] = arm.learning_rate
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
