"""Logged answers, computed again by the functions of training, and their differences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from learner.config.schema import Config
from learner.data.checkpoint import TOKENIZER, Checkpoint
from learner.runs.resume import data_digest
from learner.runs.rollout_log import LoggedAnswer, StepAnswer
from learner.runs.run_folder import RunFolder
from learner.stages.targets import run_stages
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout
from shared_contracts.errors import ContractError

# Parts of an answer that are computed from its ids.
_COMPARED = {"parse", "match", "supervised", "left_out", "target"}


def find_tokenizer(run: RunFolder, config: Config, given: Path | None) -> Path:
    """Return the folder with a run's tokenizer: `given`, else that of its model.

    Raises ContractError if it has none, or another one.
    """
    folder = given or Checkpoint(config.model.model).processor
    file, digest = folder / TOKENIZER, run.facts().get("tokenizer_sha256")
    if file.is_file() and data_digest(file) == digest:
        return folder
    found = "there is no such file"
    if file.is_file():
        found = "it is another one than when the run was started"
    do = f"Name a folder with the {TOKENIZER} of the run with --tokenizer (SHA-256 {digest}); "
    raise ContractError(str(file), found, f"{do}checkpoints of the run have it")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer as training does."""
    from transformers import AutoTokenizer  # slow

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer: Tokenizer = loaded
    return tokenizer


def logged_steps(run: RunFolder, step: int | None) -> list[int]:
    """Return `step`, or all steps with logged answers.

    Raises ContractError if there are none, and for another step.
    """
    steps = run.answer_steps()
    if not steps:
        raise ContractError(
            str(run.path),
            "no answers are logged in it",
            "Name a run with steps of channel B and training.log_rollouts: true",
        )
    if step is None:
        return steps
    if step not in steps:
        do = f"Choose one of the {len(steps)} logged steps, from {steps[0]} to {steps[-1]}"
        raise ContractError(f"--step {step}", "no answers of this step are logged", do)
    return [step]


def rebuild(
    answers: Sequence[StepAnswer], config: Config, tokenizer: Tokenizer
) -> list[AssessedRollout]:
    """Parse and match the answers of a step, build targets, and compute group rewards."""
    samples, rollouts = [each.sample for each in answers], [each.rollout for each in answers]
    return run_stages(samples, rollouts, tokenizer, config)


class Difference(NamedTuple):
    """field: such as `parse.objects[1].coords[2]`, with both values; None: there is none."""

    answer: StepAnswer
    field: str
    logged: Any
    rebuilt: Any


def first_difference(answer: StepAnswer, assessed: AssessedRollout) -> Difference | None:
    """Compare an answer with its rebuilt form; None if both are equal."""
    found = _differing(_parts(answer), _parts(LoggedAnswer.of(assessed)), "")
    return None if found is None else Difference(answer, *found)


def _parts(answer: LoggedAnswer) -> dict[str, Any]:
    """Return what is computed; without the parse's fault, which earlier versions did not log."""
    parts = answer.model_dump(include=_COMPARED, exclude={"parse": {"fault"}})
    return parts | {"reward": None if answer.reward is None else answer.reward._asdict()}


def _differing(logged: Any, rebuilt: Any, field: str) -> tuple[str, Any, Any] | None:
    """Return the first values within two that differ, with their field; None for equal ones."""
    if isinstance(logged, list | tuple) and isinstance(rebuilt, list | tuple):
        logged, rebuilt = dict(enumerate(logged)), dict(enumerate(rebuilt))
    if not (isinstance(logged, dict) and isinstance(rebuilt, dict)):
        return None if logged == rebuilt else (field.removeprefix("."), logged, rebuilt)
    for key in {**logged, **rebuilt}:
        within = f"{field}[{key}]" if isinstance(key, int) else f"{field}.{key}"
        if found := _differing(logged.get(key), rebuilt.get(key), within):
            return found
    return None
