"""The trackers of a run: transformers' own callbacks, made for `training.report_to`.

    tracker_callbacks()    in process 0 alone

A tracker that does not start ends the run before its first step; one that breaks later is warned
about once, and the run goes on.
"""

import logging
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from learner.config.training import TrainingConfig
from learner.resume import Start
from shared_contracts.errors import RunError

_LOG = logging.getLogger(__name__)


def tracker_callbacks(training: TrainingConfig, start: Start) -> list[TrainerCallback]:
    """A callback for each tracker of the run.

    Raises RunError for one that refuses to be made.
    """
    return [
        _tensorboard(training, start) if name == "tensorboard" else _guarded(name)
        for name in training.trackers
    ]


def _tensorboard(training: TrainingConfig, start: Start) -> TrainerCallback:
    """Told to drop what came after the step where the run goes on."""
    again_from = start.step + 1 if start.goes_on else None
    return TensorBoardCallback(SummaryWriter(training.logging_dir, purge_step=again_from))


def _guarded(name: str) -> TrainerCallback:
    """transformers' callback for the tracker, with `_Guard` before its methods."""
    (callback,) = get_reporting_integration_callbacks([name])
    guarded: type[TrainerCallback] = type(callback.__name__, (_Guard, callback), {"tracker": name})
    try:
        return guarded()
    except Exception as error:  # of any library; it is told, and ends the run
        raise _does_not_start(name, error) from error


class _Guard(TrainerCallback):
    """Before a tracker's class in the order of methods: what it raises is told by name."""

    tracker = ""
    _warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        try:
            super().on_train_begin(args, state, control, **given)
        except Exception as error:
            raise _does_not_start(self.tracker, error) from error

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        try:
            super().on_log(args, state, control, **given)
        except Exception as error:  # noqa: BLE001  # a run does not end because of its tracker
            self._warn(error)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        try:
            super().on_save(args, state, control, **given)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        try:
            super().on_train_end(args, state, control, **given)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "the tracker %s misses numbers of this run, which are in metrics.jsonl: %s",
                self.tracker,
                error,
            )


def _does_not_start(tracker: str, error: Exception) -> RunError:
    return RunError(
        f"the tracker {tracker} does not start: {error}. Correct that, or take it out of "
        "training.report_to"
    )
