"""The trackers of `training.report_to`, by transformers' names, and checks before a run.

`learner.training.run_log` starts them.
"""

from collections.abc import Sequence
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
