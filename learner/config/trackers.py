"""The trackers a run may report to: transformers' names, and what each needs installed.

`learner.trainer.trackers` starts them; here nothing heavy is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
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


def importable(module: str) -> bool:
    """Without importing more of it than the packages it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
