"""`stage2_ab`: the two channels of `stage2_two_channel`, their schedule and objective."""

from typing import Annotated, Literal

from pydantic import Field

from learner.config.pipeline import PipelineConfig
from learner.config.values import WrittenDecimal
from shared_contracts.strict_model import StrictModel

SoftContextGradMode = Literal["unroll", "em_detach"]
CoordContextMode = Literal["st", "soft", "hard"]


class ScheduleConfig(StrictModel):
    b_ratio: Annotated[WrittenDecimal, Field(ge=0, le=1)] = Field(
        description="share of the optimizer steps that are channel B, as the decimal written"
    )


class Stage2ABConfig(StrictModel):
    schedule: ScheduleConfig = Field(description="which steps are channel B")
    n_softctx_iter: int = Field(
        default=1, ge=1, description="forwards of channel A; 1 is teacher forcing"
    )
    softctx_grad_mode: SoftContextGradMode = Field(
        default="unroll",
        description="with several forwards: gradients flow through the fed-back embeddings, or "
        "stop there",
    )
    coord_ctx_embed_mode: CoordContextMode = Field(
        default="st",
        description="with several forwards, what is fed back at coordinates: the likeliest "
        "token's embedding with the mean's gradient (`st`), the mean (`soft`), or the likeliest "
        "(`hard`)",
    )
    pipeline: PipelineConfig = Field(description="the objective and diagnostics modules")
