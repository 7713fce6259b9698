"""Checks of the command line of `swift sft` against the YAML of the run (RUN-02).

The YAML has all settings. An option of ms-swift that the run would ignore is refused.
"""

import os.path
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.config.schema import Config
from learner.training.input_checks import generates
from shared_contracts.errors import ContractError, ContractErrors

CONFIG_VARIABLE = "ROLLMATCH_CONFIG"

# Name of the adapter's model type, template, tuner and data set in the tables of ms-swift.
NAME = "rollmatch"

_SELECTORS = ("--model_type", "--tuner_type", "--dataset")
# Without an effect on the run.
_OWN = ("--external_plugins", "--output_dir", "--add_version")


def config_path(environment: Mapping[str, str]) -> Path:
    """Return the YAML of the run; raises ContractError if no variable names it."""
    if not (named := environment.get(CONFIG_VARIABLE)):
        do = "Set it to the training YAML of the run"
        raise ContractError(CONFIG_VARIABLE, "it is not set", do)
    return Path(named)


def check_command(arguments: Sequence[str], config: Config, environment: Mapping[str, str]) -> None:
    """Check the options of `swift sft`, and the features that a process of ms-swift cannot have.

    Raises:
        ContractErrors: all options and features that do not fit.
    """
    wanted = dict.fromkeys(_SELECTORS, NAME) | {"--model": str(config.model.model)}
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in (*wanted, *_OWN):
        parser.add_argument(option, dest=option, nargs="*")
    known, ignored = parser.parse_known_args(arguments)
    faults = [
        (option, f"its values are {vars(known)[option]}", f"Give {option} {value}")
        for option, value in wanted.items()
        if [*map(os.path.realpath, vars(known)[option] or ())] != [os.path.realpath(value)]
    ]
    faults += [
        (
            word.partition("=")[0],
            "the run would ignore it",
            f"Leave it out, and set it in the YAML that {CONFIG_VARIABLE} names",
        )
        for word in ignored
        if word.startswith("--")
    ]
    if environment.get("WORLD_SIZE", "1") != "1" or environment.get("NPROC_PER_NODE", "1") != "1":
        do = "Start one, or `learner train` under torchrun with the same YAML"
        faults.append(("NPROC_PER_NODE", "ms-swift has started several processes", do))
    if config.rollout_matching.backend == "colocate" and generates(config):
        found = "colocate, and ms-swift took the GPUs before the learner could share them"
        do = "Use vllm.mode: server, or `learner train` with the same YAML"
        faults.append(("rollout_matching.vllm.mode", found, do))
    if config.training.push_to_hub:
        do = "Set it to false, and push with `learner export CHECKPOINT --push-to-hub`"
        faults.append(("training.push_to_hub", "true, and a run of ms-swift pushes nothing", do))
    if faults:
        raise ContractErrors([ContractError(*fault) for fault in faults])
