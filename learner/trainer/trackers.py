"""The trackers of a run: transformers' own callbacks, made for `training.report_to`.

    tracker_callbacks()    in process 0 alone

A tracker that does not start ends the run before its first step; one that breaks later is warned
about once, and the run goes on.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from learner.config.training import TrainingConfig
from learner.resume import Start
from shared_contracts.errors import RunError

_LOG = logging.getLogger(__name__)

# When Trainer is made, and before the first step.
_STARTING = ("on_init_end", "on_train_begin")


def tracker_callbacks(training: TrainingConfig, start: Start) -> list[TrainerCallback]:
    """A callback for each tracker of the run.

    Raises RunError for one that refuses to be made.
    """
    return [_made(name, training, start) for name in training.trackers]


def _made(name: str, training: TrainingConfig, start: Start) -> TrainerCallback:
    """TensorBoard's is told to drop what came after the step where the run goes on."""
    try:
        if name == "tensorboard":
            again_from = start.step + 1 if start.goes_on else None
            writer = SummaryWriter(training.logging_dir, purge_step=again_from)
            return _guarded(name, TensorBoardCallback)(writer)
        (callback,) = get_reporting_integration_callbacks([name])
        return _guarded(name, callback)()
    except Exception as error:  # of any library; it is told, and ends the run
        raise _does_not_start(name, error) from error


def _guarded(name: str, callback: type[TrainerCallback]) -> Callable[..., TrainerCallback]:
    """transformers' callback for the tracker; what its methods raise is told by name."""
    hooks = {
        event: _guarded_hook(event, getattr(callback, event))
        for event in dir(TrainerCallback)
        if event.startswith("on_")
    }
    return type(callback.__name__, (_Guard, callback), {"_tracker_name": name, **hooks})


def _guarded_hook(event: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: _Guard, *given: Any, **named: Any) -> Any:
        try:
            return hook(self, *given, **named)
        except Exception as error:
            if event in _STARTING:
                raise _does_not_start(self._tracker_name, error) from error
            self._warn(error)  # a run does not end because of its tracker

    return guarded


class _Guard:
    """What a guarded callback has of its own."""

    _tracker_name = ""
    _tracker_warned = False

    def _warn(self, error: Exception) -> None:
        if not self._tracker_warned:
            self._tracker_warned = True
            _LOG.warning(
                "the tracker %s misses numbers of this run, which are in metrics.jsonl: %s",
                self._tracker_name,
                error,
            )


def _does_not_start(tracker: str, error: Exception) -> RunError:
    return RunError(
        f"the tracker {tracker} does not start: {error}. Correct that, or take it out of "
        "training.report_to"
    )
