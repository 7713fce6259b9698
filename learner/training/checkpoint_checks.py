"""Checks of a checkpoint folder without a model, and the token counts that follow from it.

Imports no torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from learner.config.schema import Config, CustomConfig, LoraTuner
from learner.config.yaml12 import read_mapping
from learner.data.images import UnreadableImage
from learner.data.lengths import SampleLengths, TokenLimits, chat_template, read_tokenizer
from learner.runs.run_folder import RESOLVED
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats import answer_format
from learner.stages.tokens import IM_END
from learner.types import Sample
from shared_contracts.adapters import checkpoint_chain, folder_with
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.footprint import run_context
from shared_contracts.strict_model import shown


def check_model(config: Config) -> None:
    """Check that `model.model` can write the answers of this run.

    Raises:
        ContractError: as `check_checkpoint` and `check_taught_format`.
    """
    check_checkpoint(config.model.model)
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


def check_checkpoint(folder: Path, end_marker: str = IM_END) -> None:
    """Check for a checkpoint with a chat template, the coordinate tokens and the end marker.

    For an adapter, the tokenizer is in its folder or in that of its base checkpoint.

    Raises:
        ContractError: names what is missing.
    """
    if not folder.is_dir():
        do = "Give the folder of a checkpoint, or download one into it: "
        do += f"hf download OWNER/NAME --local-dir {folder}"
        raise ContractError("model.model", f"there is no folder {folder}", do)
    chain = checkpoint_chain(folder, "model.model")
    having = {
        "config.json": chain[-1],
        "tokenizer.json": folder_with(folder, "tokenizer.json", "model.model"),
    }
    for name, holder in having.items():
        if not (holder / name).is_file():
            raise ContractError(
                "model.model",
                f"{folder} has no {name}",
                "Give the folder of a checkpoint saved with its processor",
            )
    tokenizer = read_tokenizer(having["tokenizer.json"] / "tokenizer.json")
    if tokenizer.token_to_id(end_marker) is None:
        raise ContractError(
            "model.model",
            f"the tokenizer of {folder} has no token {end_marker}",
            "Use a model of the Qwen-VL family, whose turns end with it",
        )
    missing = [k for k in range(COORD_BINS) if tokenizer.token_to_id(coord_token(k)) is None]
    if missing:
        raise ContractError(
            "model.model",
            f"the tokenizer of {folder} lacks {len(missing)} of the {COORD_BINS} coordinate "
            f"tokens, first {coord_token(missing[0])}",
            "Add them with `learner toy make-model --expand-vocab SOURCE --out FOLDER`",
        )
    chat_template(having["tokenizer.json"])


def coordinate_ids(folder: Path) -> list[int]:
    """Return the ids of the coordinate tokens, in the order of the bins, of a checked folder."""
    place = folder_with(folder, "tokenizer.json", "model.model")
    tokenizer = read_tokenizer(place / "tokenizer.json")
    ids = [tokenizer.token_to_id(coord_token(k)) for k in range(COORD_BINS)]
    return [each for each in ids if each is not None]


def check_target_modules(config: Config) -> None:
    """Raise ContractErrors for names of `tuner.target_modules` that the checkpoint lacks.

    Does nothing without safetensors files.
    """
    tuner = config.tuner
    if not isinstance(tuner, LoraTuner) or isinstance(tuner.target_modules, str):
        return
    modules = {name.rpartition(".")[0] for name in tensor_names(config.model.model)}
    if not modules:
        return
    last = {name.rpartition(".")[2] for name in modules} | {"lm_head"}  # no file has a tied one
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


def tensor_names(folder: Path) -> list[str]:
    """Return the tensor names of a checkpoint's `model*.safetensors`; broken files have none."""
    names: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(file, "numpy") as tensors:
            names += tensors.keys()
    return names


def context_of_run(config: Config, samples: Iterable[Sample]) -> int:
    """Return the `max_model_len` of the servers of a run, as stated or derived (FULL-06).

    A derived one has room for the longest prompt of `samples` and `max_new_tokens`, rounded up.

    Raises ContractError as `lengths_of_run` does.
    """
    if (stated := config.rollout_matching.vllm.max_model_len) is not None:
        return stated
    prompt, answer = longest_prompt(config, samples), config.rollout_matching.max_new_tokens
    return run_context(config.model.model, prompt, answer)


def longest_prompt(config: Config, samples: Iterable[Sample]) -> int:
    """Return the tokens of the longest prompt; samples with unreadable images are left out.

    Raises ContractError as `lengths_of_run` does.
    """
    lengths, longest = lengths_of_run(config), 0
    for sample in samples:
        with suppress(ContractError, UnreadableImage):
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
        folder_with(config.model.model, "tokenizer.json", "model.model"),
        partial(answers.write, field_order=config.custom.object_field_order),
        config.template.prompt,
        config.template.system,
        TokenLimits(config.rollout_matching.max_new_tokens, pack),
    )
