"""The trackers a run may report to: transformers' names, and what each needs installed.

`learner.training.run_log` starts them. The module imports nothing heavy at its top.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

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

    The callback knows what must be installed. TensorBoard is a dependency of this package.
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


class Login(NamedTuple):
    """How a tracker proves who reports: any one of these is enough.

    variables: of the environment. files: below the home folder; a netrc must name `host`.
    offline: a variable and the values of it that need no login.
    """

    variables: tuple[str, ...]
    files: tuple[str, ...] = ()
    host: str = ""
    offline: tuple[str, tuple[str, ...]] = ("", ())


# Trackers that refuse to start, or ask on the terminal, without a login.
_LOGINS: dict[Tracker, Login] = {
    "wandb": Login(
        ("WANDB_API_KEY",),
        (".netrc", "_netrc"),
        "api.wandb.ai",
        ("WANDB_MODE", ("offline", "disabled", "dryrun")),
    ),
    "comet_ml": Login(("COMET_API_KEY",), (".comet.config",)),
    "neptune": Login(
        ("NEPTUNE_API_TOKEN",), offline=("NEPTUNE_MODE", ("offline", "debug", "read-only"))
    ),
    "clearml": Login(("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE"), ("clearml.conf",)),
    "swanlab": Login(
        ("SWANLAB_API_KEY",),
        (".swanlab/.netrc",),
        offline=("SWANLAB_MODE", ("local", "offline", "disabled")),
    ),
}


def logins_missing(
    report_to: Sequence[ReportTo], environment: Mapping[str, str], home: Path
) -> list[ContractError]:
    """Trackers for which no login is seen here; nobody is asked over the network."""
    errors = []
    for place, tracker in enumerate(report_to):
        login = None if tracker == NOTHING else _LOGINS.get(tracker)
        if login is None or _logged_in(login, environment, home):
            continue
        places = ", ".join([*login.variables, *(f"~/{file}" for file in login.files)])
        variable, values = login.offline
        offline = f", set {variable} to {values[0]}" if variable else ""
        found = f"{tracker}, and no login for it is seen here ({places})"
        do = f"Log in as its documentation says{offline}, or take it out"
        errors.append(ContractError(f"training.report_to[{place}]", found, do))
    return errors


def _logged_in(login: Login, environment: Mapping[str, str], home: Path) -> bool:
    variable, values = login.offline
    if environment.get(variable, "").lower() in values:
        return True
    if any(environment.get(name) for name in login.variables):
        return True
    files = [home / name for name in login.files]
    return any(login.host in file.read_text(errors="replace") for file in files if file.is_file())
