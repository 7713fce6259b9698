"""The trackers of `training.report_to`, by transformers' names, and checks before a run.

`learner.training.run_log` starts them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from shared_contracts.errors import ContractError, ContractErrors

Tracker = Literal[
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "kubeflow",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
NOTHING: Literal["none"] = "none"
ReportTo = Literal[Tracker, "none"]


def require_trackers(report_to: Sequence[ReportTo]) -> None:
    """Raise ContractErrors for every tracker whose callback of transformers cannot be made here.

    The callback checks that its packages are installed. TensorBoard is a dependency of this one.
    """
    errors = []
    for place, tracker in enumerate(report_to):
        if tracker in (NOTHING, "tensorboard"):
            continue
        from transformers.integrations import get_reporting_integration_callbacks  # seconds

        try:
            (callback,) = get_reporting_integration_callbacks([tracker])
            callback()
        except Exception as error:  # noqa: BLE001 - of any library
            found = f"{tracker} cannot be used here: {str(error).rstrip('.')}"
            do = "Correct that, or take it out"
            errors.append(ContractError(f"training.report_to[{place}]", found, do))
    if errors:
        raise ContractErrors(errors)


# Trackers that refuse to start, or prompt on the terminal, without a login. One of these is
# enough: a variable, a variable with a value that needs no login, or a file in the home folder
# (with `:host`, one that has the name of the host).
_LOGINS: dict[Tracker, tuple[str, ...]] = {
    "wandb": (
        *("WANDB_API_KEY", "~/.netrc:api.wandb.ai", "~/_netrc:api.wandb.ai"),
        *("WANDB_MODE=offline", "WANDB_MODE=disabled", "WANDB_MODE=dryrun"),
    ),
    "comet_ml": ("COMET_API_KEY", "~/.comet.config"),
    "neptune": (
        "NEPTUNE_API_TOKEN",
        *("NEPTUNE_MODE=offline", "NEPTUNE_MODE=debug", "NEPTUNE_MODE=read-only"),
    ),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE", "~/clearml.conf"),
    "swanlab": (
        *("SWANLAB_API_KEY", "~/.swanlab/.netrc"),
        *("SWANLAB_MODE=local", "SWANLAB_MODE=offline", "SWANLAB_MODE=disabled"),
    ),
}


def logins_missing(
    report_to: Sequence[ReportTo], environment: Mapping[str, str], home: Path
) -> list[ContractError]:
    """Return an error for each tracker without a login; makes no network call."""
    errors = []
    for place, tracker in enumerate(report_to):
        proofs = () if tracker == NOTHING else _LOGINS.get(tracker, ())
        if proofs and not any(_has_login(proof, environment, home) for proof in proofs):
            found = f"{tracker}, and this machine has no login for it ({', '.join(proofs)})"
            do = "Log in as its documentation says, or take it out"
            errors.append(ContractError(f"training.report_to[{place}]", found, do))
    return errors


def _has_login(proof: str, environment: Mapping[str, str], home: Path) -> bool:
    if proof.startswith("~/"):
        name, _, host = proof.removeprefix("~/").partition(":")
        file = home / name
        return file.is_file() and host in file.read_text(errors="replace")
    variable, _, value = proof.partition("=")
    given = environment.get(variable, "")
    return given.lower() == value if value else bool(given)
