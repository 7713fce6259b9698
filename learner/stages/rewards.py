"""Rewards of answers, and their advantages within a group (GROUP-01).

    AssessedRollouts of one sample -> reward_of() of each -> with_rewards(): advantages

The F1@mIoU is that of evaluations, for one answer: a hit needs the same description, and
predictions that LVIS's lists leave open are not judged. An answer without objects to an image
without objects has 1.
"""

from collections.abc import Sequence

import numpy as np

from learner.config.group_relative import GroupRelativeConfig, RewardConfig
from learner.stages.clean_prefix import repeats
from learner.stages.coords import decode_bin
from learner.stages.matching import (
    IOU_THRESHOLDS,
    exact_iou,
    left_open,
    most_pairs,
    same_description,
)
from learner.types import AssessedRollout, Reward, Shape

# Added to the standard deviation of a group, so that a small one gives no large advantage.
STD_FLOOR = 1e-6


def with_rewards(
    assessed: Sequence[AssessedRollout], config: GroupRelativeConfig, resolution: int
) -> list[AssessedRollout]:
    """Add the reward and the advantage of each answer.

    assessed: whole groups, one after the other. resolution: as in `exact_iou`.

    The advantage is `r - mean`, and with `mean_std` this over `std + 1e-6`, of the rewards r of the
    group (Shao et al., "DeepSeekMath", arXiv 2402.03300). The standard deviation is that of the
    group itself, over `group_size`. Equal rewards have the advantage 0.
    """
    rewards = [reward_of(each, config.reward, resolution) for each in assessed]
    totals = np.array([reward.total for reward in rewards]).reshape(-1, config.group_size)
    equal = (totals == totals[:, :1]).all(axis=1, keepdims=True)
    spreads = np.where(equal, 0.0, totals.std(axis=1, keepdims=True))
    ahead = np.where(equal, 0.0, totals - totals.mean(axis=1, keepdims=True))
    if config.advantage == "mean_std":
        ahead = ahead / (spreads + STD_FLOOR)
    compared = zip(np.broadcast_to(spreads, ahead.shape).flat, ahead.flat, strict=True)
    return [
        each._replace(reward=reward._replace(spread=float(spread), advantage=float(advantage)))
        for each, reward, (spread, advantage) in zip(assessed, rewards, compared, strict=True)
    ]


def reward_of(assessed: AssessedRollout, config: RewardConfig, resolution: int) -> Reward:
    """Return the reward of one answer, without an advantage."""
    predicted, sample = assessed.parsed.objects, assessed.sample
    iou = exact_iou(predicted, sample.objects, resolution)
    named = same_description(predicted, sample.objects)
    hits = {p for p, _ in most_pairs(iou, named & (iou >= IOU_THRESHOLDS[0]))}
    lists = sample.category_lists
    unjudged = {p for p, o in enumerate(predicted) if left_open(o.desc, sample.objects, lists)}
    unjudged -= hits
    named[[*unjudged]] = False
    hits_at = [len(most_pairs(iou, named & (iou >= least))) for least in IOU_THRESHOLDS]
    both = len(predicted) - len(unjudged) + len(sample.objects)
    shares = map(_image_share, (found.shape for found in predicted))
    large = {p for p, share in enumerate(shares) if share >= config.oversized_share}
    dropped = len(assessed.parsed.dropped)
    entries = max(len(predicted) + dropped, 1)
    f1 = 2 * sum(hits_at) / len(hits_at) / both if both else 1.0
    duplicates = len(repeats(predicted, config.duplicate_iou, resolution)) / entries
    oversized, invalid = len(large - hits - unjudged) / entries, dropped / entries
    total = (
        config.f1_weight * f1
        - config.duplicate_weight * duplicates
        - config.oversized_weight * oversized
        - config.invalid_weight * invalid
    )
    return Reward(f1, duplicates, oversized, invalid, total)


def _image_share(box: Shape) -> float:
    """Return the share of the image that a box covers."""
    x1, y1, x2, y2 = (decode_bin(k) for k in box.coords)
    return (x2 - x1) * (y2 - y1)
