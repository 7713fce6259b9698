"""The trackers a run may report to: transformers' names, and what each needs installed.

`learner.training.run_log` starts them; here nothing heavy is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
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


class Needs(NamedTuple):
    """modules: that must be importable. install: what brings them."""

    modules: tuple[str, ...]
    install: str


# Where the module that transformers looks for is not named like the tracker.
_NEEDS: dict[Tracker, Needs] = {
    "azure_ml": Needs(("azureml.core.run",), "azureml-core"),
    "dagshub": Needs(("dagshub", "mlflow"), "dagshub mlflow"),
    "flyte": Needs(("flytekit",), "flytekit"),
    "kubeflow": Needs((), ""),
}
_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"


def needs(tracker: Tracker) -> Needs:
    return _NEEDS.get(tracker, Needs((tracker,), tracker))


def require_trackers(report_to: Sequence[ReportTo], environment: Mapping[str, str]) -> None:
    """Raise ContractErrors for every tracker that is not installed, or cannot be reached."""
    if errors := list(_missing(report_to, environment)):
        raise ContractErrors(errors)


def _missing(
    report_to: Sequence[ReportTo], environment: Mapping[str, str]
) -> Iterator[ContractError]:
    for place, tracker in enumerate(report_to):
        where = f"training.report_to[{place}]"
        if tracker == NOTHING:
            continue
        missing = [module for module in needs(tracker).modules if not importable(module)]
        if missing:
            yield ContractError(
                where,
                f"{tracker}, and {' and '.join(missing)} cannot be imported here",
                f"Install it (`pip install {needs(tracker).install}`), or take it out",
            )
        if tracker == "kubeflow" and not environment.get(_KUBEFLOW):
            yield ContractError(
                where, f"kubeflow, and {_KUBEFLOW} is not set: this is no TrainJob", "Take it out"
            )


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
    return [
        ContractError(
            f"training.report_to[{place}]",
            f"{tracker}, and no login for it is seen here ({', '.join(login.variables)}"
            f"{''.join(f', ~/{file}' for file in login.files)})",
            "Log in as its documentation says"
            + (f", set {login.offline[0]} to {login.offline[1][0]}" if login.offline[0] else "")
            + ", or take it out",
        )
        for place, tracker in enumerate(report_to)
        if tracker != NOTHING
        and (login := _LOGINS.get(tracker)) is not None
        and not _logged_in(login, environment, home)
    ]


def _logged_in(login: Login, environment: Mapping[str, str], home: Path) -> bool:
    variable, values = login.offline
    if environment.get(variable, "").lower() in values:
        return True
    if any(environment.get(name) for name in login.variables):
        return True
    files = [home / name for name in login.files]
    return any(login.host in file.read_text(errors="replace") for file in files if file.is_file())


def importable(module: str) -> bool:
    """Without importing more of it than the packages it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
