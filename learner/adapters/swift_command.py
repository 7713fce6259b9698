"""Checks of the command line of `swift sft` against the YAML of the run (RUN-02).

The YAML has all settings. An option of ms-swift that the run would ignore is refused.
"""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learner.config.schema import Config
from learner.training.input_checks import generates
from shared_contracts.errors import ContractError, ContractErrors

CONFIG_VARIABLE = "ROLLMATCH_CONFIG"

# Name of the adapter's model type, template, tuner and data set in the tables of ms-swift.
NAME = "rollmatch"

# Options with the value `NAME`, with other values, and without an effect on the run.
_SELECTORS = ("--model_type", "--tuner_type", "--dataset")
_MODEL = "--model"
_OWN = ("--external_plugins", "--output_dir", "--add_version")


def config_path(environment: Mapping[str, str]) -> Path:
    """Return the YAML of the run; raises ContractError if no variable names it."""
    if not (named := environment.get(CONFIG_VARIABLE)):
        do = "Set it to the training YAML of the run"
        raise ContractError(CONFIG_VARIABLE, "it is not set", do)
    return Path(named)


def check_command(arguments: Sequence[str], config: Config, environment: Mapping[str, str]) -> None:
    """Check the options of `swift sft` and the features of the run.

    Raises:
        ContractErrors: all options and features that do not fit.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in (*_SELECTORS, _MODEL, *_OWN):
        parser.add_argument(option, dest=option, nargs="*")
    known, ignored = parser.parse_known_args(arguments)
    errors = [*_contradictions(vars(known), config), *_unsupported(config, environment)]
    for word in (word for word in ignored if word.startswith("--")):
        do = f"Leave it out, and set it in the YAML that {CONFIG_VARIABLE} names"
        errors.append(ContractError(word.partition("=")[0], "the run would ignore it", do))
    if errors:
        raise ContractErrors(errors)


def _contradictions(
    given: Mapping[str, list[str] | None], config: Config
) -> Iterator[ContractError]:
    """given: the values of each option; None if it is absent."""
    for option in _SELECTORS:
        if given[option] != [NAME]:
            yield ContractError(option, f"its values are {given[option]}", f"Give {option} {NAME}")
    model = config.model.model
    if [Path(word).resolve() for word in given[_MODEL] or ()] != [model.resolve()]:
        found = f"its values are {given[_MODEL]}, and model.model is {model}"
        yield ContractError(_MODEL, found, f"Give --model {model}")


def _unsupported(config: Config, environment: Mapping[str, str]) -> Iterator[ContractError]:
    """Yield features that a process of ms-swift cannot have, or does not use."""
    if environment.get("WORLD_SIZE", "1") != "1" or environment.get("NPROC_PER_NODE", "1") != "1":
        yield ContractError(
            "NPROC_PER_NODE",
            "ms-swift has started several processes",
            "Start one, or `learner train` under torchrun with the same YAML",
        )
    if config.rollout_matching.backend == "colocate" and generates(config):
        yield ContractError(
            "rollout_matching.vllm.mode",
            "colocate, and ms-swift took the GPUs before the learner could share them",
            "Use vllm.mode: server, or `learner train` with the same YAML",
        )
    if config.training.push_to_hub:
        yield ContractError(
            "training.push_to_hub",
            "true, and a run of ms-swift pushes nothing",
            "Set it to false, and push with `learner export CHECKPOINT --push-to-hub`",
        )
