"""`group_relative`: how the answers to one sample are rewarded and compared (GROUP-01)."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from learner.objectives.objective import Weight
from shared_contracts.strict_model import Refusal, StrictModel


class RewardConfig(StrictModel):
    """The terms of a reward. Shares are of all entries of the answer, invalid ones too."""

    f1_weight: Weight = Field(description="weight of the F1@mIoU of the answer")
    duplicate_weight: Weight = Field(
        description="subtracted, times the share of objects that repeat an earlier one"
    )
    duplicate_iou: float = Field(
        gt=0, le=1, description="IoU from which an object of the same description is a repetition"
    )
    oversized_weight: Weight = Field(
        description="subtracted, times the share of oversized objects that are no hit"
    )
    oversized_share: float = Field(
        gt=0, le=1, description="share of the image from which an object is oversized"
    )
    invalid_weight: Weight = Field(
        description="subtracted, times the share of objects that are dropped as invalid"
    )

    def disagreements(self) -> Iterator[Refusal]:
        weights = (self.f1_weight, self.duplicate_weight, self.oversized_weight)
        if not any((*weights, self.invalid_weight)):
            found = "every weight is 0: all answers have the same reward, and nothing is learned"
            yield Refusal(found, "Set f1_weight to 1")


class GroupRelativeConfig(StrictModel):
    """Groups of sampled answers, and how an answer is compared with the others of its group."""

    group_size: int = Field(ge=2, description="answers to each sample of a step of channel B")
    advantage: Literal["mean", "mean_std"] = Field(
        description="`mean`: the reward less the mean of its group; `mean_std`: this over the "
        "standard deviation of the group"
    )
    credit: Literal["answer", "object"] = Field(
        default="answer",
        description="`answer`: each token has the advantage of its answer; `object`: that of its "
        "object, by what the object adds to the reward of the objects before it",
    )
    reward: RewardConfig = Field(description="the terms of an answer's reward; all its keys")
