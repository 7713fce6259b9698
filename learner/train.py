"""One run of the learner, from a config to a run folder.

    train()   preflight's findings -> model -> backend -> StepTrainer -> folder

The Trainer of transformers owns the optimizer, the schedule, checkpoints and trackers;
ours only hands it whole steps of raw samples (RUN-02).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
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
from learner.backends import OpenBackend, open_backend
from learner.channels.a import ChannelA
from learner.channels.b import ChannelB
from learner.channels.encoding import Encoding
from learner.checkpoint import Checkpoints, RunFacts
from learner.config.schema import Config
from learner.data.order import ShareOrder
from learner.evaluation.folder import EvaluationLog
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
from learner.rollout.colocate import Placement
from learner.rollout.policy import Asking, Policy
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout_log import RolloutLog
from learner.step import StepRunner
from learner.trainer.arguments import training_arguments
from learner.trainer.loader import ShareLoader
from learner.trainer.optim import build_optimizer
from learner.trainer.parallel import open_peers
from learner.trainer.progress import ProgressDisplay
from learner.trainer.runlog import CallLog, JsonlLog, open_run_folder, software
from learner.trainer.trackers import tracker_callbacks
from learner.types import Sample
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import RequestConfig


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
        console.print(note, highlight=False, soft_wrap=True)
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
            samples = [*inputs.train, *inputs.val]
            opened = open_backend(
                config, loaded, clients, folder, samples, inputs.placement, optimizer, peers
            )
            version = max(opened.weights_version, start.weights_version)
            policy = policy_over(replace(opened, weights_version=version), config)
            stack.callback(policy.close)
        display = ProgressDisplay(console, config.training.run_name)
        stack.callback(display.stop)
        calls = CallLog(folder, peers.rank)
        rollouts = RolloutLog(folder, peers.rank) if config.training.log_rollouts else None
        runner = build_runner(
            config, loaded, policy, calls, peers=peers, rollouts=rollouts, train=inputs.train
        )
        if runner.source is not None:
            stack.callback(runner.source.close)
            if state := start.state(peers.rank, peers.count):
                runner.source.restore(state)
        scorer = build_scorer(config, loaded, inputs, policy, calls, peers, runner.source)
        own = runner.source.state if runner.source is not None else dict
        trainer = build_trainer(
            config, loaded, optimizer, inputs, runner, scorer, display, peers, policy, own
        )
        with peers.telling():
            trainer.train(resume_from_checkpoint=start.folder)
    return trainer


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


def score_checkpoint(
    config: Config,
    samples: list[Sample],
    clients: list[RolloutClient],
    folder: Path | None = None,
    placement: Placement | None = None,
    load: Callable[[Config], LoadedModel] = load_model,
) -> Evaluation:
    """Score the answers of `model.model`, by whoever answers in `config`.

    folder, placement: of a colocated server, if there is one. load: what is scored may be more
    than the folder of `model.model`.
    """
    loaded = load(config)
    folder = folder or Path(config.training.output_dir)
    opened = open_backend(config, loaded, clients, folder, samples, placement)
    policy = policy_over(opened, config)
    try:
        seed = evaluation_seed(config)
        return evaluate(policy, samples, seed, loaded.tokenizer, allow_poly=config.allow_poly)
    finally:
        policy.close()


def evaluation_seed(config: Config, rank: int = 0) -> int:
    """Of the first sample of a process; sample i has the seed + i."""
    base = rank_seed_base(rollout_seed_base(config.training.seed, 0), rank)
    return request_seed(base, 0, 0)


def evaluation_facts(config: Config, data: Path) -> dict[str, Any]:
    """How samples are scored, beside by which weights."""
    return {
        "data": str(data),
        "seed": evaluation_seed(config),
        "settings": {
            "trainer_variant": config.custom.trainer_variant,
            "template": config.template.model_dump(mode="json"),
            "torch_dtype": config.model.torch_dtype,
            "rollout_matching": config.rollout_matching.model_dump(mode="json"),
        },
        **software(),
    }


def policy_over(opened: OpenBackend, config: Config) -> Policy:
    return Policy(
        opened.backend,
        opened.weights_version,
        asking_of(config),
        opened.repeat_terminate_active,
        opened.journal,
        opened.round_size,
        opened.tend,
        opened.ask_beside,
    )


def asking_of(config: Config) -> Asking:
    rollout = config.rollout_matching
    request_config = RequestConfig(
        max_tokens=rollout.max_new_tokens,
        temperature=rollout.decoding.temperature,
        top_p=rollout.decoding.top_p,
        top_k=rollout.decoding.top_k,
        repetition_penalty=rollout.repetition_penalty,
        return_details=True,
    )
    return Asking(config.template.prompt, config.template.system, request_config)


def build_runner(
    config: Config,
    loaded: LoadedModel,
    policy: Policy | None,
    calls: CallLog,
    channel_b: type[ChannelB] = ChannelB,
    peers: Peers = ALONE,
    rollouts: RolloutLog | None = None,
    train: Sequence[Sample] = (),
) -> StepRunner:
    """The channels and the objective that `config` describes.

    channel_b: an experiment may have one of its own. rollouts: where answers are logged.
    train: what asynchronous rollouts are asked for; else the steps bring their samples.
    """
    log_rollouts = rollouts.write if rollouts else None
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, config.custom.object_field_order)
    answers = channel_b(encoding, config.rollout_matching.matching, allow_poly=config.allow_poly)
    source = None
    if config.rollout_matching.async_rollout.enabled:
        assert policy is not None, "there is no asynchronous run without channel B"
        order = order_of(config, len(train), peers.count)
        source = async_source(config, policy, answers, train, order, peers, log_rollouts)
    return StepRunner(
        config,
        ChannelA(encoding, self_context_of(config)),
        answers,
        Pipeline(config.pipeline, loaded.vocab.ids),
        policy,
        calls.write,
        peers,
        source,
        log_rollouts,
    )


def self_context_of(config: Config) -> SelfContext:
    """How channel A forwards; a variant without it has one forward."""
    own = config.stage2_ab
    if own is None:
        return SelfContext()
    return SelfContext(own.n_softctx_iter, own.coord_ctx_embed_mode, own.softctx_grad_mode)


def build_scorer(
    config: Config,
    loaded: LoadedModel,
    inputs: RunInputs,
    policy: Policy | None,
    calls: CallLog,
    peers: Peers = ALONE,
    source: RolloutSource | None = None,
) -> Callable[[int], dict[str, float]]:
    """The evaluation of a run: scores of its validation samples, and what they took.

    It is called with the optimizer steps that were made.

    Each process has every so-manieth sample answered; the scores are those of all.
    source: of the steps, which is quiet meanwhile.
    """
    own = inputs.val[peers.rank :: peers.count]
    seed = evaluation_seed(config, peers.rank)
    device = next(loaded.model.parameters()).device
    detection = config.rollout_matching.eval_detection
    log = _evaluation_log(config, peers) if detection.enabled else None

    def score(step: int) -> dict[str, float]:
        assert policy is not None, "a run that evaluates has a policy"
        evaluations: list[Evaluation] = []

        def answered() -> None:
            evaluation = evaluate(
                policy, own, seed, loaded.tokenizer, calls.write, allow_poly=config.allow_poly
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


def _evaluation_log(config: Config, peers: Peers) -> EvaluationLog:
    folder, data = Path(config.training.output_dir), config.data.val_jsonl
    assert data is not None, "checked with the config"
    facts = {"run": str(folder), **evaluation_facts(config, data)}
    save = config.rollout_matching.eval_detection.save_answers
    return EvaluationLog(folder, data, facts, polygons=config.allow_poly, save=save, peers=peers)


def build_trainer(
    config: Config,
    loaded: LoadedModel,
    optimizer: Optimizer,
    inputs: RunInputs,
    runner: StepRunner,
    scorer: Callable[[int], dict[str, float]],
    display: ProgressDisplay,
    peers: Peers = ALONE,
    policy: Policy | None = None,
    state: Callable[[], dict[str, Any]] = dict,
) -> StepTrainer:
    """Trainer around the step, with the logs of the run folder, which process 0 keeps.

    state: what this process adds to a checkpoint; `inputs.start.state` gives it back.
    """
    folder = Path(config.training.output_dir)
    shown: list[TrainerCallback] = []
    if peers.rank == 0:
        trackers = tracker_callbacks(config.training, inputs.start)
        shown = [JsonlLog(folder), *trackers, display]
    facts = _facts_of(config, policy) if peers.rank == 0 else None
    trainer = StepTrainer(
        runner,
        scorer,
        ShareLoader(inputs.train, order_of(config, len(inputs.train), peers.count), peers.rank),
        optimizer,
        Checkpoints(folder, config.training.save_total_limit, facts, state, peers),
        model=loaded.model,
        args=training_arguments(config, folder, peers.count),
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


def _facts_of(config: Config, policy: Policy | None) -> Callable[[], RunFacts]:
    """What checkpoints are told; the file of samples is that of the start of the run."""
    folder, digest = Path(config.training.output_dir), data_digest(config.data.train_jsonl)
    return lambda: RunFacts(policy.version if policy else 0, digest, log_sizes(folder))


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
