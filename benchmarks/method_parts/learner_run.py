"""One arm on one seed: the learner's own run, with everything it was answered counted.

    run_arm()   checkpoint of the warm-up -> score -> [steps -> score] ... -> Record

It is put together as `learner.training.train.train` does, with the arm's channel B in its step.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from transformers import set_seed

from benchmarks.method_parts.arms import Arm
from benchmarks.method_parts.records import Counts, Evaluation, Record
from learner.config.schema import Config
from learner.models.load import load_model
from learner.rollout.policy import OpenBackend, Policy, asking_of
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.tokens import Tokenizer
from learner.training.backends import open_backend
from learner.training.run_log import CallLog, ProgressDisplay, open_run_folder
from learner.training.start_checks import check_inputs, reach_servers
from learner.training.train import RunParts, build_runner, build_scorer, build_trainer
from learner.training.trainer import build_optimizer
from learner.types import RolloutOutput, Sample


class CountingPolicy(Policy):
    """Counts the answers it passes on; `take` starts anew."""

    def __init__(self, opened: OpenBackend, config: Config, tokenizer: Tokenizer) -> None:
        in_turn = replace(opened, stream=None, heal=None)  # no answers beside forwards
        super().__init__(in_turn, asking_of(config))
        self._tokenizer = tokenizer
        self._counts = Counts()

    def answer(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        outputs = super().answer(samples, seed)
        self._counts += count(outputs, self._tokenizer)
        return outputs

    def take(self) -> Counts:
        taken, self._counts = self._counts, Counts()
        return taken


def count(outputs: Sequence[RolloutOutput], tokenizer: Tokenizer) -> Counts:
    parsed = [parse_rollout(o.response_token_ids, tokenizer, allow_poly=False) for o in outputs]
    return Counts(
        answers=len(outputs),
        tokens=sum(len(o.response_token_ids) for o in outputs),
        truncated=sum(p.truncated for p in parsed),
        ended=sum(o.repeat_terminated for o in outputs),
        dropped=sum(len(p.dropped) for p in parsed),
    )


class HeldOut:
    """The run's evaluation, called before its first step and after every so many steps.

    score: of the run; gives its metrics.
    evaluations: so far. training: what was answered between them.
    """

    def __init__(self, score: Callable[[int], dict[str, float]], policy: CountingPolicy) -> None:
        self._score, self._policy = score, policy
        self.evaluations: list[Evaluation] = []
        self.training = Counts()

    def __call__(self, step: int) -> dict[str, float]:
        self.training += self._policy.take()
        metrics = self._score(step)
        evaluation = Evaluation(
            step=step,
            precision=metrics["eval/precision"],
            recall=metrics["eval/recall"],
            f1=metrics["eval/f1"],
            box_f1=metrics["eval/box_f1"],
            counts=self._policy.take(),
        )
        self.evaluations.append(evaluation)
        print(
            f"  F1 {evaluation.f1:.3f} after {evaluation.step} steps, {evaluation.counts}",
            flush=True,
        )
        return metrics


def run_arm(arm: Arm, config: Config, console: Console) -> Record:
    """Train as `config` says, in its folder, against its server.

    Raises ContractError, RunError: as `learner train` does.
    """
    assert config.training.eval_steps is not None, "an arm is evaluated on its way"
    started = time.monotonic()
    inputs, clients = check_inputs(config), reach_servers(config)
    folder = open_run_folder(config, inputs.placement)
    set_seed(config.training.seed)
    loaded = load_model(config)
    optimizer = build_optimizer(loaded.model, config.training)
    opened = open_backend(config, loaded, clients, folder, [*inputs.train, *inputs.val])
    policy = CountingPolicy(opened, config, loaded.tokenizer)
    display = ProgressDisplay(console, config.training.run_name)
    try:
        parts = RunParts(config, inputs, loaded, optimizer, policy, CallLog(folder))
        score = build_scorer(parts)
        held_out = HeldOut(score, policy)
        held_out(0)
        runner = build_runner(parts, arm.channel_b)
        build_trainer(parts, runner, held_out, display).train()
    finally:
        display.stop()
        policy.close()
    commit = json.loads((folder / "run.json").read_text())["commit"]
    return Record(
        arm.key,
        config.training.seed,
        commit,
        time.monotonic() - started,
        tuple(held_out.evaluations),
        held_out.training,
    )
