"""An estimate as the speeds of a simulation: those that no machine exceeds."""

from learner.operate.estimate.report import Estimate
from learner.operate.simulate.inputs import ChannelSpeeds, LearnSpeed, PushSpeed, Speeds
from learner.types import Channel


def speeds_at_best(found: Estimate, known: Speeds) -> Speeds:
    """`known` with the speeds that the GPU bounds; what the CPU and the network take stays.

    A decode step reads all weights, and the cache of each sequence, here of the longest ones.
    A prompt token is 2 FLOPs for each weight.
    """
    gpu, served = found.gpu, found.served
    learner = known.learner.model_copy(
        update={
            **{channel.lower(): _channel(found, channel, known) for channel in found.costs},
            "update_s": found.largest.update.seconds(gpu),
        }
    )
    engine = known.engine
    if served is not None:
        engine = engine.model_copy(
            update={
                "prefill_tokens_per_s": gpu.flops / (2 * found.parameters),
                "step_s": served.weights / gpu.bandwidth,
                "step_per_sequence_s": served.sequence / gpu.bandwidth,
            }
        )
    push = PushSpeed(
        fixed_s=known.push.fixed_s + found.gather_s,
        gigabytes=found.pushed / 1e9,
        gb_per_s=found.pushed / found.send_s / 1e9,
    )
    return known.model_copy(update={"learner": learner, "engine": engine, "push": push})


def _channel(found: Estimate, channel: Channel, known: Speeds) -> ChannelSpeeds:
    """Of one forward and backward: channel A may have several."""
    cost = found.costs[channel]
    forwards = found.forwards if channel == "A" else 1
    own: ChannelSpeeds = getattr(known.learner, channel.lower())
    seconds = max(cost.pack.seconds(found.gpu), cost.pack.sent / found.gpu.link)
    learn = LearnSpeed(forward_s=0.0, token_s=seconds / cost.tokens / forwards)
    return own.model_copy(update={"learn": learn})
