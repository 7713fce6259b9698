"""One run of the learner, from a config to a run folder.

    train()        joins the other learner processes
    train_as()     run folder -> model -> Policy -> build_runner(), build_scorer() and
                   build_trainer(), which trains

The data of a run, step by step:

    BatchLoader                            this process's samples of the step
      -> StepTrainer.training_step() -> StepRunner.run()
           A  ChannelA.segments() ---------------------------------+
           B  Policy.push_if_stale() -> Policy.stream()            |
              -> ChannelB.segments() ------------------------------+-> StepPacker
              (or, asynchronously, AsyncSource.feed())             |
                                                                   v
           gradients <- Recipe.loss(), pack by pack
      -> Trainer                           one update by the optimizer, the schedule
           -> StepTrainer.log()            metrics.jsonl, trackers, the terminal
           -> StepTrainer.evaluate()       the scores of build_scorer()
           -> Checkpoints.save()

The Trainer of transformers has the optimizer, the schedule, checkpoints and trackers. StepTrainer
gives it whole steps of raw samples (RUN-02).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import Optimizer
from transformers import DefaultFlowCallback, PrinterCallback, TrainerCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from learner.analysis.report.run_page import reported
from learner.config.schema import Config
from learner.data.checkpoint import Checkpoint
from learner.data.order import BadSampleLog, BatchOrder, ReplacedSamples, image_fault
from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.distributed.process_group import open_peers
from learner.distributed.waiting import waiting_for
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import StartModel, check_packing
from learner.rollout.client import RolloutClient
from learner.rollout.policy import Policy, request_settings
from learner.runs.atomic_files import writing
from learner.runs.checkpoint import Checkpoints, RunFacts, data_digest, log_sizes
from learner.runs.console import tell
from learner.runs.rollout_log import RolloutLog
from learner.runs.run_folder import RUN
from learner.training.asynchronous_rollouts import AsyncSource
from learner.training.backends import open_backend
from learner.training.channels import recipe_of
from learner.training.evaluation import build_scorer
from learner.training.input_checks import RunInputs, generates
from learner.training.run_log import (
    JsonlLog,
    ProgressDisplay,
    log_calls,
    open_run_folder,
    tracker_callbacks,
)
from learner.training.step import StepRunner
from learner.training.trainer import (
    BatchLoader,
    StepsOfThisConfig,
    StepTrainer,
    build_optimizer,
    training_arguments,
)
from shared_contracts.errors import ContractError, RunError


@dataclass(frozen=True)
class RunParts:
    """The parts of a run in one of its processes.

    policy: None in a run without rollouts.
    bad_samples: returns how many samples were replaced since its last call; None: none can be.
    """

    config: Config
    inputs: RunInputs
    loaded: LoadedModel
    optimizer: Optimizer
    policy: Policy | None
    log_calls: Callable[[dict[str, Any]], None]
    peers: Peers = SINGLE_PROCESS
    bad_samples: Callable[[], int] | None = None


def train(
    config: Config,
    inputs: RunInputs,
    clients: list[RolloutClient],
    console: Console,
) -> Path:
    """Run the training of `config`; return the run folder. Raises RunError.

    inputs, clients: results of the checks; no clients in a run without servers.
    """
    disable_progress_bar()
    with open_peers(inputs.processes) as peers:
        train_as(peers, config, inputs, clients, console)
    return config.training.output_dir


def train_as(
    peers: Peers,
    config: Config,
    inputs: RunInputs,
    clients: list[RolloutClient],
    console: Console,
    load: Callable[[Config], LoadedModel] = load_model,
) -> StepTrainer:
    """Run `train` as one of `peers`; return its trainer after training.

    load: another function if a harness has loaded the weights already.
    """
    if peers.count == 1:
        _require_one_gpu()
    assert not inputs.finished(config.training), "checked by the command"
    folder, start = config.training.output_dir, inputs.start
    with ExitStack() as stack:
        opened = open_run_folder(config, inputs.placement, start)
        _require_shared(folder, "steps", lambda: start.step, peers)  # else logs are cut
        broadcast_from_rank0(peers, lambda: str(stack.enter_context(opened)))
        _require_shared(folder, RUN, (folder / RUN).is_file, peers)
        for note in start.notes if peers.rank == 0 else ():
            tell(console, note)
        set_seed(config.training.seed)
        with waiting_for("the model to be loaded"):
            loaded = load(start.tuned(config))
            if config.training.packing:
                check_packing(loaded.model)
        for note in loaded.notes if peers.rank == 0 else ():
            tell(console, note)
        optimizer = build_optimizer(loaded.model, config.training, loaded.family)
        if peers.rank == 0:
            stack.enter_context(reported(folder, console))
        stack.enter_context(writing(folder))
        policy = None
        if generates(config):
            samples = [*inputs.train, *inputs.val]
            with waiting_for("rollouts to be set up"):
                backend = open_backend(
                    config, loaded, clients, folder, samples, inputs.placement, optimizer, peers
                )
            known = backend.version  # a resumed run continues the numbers of its checkpoint
            known.newest = max(known.newest, start.weights_version)
            policy = Policy(backend, request_settings(config))
            stack.callback(policy.close)
        display = ProgressDisplay(console, config.training.run_name)
        stack.callback(display.stop)
        calls, count = partial(log_calls, folder, peers.rank), None
        if config.data.on_bad_sample == "skip":
            train = _replaced_samples(config, inputs, peers)
            inputs, count = replace(inputs, train=train), train.take_replaced
        parts = RunParts(config, inputs, loaded, optimizer, policy, calls, peers, count)
        runner = build_runner(parts)
        stack.callback(runner.source.close)
        if state := start.state(peers.rank, peers.count):
            runner.source.restore(state)
        scorer = build_scorer(config, inputs.val, loaded, policy, calls, peers, runner.source)
        trainer = build_trainer(parts, runner, scorer, display)
        with peers.propagate_errors():
            trainer.train(resume_from_checkpoint=start.folder)
    return trainer


def _replaced_samples(config: Config, inputs: RunInputs, peers: Peers) -> ReplacedSamples:
    log = BadSampleLog(config.training.output_dir, peers.rank)
    if peers.rank == 0:
        for known in inputs.bad.values():
            log.add(known)
    fault = partial(image_fault, rule=Checkpoint(config.model.model).image_rule)
    return ReplacedSamples(inputs.train, inputs.bad, config.training.seed, fault, log.add)


def _require_shared(folder: Path, what: str, seen: Callable[[], int], peers: Peers) -> None:
    found = peers.all_gather(seen)
    if len(set(found)) > 1:
        raise RunError(
            f"the learner processes see different folders {folder} ({what}: {found}): "
            "training.output_dir must be one folder for all; on several machines, use a network "
            "folder"
        )


def _require_one_gpu() -> None:
    """Raise ContractError for several visible GPUs: Trainer would split samples over them.

    With a colocated server one GPU is visible (`learner_environment`).
    """
    if torch.cuda.device_count() > 1:
        raise ContractError(
            "CUDA_VISIBLE_DEVICES",
            f"{torch.cuda.device_count()} GPUs are visible to one learner process",
            "Set it to one GPU; or start a process for each, with torchrun --nproc-per-node",
        )


def build_runner(parts: RunParts) -> StepRunner:
    config, loaded, peers = parts.config, parts.loaded, parts.peers
    folder = config.training.output_dir
    log = RolloutLog(folder, peers.rank).write if config.training.log_rollouts else None
    start = StartModel(config, loaded) if config.needs_start else None
    recipe = recipe_of(config, loaded, start)
    source = None
    if config.rollout_matching.async_rollout.enabled:
        assert parts.policy is not None, "there is no asynchronous run without channel B"
        train = parts.inputs.train
        order = order_of(config, len(train), peers.count)
        source = AsyncSource(
            config,
            parts.policy,
            recipe.channel_b,
            lambda batch: [train[index] for index in order.rank_batch(batch, peers.rank)],
            config.training.total_steps(len(train)),
            peers,
            log,
        )
    return StepRunner(
        config, recipe, parts.policy, parts.log_calls, peers, source, log, parts.bad_samples
    )


def build_trainer(
    parts: RunParts,
    runner: StepRunner,
    scorer: Callable[[int], dict[str, float]],
    display: ProgressDisplay,
) -> StepTrainer:
    """Return the Trainer around the step. Process 0 gets the logs of the run folder."""
    config, inputs, loaded, peers = parts.config, parts.inputs, parts.loaded, parts.peers
    folder, policy, shown = config.training.output_dir, parts.policy, list[TrainerCallback]()
    digest = ""  # of the data file at the start of the run
    if peers.rank == 0:
        trackers = tracker_callbacks(config.training, inputs.start)
        shown = [JsonlLog(folder), *trackers, display]
        digest = data_digest(config.data.train_jsonl)

    def facts() -> RunFacts:
        return RunFacts(policy.version if policy else 0, digest, log_sizes(folder))

    trainer = StepTrainer(
        runner,
        scorer,
        BatchLoader(inputs.train, order_of(config, len(inputs.train), peers.count), peers.rank),
        parts.optimizer,
        Checkpoints(
            folder,
            config.training.save_total_limit,
            facts,
            runner.source.state,
            peers,
            collective=config.training.data_parallel == "fsdp2",
        ),
        model=loaded.model,
        args=training_arguments(config, folder, peers.count),
        train_dataset=inputs.train,
        eval_dataset=inputs.val or None,
        data_collator=list,
        processing_class=loaded.processor,
        callbacks=[StepsOfThisConfig(), *shown],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(DefaultFlowCallback)  # a harness may have replaced it
    trainer.add_callback(DefaultFlowCallback)
    return trainer


def order_of(config: Config, samples: int, processes: int) -> BatchOrder:
    training = config.training
    batch = training.effective_batch_size
    return BatchOrder(samples, batch, processes, training.seed, config.data.shuffle)
