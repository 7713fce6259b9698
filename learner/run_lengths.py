"""Tokens of a run's samples, as the run would make them. Imports no torch."""

from functools import partial

from learner.config.schema import Config
from learner.data.lengths import SampleLengths, TokenLimits
from learner.preflight import check_checkpoint
from learner.rollout.requests import build_messages
from learner.serialize import serialize_objects


def lengths_of_run(config: Config) -> SampleLengths:
    """Measures samples for the checkpoint, the prompt and the limits of a run.

    Raises ContractError for a folder that is no checkpoint.
    """
    check_checkpoint(config.model.model)
    template = config.template
    pack = config.global_max_length if config.training.packing else None
    return SampleLengths(
        config.model.model,
        partial(serialize_objects, field_order=config.custom.object_field_order),
        lambda sample: [
            message.model_dump(exclude_none=True)
            for message in build_messages(sample, template.prompt, template.system)
        ],
        TokenLimits(config.rollout_matching.max_new_tokens, pack),
    )
