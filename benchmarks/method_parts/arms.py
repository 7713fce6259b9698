"""The arms of the ablation, and the one channel that the product does not have."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.training.channels import ChannelB
from learner.types import AssessedRollout

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "demo"

# A right answer has at most two objects, writes no token twice in a row, and repeats at most
# the pairs (coordinate, separator) of one box, four times.
GUARD = {
    "enabled": True,
    "max_consecutive_token_repeats": 4,
    "ngram_size": 2,
    "ngram_repeats": 5,
    "max_object_keys": 3,
}


class WithoutAppend(ChannelB):
    """Corrects what was matched and appends nothing: what was missed is left out.

    An answer of which nothing matched is closed after its prefix.
    """

    def correct(self, assessed: AssessedRollout) -> AssessedRollout:
        sample, match = assessed.sample, assessed.match
        found = tuple(sample.objects[j] for _, j in match.pairs)
        pairs = [(i, place) for place, (i, _) in enumerate(match.pairs)]
        corrected = super().correct(
            assessed._replace(
                sample=replace(sample, objects=found),
                match=replace(match, pairs=pairs, false_negatives=[]),
            )
        )
        return assessed._replace(target=corrected.target, left_out=corrected.left_out)


@dataclass(frozen=True)
class Arm:
    """key: name of its folders. guard: whether its server ends answers that repeat themselves."""

    key: str
    title: str
    b_ratio: float
    guard: bool = True
    channel_b: type[ChannelB] = ChannelB


ARMS = (
    Arm("a_alone", "channel A alone", 0.0),
    Arm("mixed", "A and B mixed", 0.5),
    Arm("no_append", "B without the append", 0.5, channel_b=WithoutAppend),
    Arm("no_guard", "A and B mixed, guard off", 0.5, guard=False),
)
TITLES = {arm.key: arm.title for arm in ARMS}
BASE = "mixed"


@dataclass(frozen=True)
class Plan:
    """How much is run. every: steps between evaluations of the `held_out` scenes."""

    seeds: tuple[int, ...]
    scenes: int
    held_out: int
    warmup_steps: int
    steps: int
    every: int


FULL = Plan((0, 1, 2), scenes=4096, held_out=256, warmup_steps=200, steps=120, every=20)
QUICK = Plan((0,), scenes=512, held_out=32, warmup_steps=20, steps=8, every=4)


@dataclass(frozen=True)
class Place:
    """Files and server of a run. model: the checkpoint it starts from."""

    data: ToyData
    model: Path
    output_dir: Path
    base_url: str
    group_port: int


def warmup_config(plan: Plan, seed: int, place: Place) -> Config:
    """The demo's warm-up, for another number of steps."""
    steps = {"max_steps": plan.warmup_steps, "save_steps": plan.warmup_steps}
    return _config("warmup", seed, place, {"training": steps})


def arm_config(arm: Arm, plan: Plan, seed: int, place: Place) -> Config:
    """The demo's second part, evaluated on its way, with the arm's share of channel B."""
    training = {
        "max_steps": plan.steps,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": plan.every,
    }
    sections = {
        "training": training,
        "stage2_ab": {"schedule": {"b_ratio": arm.b_ratio}},
        "rollout_matching": {"repeat_terminate": GUARD if arm.guard else {"enabled": False}},
    }
    return _config("two_channel", seed, place, sections)


def _config(name: str, seed: int, place: Place, sections: dict[str, Any]) -> Config:
    server = {"servers": [{"base_url": place.base_url, "group_port": place.group_port}]}
    files = place.data
    places = {
        "model": {"model": str(place.model)},
        "data": {"train_jsonl": str(files.train_jsonl), "val_jsonl": str(files.val_jsonl)},
        "training": {"output_dir": str(place.output_dir), "seed": seed},
        "rollout_matching": {"vllm": {"server": server}},
    }
    return parse_config(merge(merge(load_mapping(CONFIGS / f"{name}.yaml"), places), sections))
