"""Checks of a checkpoint folder without a model, and its token counts. Imports no torch."""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from learner.config.schema import Config, CustomConfig, LoraTuner
from learner.config.yaml12 import read_mapping
from learner.data.checkpoint import Checkpoint, SampleLengths, TokenLimits, read_json
from learner.runs.run_folder import RESOLVED
from learner.stages.formats import answer_format
from learner.types import Sample
from shared_contracts.checkpoints import run_context
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import shown


def check_model(config: Config) -> None:
    """Check that `model.model` can write the answers of this run. Raises ContractError."""
    Checkpoint(config.model.model).require_vocabulary()
    check_taught_format(config.model.model, config.custom.answer_format, "model.model")


def check_taught_format(checkpoint: Path, wanted: str, where: str) -> None:
    """Raise ContractError about `where` if the checkpoint's run had another format than `wanted`.

    Only a checkpoint in a run folder has a known format.
    """
    resolved = checkpoint.absolute().parent / RESOLVED
    try:
        custom = read_mapping(resolved).get("custom") if resolved.is_file() else None
    except ContractError:  # the file is damaged
        return
    # Runs before the key existed had the default format.
    default = CustomConfig.model_fields["answer_format"].default
    taught = custom.get("answer_format", default) if isinstance(custom, dict) else wanted
    if taught != wanted:
        raise ContractError(
            where,
            f"{checkpoint} writes answers as {taught} ({resolved}), and custom.answer_format is "
            f"{wanted}",
            f"Set custom.answer_format to {taught}; or export the checkpoint with "
            "`learner export` to a folder outside of its run, and train the format in a warm-up",
        )


def check_target_modules(config: Config) -> None:
    """Raise ContractErrors for names of `tuner.target_modules` that the checkpoint lacks.

    Also for embedding and head if they share one weight: an adapter of one of them, merged for a
    push or an export, would change both. Does nothing without safetensors files.
    """
    tuner = config.tuner
    if not isinstance(tuner, LoraTuner) or isinstance(tuner.target_modules, str):
        return
    checkpoint = Checkpoint(Checkpoint(config.model.model).base)
    modules = {name.rpartition(".")[0] for name in checkpoint.tensor_names()}
    if not modules:
        return
    ties = read_json(checkpoint.folder / "config.json").get("tie_word_embeddings") is True
    if tuner.adapts_rows and (ties or "lm_head" not in modules):
        raise ContractError(
            "tuner.target_modules",
            f"names the embedding or the head, which share one weight in {checkpoint.folder}: an "
            "adapter of one of them, merged for a push or an export, would change both",
            "Take embed_tokens and lm_head out: tuner.train_coordinate_rows trains their rows of "
            "the coordinate tokens",
        )
    last = {name.rpartition(".")[2] for name in modules}
    errors = [
        ContractError(
            f"tuner.target_modules[{place}]",
            f"{shown(target)} is the end of no module's name in {config.model.model}",
            "Name modules literally, without patterns; "
            f"there are {', '.join(sorted(name for name in last if not name.isdecimal()))}",
        )
        for place, target in enumerate(tuner.target_modules)
        if target.rpartition(".")[2] not in last
    ]
    if errors:
        raise ContractErrors(errors)


def context_of_run(config: Config, samples: Iterable[Sample]) -> int:
    """Return the `max_model_len` of the servers of a run, as stated or derived (FULL-06).

    A derived one has room for the longest prompt of `samples` and `max_new_tokens`, rounded up.
    """
    if (stated := config.rollout_matching.vllm.max_model_len) is not None:
        return stated
    prompt, answer = longest_prompt(config, samples), config.rollout_matching.max_new_tokens
    return run_context(config.model.model, prompt, answer)


def longest_prompt(config: Config, samples: Iterable[Sample]) -> int:
    """Return the tokens of the longest prompt; samples with unreadable images are left out."""
    lengths, longest = lengths_of_run(config), 0
    for sample in samples:
        with suppress(ContractError):
            longest = max(longest, lengths.prompt(sample))
    return longest


def lengths_of_run(config: Config) -> SampleLengths:
    """Return the lengths of samples with the checkpoint, prompt and limits of a run.

    Raises ContractError for a folder that is no checkpoint.
    """
    answers = answer_format(config)
    check_model(config)
    pack = config.global_max_length if config.training.packing else None
    return SampleLengths(
        Checkpoint(config.model.model),
        partial(answers.write, field_order=config.custom.object_field_order),
        config.template.prompt,
        config.template.system,
        TokenLimits(config.rollout_matching.max_new_tokens, pack),
    )
