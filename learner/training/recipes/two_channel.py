"""`stage2_two_channel`: channels A and B by `b_ratio`, boxes; A with self-context (CHA-01).

`stage2_group_relative` is the same with groups of answers in channel B (GROUP-01):

    Sample x group_size -> RolloutOutput of each -> reward, advantage -> Segment

The answers of a sample are consecutive, in one process. Their segments may share a pack or not,
because advantages are made before. The step collects its packs before its first forward, because
the loss is a mean over the answer tokens of all processes (GROUP-03).
"""

from learner.config.schema import Config
from learner.models.self_context import SelfContext
from learner.training.recipes import Recipe


class TwoChannel(Recipe):
    """Channel A forwards `stage2_ab.n_softctx_iter` times."""

    @staticmethod
    def self_context(config: Config) -> SelfContext:
        own = config.stage2_ab
        assert own is not None, "it comes with the variant"
        return SelfContext(own.n_softctx_iter, own.coord_ctx_embed_mode, own.softctx_grad_mode)
