"""What `swift sft` may be told beside the YAML of a run: which checkpoint and data it is about.

Everything else is said in the YAML, once. An option of ms-swift that would be passed over in
silence is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learner.config.schema import Config
from learner.training.input_checks import generates
from shared_contracts.errors import ContractError, ContractErrors

CONFIG_VARIABLE = "ROLLMATCH_CONFIG"

# What the adapter registers its model type, template, tuner and data set under.
NAME = "rollmatch"

# Options with one value, which says that the adapter's own is meant.
_SELECTORS = ("--model_type", "--tuner_type", "--dataset")
# Options whose value is ms-swift's own affair: where its plugins are and its own records go.
_OWN = ("--external_plugins", "--add_version")


def config_path(environment: Mapping[str, str]) -> Path:
    """The YAML of the run.

    Raises ContractError where no variable names it.
    """
    named = environment.get(CONFIG_VARIABLE)
    if not named:
        raise ContractError(
            CONFIG_VARIABLE, "it is not set", "Set it to the training YAML of the run"
        )
    return Path(named)


def check_command(arguments: Sequence[str], config: Config, environment: Mapping[str, str]) -> None:
    """The command line says what the YAML says, and nothing that only the YAML may say.

    arguments: those of `swift sft`, as `--name value` or `--name=value`.

    Raises:
        ContractErrors: every option that does not fit, each with what to do.
    """
    given = dict(_options(arguments))
    if errors := [*_contradictions(given, config), *_unsupported(config, environment)]:
        raise ContractErrors(errors)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with its values."""
    name, values = "", list[str]()
    for word in arguments:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, values
        name, equals, value = word.partition("=")
        values = [value] if equals else []
    if name:
        yield name, values


def _contradictions(given: Mapping[str, list[str]], config: Config) -> Iterator[ContractError]:
    for option in _SELECTORS:
        if given.get(option) != [NAME]:
            yield ContractError(option, _told(given.get(option)), f"Give {option} {NAME}")
    model = given.get("--model")
    if not model or [Path(word).resolve() for word in model] != [config.model.model.resolve()]:
        yield ContractError(
            "--model",
            f"{_told(model)}, and model.model is {config.model.model}",
            f"Give --model {config.model.model}",
        )
    yield from _output(given.get("--output_dir"), Path(config.training.output_dir))
    known = {*_SELECTORS, *_OWN, "--model", "--output_dir"}
    for option in (name for name in given if name not in known):
        yield ContractError(
            option,
            f"{_told(given[option])}, which the run would pass over",
            f"Leave it out, and say it in the YAML that {CONFIG_VARIABLE} names",
        )


def _output(given: list[str] | None, folder: Path) -> Iterator[ContractError]:
    """What ms-swift writes of its own must not be taken for the run's."""
    if given and Path(given[0]).resolve().is_relative_to(folder.resolve()):
        yield ContractError(
            "--output_dir",
            f"{given[0]} is in training.output_dir, {folder}, the folder of the run",
            "Give ms-swift another folder for its own records, or leave it out",
        )


def _unsupported(config: Config, environment: Mapping[str, str]) -> Iterator[ContractError]:
    """What would need a say before ms-swift has imported torch or opened its process group."""
    if environment.get("WORLD_SIZE", "1") != "1" or environment.get("NPROC_PER_NODE", "1") != "1":
        yield ContractError(
            "NPROC_PER_NODE",
            "ms-swift has started several processes",
            "Start one, or `learner train` under torchrun with the same YAML",
        )
    if config.rollout_matching.backend == "colocate" and generates(config):
        yield ContractError(
            "rollout_matching.vllm.mode",
            "colocate, and ms-swift has taken the GPUs before the learner can share them out",
            "Use vllm.mode: server, or `learner train` with the same YAML",
        )
    if config.training.push_to_hub:
        yield ContractError(
            "training.push_to_hub",
            "true, and a run of ms-swift pushes nothing",
            "Set it to false, and push with `learner export CHECKPOINT --push-to-hub`",
        )


def _told(values: Sequence[str] | None) -> str:
    return "not given" if values is None else f"given as {' '.join(values) or 'a switch'}"
