"""Rewards of answers, and their advantages within a group (GROUP-01).

The F1@mIoU is that of evaluations, for one answer: a hit needs the same description, and
predictions that LVIS's lists leave open are not judged. An answer without objects to an image
without objects has 1.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from learner.config.rollout_matching import GroupRelativeConfig
from learner.stages.clean_prefix import repeats
from learner.stages.matching import (
    IOU_THRESHOLDS,
    exact_iou,
    left_open,
    most_pairs,
    same_description,
)
from learner.stages.tokens import decode_bin
from learner.types import AssessedRollout, Reward, Shape

# Added to the standard deviation of a group, so that a small one gives no large advantage.
STD_FLOOR = 1e-6


def with_rewards(
    assessed: Sequence[AssessedRollout], config: GroupRelativeConfig, resolution: int
) -> list[AssessedRollout]:
    """Add the reward and the advantages of each answer.

    assessed: whole groups, one after the other. resolution: as in `exact_iou`.

    The advantage is `r - mean`, and with `mean_std` this over `std + 1e-6`, of the rewards r of the
    group (Shao et al., "DeepSeekMath", arXiv 2402.03300). The standard deviation is that of the
    group itself, over `group_size`. Equal rewards have the advantage 0.

    With `credit: object` the advantage of entry k is `c = r_k - r_(k-1)`, where r_k is the reward
    of the first k entries. With `mean_std` it is c over `std + 1e-6` of all entries of the group.
    So the advantages of an answer are parts of its reward, without a mean of the group.
    """
    found: list[AssessedRollout] = []
    for first in range(0, len(assessed), config.group_size):
        group = assessed[first : first + config.group_size]
        judged = [_rewards(each, config, resolution) for each in group]
        credits = [[b.total - a.total for a, b in pairwise(rewards)] for rewards in judged]
        totals = np.array([rewards[-1].total for rewards in judged])
        is_equal = (totals == totals[0]).all()
        spread = 0.0 if is_equal else float(totals.std())
        ahead = np.zeros(len(group)) if is_equal else totals - totals.mean()
        scale = scale_of_credits = 1.0
        if config.advantage == "mean_std":
            scale = spread + STD_FLOOR
            scale_of_credits = float(np.std([*chain(*credits)] or 0.0)) + STD_FLOOR
        for each, rewards, more, own in zip(group, judged, ahead.tolist(), credits, strict=True):
            parts = tuple(credit / scale_of_credits for credit in own) or None
            reward = rewards[-1]._replace(spread=spread, advantage=more / scale, credits=parts)
            found.append(each._replace(reward=reward))
    return found


def token_advantages(assessed: AssessedRollout, count: int) -> list[float]:
    """Return the advantages of the first `count` tokens of an answer.

    With `credit: object` the tokens after the last entry, such as an unfinished one, have what they
    add to the reward: 0 for a complete answer.
    """
    reward = assessed.reward
    if reward is None or reward.credits is None:
        return [0.0 if reward is None else reward.advantage] * count
    ends = [end + 1 for end, _ in assessed.parsed.entry_ends]
    spans = pairwise([0, *ends, len(assessed.rollout.response_token_ids)])
    own = zip(reward.credits, spans, strict=True)
    return [credit for credit, (start, end) in own for _ in range(start, end)][:count]


def _rewards(
    assessed: AssessedRollout, config: GroupRelativeConfig, resolution: int
) -> list[Reward]:
    """Return the reward of an answer, without an advantage.

    With `credit: object` those of its first 0, 1, ... entries come before it.
    """
    parsed, truths, own = assessed.parsed, assessed.sample.objects, config.reward
    predicted, lists = parsed.objects, assessed.sample.category_lists
    named = same_description(predicted, truths)
    iou = np.where(named, exact_iou(predicted, truths, resolution), 0.0)
    hits = {p for p, _ in most_pairs(iou, iou >= IOU_THRESHOLDS[0])}
    unjudged = {p for p, o in enumerate(predicted) if left_open(o.desc, truths, lists)} - hits
    iou[[*unjudged]] = 0.0
    repeated = repeats(predicted, own.duplicate_iou, resolution)
    shares = [_image_share(found.shape) for found in predicted]
    large = {p for p, share in enumerate(shares) if share >= own.oversized_share}

    def reward(objects: int, dropped: int) -> Reward:
        """Return the reward of an answer that ends after so many objects and dropped entries."""
        begun = iou[:objects]
        hits_at = [len(most_pairs(begun, begun >= least)) for least in IOU_THRESHOLDS]
        both = objects - sum(place < objects for place in unjudged) + len(truths)
        f1 = 2 * sum(hits_at) / len(hits_at) / both if both else 1.0
        count = max(objects + dropped, 1)
        duplicates = sum(place < objects for place in repeated) / count
        oversized = sum(place < objects for place in large - hits - unjudged) / count
        total = (
            own.f1_weight * f1
            - own.duplicate_weight * duplicates
            - own.oversized_weight * oversized
            - own.invalid_weight * dropped / count
        )
        return Reward(f1, duplicates, oversized, dropped / count, total)

    before: list[Reward] = []
    if config.credit == "object":
        valid = accumulate((index is not None for _, index in parsed.entry_ends), initial=0)
        before = [reward(objects, place - objects) for place, objects in enumerate(valid)]
    return [*before, reward(len(predicted), len(parsed.dropped))]


def _image_share(box: Shape) -> float:
    x1, y1, x2, y2 = (decode_bin(k) for k in box.coords)
    return (x2 - x1) * (y2 - y1)
