"""One run of the learner, from a config to a run folder.

    train()        joins the other learner processes
    train_as()     run folder -> model -> who answers -> build_runner(), build_scorer() and
                   build_trainer(), which trains

What flows through a run, step by step:

    ShareLoader                            this process's samples of the step
      -> StepTrainer.training_step() -> StepRunner.run()
           A  ChannelA.segments() ---------------------------------+
           B  Policy.push_if_stale() -> Policy.answer()            |
              -> ChannelB.segments() ------------------------------+-> Packer.begin()
              (or made beside the steps: AsyncSource.feed())       |
                                                                   v
           gradients <- Pipeline <- ChannelA/B.readings() <- Forwards.run()
      -> Trainer                           one update by the optimizer, the schedule
           -> StepTrainer.log()            metrics.jsonl, trackers, the terminal
           -> StepTrainer.evaluate()       the scores of build_scorer()
           -> Checkpoints.save()

The Trainer of transformers owns the optimizer, the schedule, checkpoints and trackers;
ours only hands it whole steps of raw samples (RUN-02).
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from learner.async_rollout.source import async_source
from learner.backends import open_backend
from learner.channels.a import ChannelA
from learner.channels.b import ChannelB
from learner.channels.encoding import Encoding
from learner.checkpoint import Checkpoints, RunFacts
from learner.config.schema import Config
from learner.console import tell
from learner.data.order import ShareOrder
from learner.evaluation.scores import Evaluation, evaluate, evaluation_metrics
from learner.in_step import RolloutSource
from learner.log_cut import log_sizes
from learner.losses.pipeline import Pipeline
from learner.metrics import StepReport
from learner.metrics.processes import over_processes
from learner.model.load import LoadedModel, load_model
from learner.model.packed_forward import check_packing
from learner.model.prompt import PromptEncoder
from learner.model.self_context import SelfContext
from learner.peers import ALONE, Peers, first
from learner.preflight import RunInputs, generates
from learner.publish import writing
from learner.report.at_the_end import reported
from learner.resume import RUN, Start, data_digest
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Policy, asking_of
from learner.rollout_log import RolloutLog
from learner.scoring import evaluation_log, evaluation_seed
from learner.step import StepRunner
from learner.trainer.arguments import training_arguments
from learner.trainer.loader import ShareLoader
from learner.trainer.optim import build_optimizer
from learner.trainer.parallel import open_peers
from learner.trainer.progress import ProgressDisplay
from learner.trainer.runlog import CallLog, JsonlLog, open_run_folder
from learner.trainer.trackers import tracker_callbacks
from learner.types import Sample
from shared_contracts.errors import ContractError, RunError


@dataclass(frozen=True)
class RunParts:
    """What the stages of a run are built of, in one of its processes.

    policy: who answers; None in a run that asks for no answers.
    calls: where it is logged what the answers took.
    """

    config: Config
    inputs: RunInputs
    loaded: LoadedModel
    optimizer: Optimizer
    policy: Policy | None
    calls: CallLog
    peers: Peers = ALONE

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.training.output_dir)


class StepTrainer(Trainer):
    """Runs `StepRunner` where Trainer would run a forward.

    A dataloader batch is this process's raw samples of one whole optimizer step.
    """

    def __init__(
        self,
        runner: StepRunner,
        scorer: Callable[[int], dict[str, float]],
        loader: ShareLoader,
        optimizer: Optimizer,
        checkpoints: Checkpoints,
        **trainer: Any,
    ) -> None:
        super().__init__(**trainer)
        self.optimizer = optimizer  # Trainer takes none where weights will be sharded
        self._checkpoints = checkpoints
        self._loader = loader
        self._runner = runner
        self._scorer = scorer
        self._report: StepReport | None = None

    def training_step(
        self,
        model: nn.Module,
        inputs: list[Sample],  # type: ignore[override]  # Trainer knows dicts of tensors only
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        model.train()
        loss, self._report = self._runner.run(
            model, inputs, self.state.global_step, self.accelerator
        )
        return loss

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's shares, whole and raw; `accelerate` has nothing to spread."""
        return self._loader

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own numbers, with those of the step they belong to."""
        if "loss" in logs and self._report is not None:
            logs = {**logs, **self._report.metrics}
        super().log(logs, start_time)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score by rollouts, then what Trainer does after an evaluation."""
        metrics = self._scorer(self.state.global_step)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes its checkpoints, one at a time."""
        return str(self._checkpoints.unfinished)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, which appears whole or not at all."""
        write = partial(super()._save_checkpoint, model, trial)
        self._checkpoints.save(self.state.global_step, write)


def train(
    config: Config, inputs: RunInputs, clients: list[RolloutClient], console: Console
) -> Path:
    """Run the training that `config` describes; returns the run folder.

    inputs, clients: what preflight found; no clients in a run that asks no servers.

    Raises:
        RunError: the servers are gone for good, or the disk is full.
    """
    disable_progress_bar()
    with open_peers(inputs.processes) as peers:
        train_as(peers, config, inputs, clients, console)
    return Path(config.training.output_dir)


def train_as(
    peers: Peers,
    config: Config,
    inputs: RunInputs,
    clients: list[RolloutClient],
    console: Console,
    load: Callable[[Config], LoadedModel] = load_model,
) -> StepTrainer:
    """`train` as one of `peers`; returns its trainer, which is done.

    load: a harness may have loaded the weights already.
    """
    if peers.count == 1:
        _require_one_gpu()
    assert not inputs.finished(config.training), "whoever starts runs sees to it"
    folder = Path(config.training.output_dir)
    start = _agreed(inputs.start, peers)
    first(peers, lambda: str(open_run_folder(config, inputs.placement, start)))
    peers.share(lambda: _require_shared(folder))
    for note in start.notes if peers.rank == 0 else ():
        tell(console, note)
    set_seed(config.training.seed)
    loaded = load(config)
    if config.training.packing:
        check_packing(loaded.model)
    optimizer = build_optimizer(loaded.model, config.training)
    with ExitStack() as stack:
        if peers.rank == 0:
            stack.enter_context(reported(folder, console))
        stack.enter_context(writing(folder))
        policy = None
        if generates(config):
            policy = _open_policy(config, inputs, loaded, clients, optimizer, peers)
            stack.callback(policy.close)
        display = ProgressDisplay(console, config.training.run_name)
        stack.callback(display.stop)
        parts = RunParts(
            config, inputs, loaded, optimizer, policy, CallLog(folder, peers.rank), peers
        )
        runner = build_runner(parts)
        if runner.source is not None:
            stack.callback(runner.source.close)
            if state := start.state(peers.rank, peers.count):
                runner.source.restore(state)
        trainer = build_trainer(parts, runner, build_scorer(parts, runner.source), display)
        with peers.telling():
            trainer.train(resume_from_checkpoint=start.folder)
    return trainer


def _open_policy(
    config: Config,
    inputs: RunInputs,
    loaded: LoadedModel,
    clients: list[RolloutClient],
    optimizer: Optimizer,
    peers: Peers,
) -> Policy:
    """Who answers; versions count on from those of the checkpoint where the run goes on."""
    folder, samples = Path(config.training.output_dir), [*inputs.train, *inputs.val]
    opened = open_backend(
        config, loaded, clients, folder, samples, inputs.placement, optimizer, peers
    )
    version = max(opened.weights_version, inputs.start.weights_version)
    return Policy(replace(opened, weights_version=version), asking_of(config))


def _agreed(start: Start, peers: Peers) -> Start:
    """Where all processes start, which is the same when they share the run folder."""
    steps = peers.share(lambda: start.step)
    if len(set(steps)) > 1:
        raise RunError(
            f"the learner processes see checkpoints of different steps ({steps}): "
            "training.output_dir must be one folder for all of them"
        )
    return start


def _require_shared(folder: Path) -> None:
    """Every process writes its logs, and its part of a checkpoint, where process 0 does."""
    if not (folder / RUN).is_file():
        raise RunError(
            f"{folder} of process 0 is not here: training.output_dir must be one folder for all "
            "learner processes, on a share where they are on several machines"
        )


def _require_one_gpu() -> None:
    """With several visible GPUs Trainer would split every step's samples over them.

    Beside a colocated server one is left (`learner_environment`).
    """
    if torch.cuda.device_count() > 1:
        raise ContractError(
            "CUDA_VISIBLE_DEVICES",
            f"{torch.cuda.device_count()} GPUs are visible to one learner process",
            "Set it to one GPU; or start a process for each, with torchrun --nproc-per-node",
        )


def build_runner(parts: RunParts, channel_b: type[ChannelB] = ChannelB) -> StepRunner:
    """The channels and the objective that the config describes.

    channel_b: an experiment may have one of its own.
    """
    config, loaded, peers = parts.config, parts.loaded, parts.peers
    log = RolloutLog(parts.folder, peers.rank).write if config.training.log_rollouts else None
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, config.custom.object_field_order)
    answers = channel_b(encoding, config.rollout_matching.matching, allow_poly=config.allow_poly)
    source = None
    if config.rollout_matching.async_rollout.enabled:
        assert parts.policy is not None, "there is no asynchronous run without channel B"
        train = parts.inputs.train
        order = order_of(config, len(train), peers.count)
        source = async_source(config, parts.policy, answers, train, order, peers, log)
    return StepRunner(
        config,
        ChannelA(encoding, self_context_of(config)),
        answers,
        Pipeline(config.pipeline, loaded.vocab.ids),
        parts.policy,
        parts.calls.write,
        peers,
        source,
        log,
    )


def self_context_of(config: Config) -> SelfContext:
    """How channel A forwards; a variant without it has one forward."""
    own = config.stage2_ab
    if own is None:
        return SelfContext()
    return SelfContext(own.n_softctx_iter, own.coord_ctx_embed_mode, own.softctx_grad_mode)


def build_scorer(
    parts: RunParts, source: RolloutSource | None = None
) -> Callable[[int], dict[str, float]]:
    """The evaluation of a run: scores of its validation samples, and what they took.

    It is called with the optimizer steps that were made.

    Each process has every so-manieth sample answered; the scores are those of all.
    source: of the steps, which is quiet meanwhile.
    """
    config, loaded, peers = parts.config, parts.loaded, parts.peers
    own = parts.inputs.val[peers.rank :: peers.count]
    seed = evaluation_seed(config, peers.rank)
    device = next(loaded.model.parameters()).device
    detection = config.rollout_matching.eval_detection
    log = evaluation_log(config, peers) if detection.enabled else None

    def score(step: int) -> dict[str, float]:
        policy = parts.policy
        assert policy is not None, "a run that evaluates has a policy"
        evaluations: list[Evaluation] = []

        def answered() -> None:
            evaluation = evaluate(
                policy, own, seed, loaded.tokenizer, parts.calls.write, allow_poly=config.allow_poly
            )
            evaluations.append(evaluation)
            if log is not None:
                log.leave(evaluation.answers)

        with nullcontext() if source is None else source.quiet():
            policy.push_if_stale()
            peers.share(answered, meanwhile=policy.tend)
        (evaluation,) = evaluations
        payloads = (evaluation.scores.payload(), evaluation.notes)
        scores, notes = (over_processes(payload, device) for payload in payloads)
        metrics = evaluation_metrics(scores, notes)
        return metrics if log is None else {**metrics, **log.finish(step)}

    return score


def build_trainer(
    parts: RunParts,
    runner: StepRunner,
    scorer: Callable[[int], dict[str, float]],
    display: ProgressDisplay,
) -> StepTrainer:
    """Trainer around the step, with the logs of the run folder, which process 0 keeps."""
    config, inputs, loaded, peers = parts.config, parts.inputs, parts.loaded, parts.peers
    shown: list[TrainerCallback] = []
    if peers.rank == 0:
        trackers = tracker_callbacks(config.training, inputs.start)
        shown = [JsonlLog(parts.folder), *trackers, display]
    facts = _facts_of(parts) if peers.rank == 0 else None
    state = runner.source.state if runner.source is not None else dict
    trainer = StepTrainer(
        runner,
        scorer,
        ShareLoader(inputs.train, order_of(config, len(inputs.train), peers.count), peers.rank),
        parts.optimizer,
        Checkpoints(
            parts.folder,
            config.training.save_total_limit,
            facts,
            state,
            peers,
            collective=config.training.data_parallel == "fsdp2",
        ),
        model=loaded.model,
        args=training_arguments(config, parts.folder, peers.count),
        train_dataset=inputs.train,
        eval_dataset=inputs.val or None,
        data_collator=list,
        processing_class=loaded.processor,
        callbacks=[_StepsOfThisConfig(), *shown],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(DefaultFlowCallback)  # what a harness has made of it, with more saves
    trainer.add_callback(DefaultFlowCallback)
    return trainer


def _facts_of(parts: RunParts) -> Callable[[], RunFacts]:
    """What checkpoints are told; the file of samples is that of the start of the run."""
    policy, digest = parts.policy, data_digest(parts.config.data.train_jsonl)
    return lambda: RunFacts(policy.version if policy else 0, digest, log_sizes(parts.folder))


class _StepsOfThisConfig(TrainerCallback):
    """Steps between saves and evaluations are the config's, also in a run that goes on."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)


def order_of(config: Config, samples: int, processes: int) -> ShareOrder:
    """Which samples each step of a run takes."""
    training = config.training
    batch = training.effective_batch_size
    return ShareOrder(samples, batch, processes, training.seed, config.data.shuffle)
