"""Evaluations by rollouts: of a run between its steps, and of a checkpoint by `learner eval`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from learner.analysis.evaluation.folder import finish_evaluation
from learner.analysis.evaluation.scores import Evaluation, evaluate
from learner.config.schema import Config
from learner.distributed.peers import Peers
from learner.distributed.waiting import waiting_for
from learner.models.load import LoadedModel, load_model, prepared, read_model
from learner.rollout.client import RolloutClient
from learner.rollout.colocate import Placement
from learner.rollout.distribution import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout.policy import Policy, request_settings
from learner.runs.metrics import over_processes
from learner.training.backends import open_backend
from learner.training.run_log import software
from learner.training.synchronous_rollouts import RolloutSource
from learner.types import Sample
from shared_contracts.checkpoints import ADAPTER


def build_scorer(
    config: Config,
    samples: Sequence[Sample],
    loaded: LoadedModel,
    policy: Policy | None,
    write_calls: Callable[[dict[str, Any]], None],
    peers: Peers,
    source: RolloutSource,
) -> Callable[[int], dict[str, float]]:
    """Return the evaluation of a run: optimizer steps so far -> metrics of `samples`.

    Each rank evaluates every `world_size`-th sample; the scores are those of all ranks.
    source: of the steps; it makes no requests during an evaluation.
    write_calls: takes a record of the requests.
    """
    own = samples[peers.rank :: peers.count]
    seed = evaluation_seed(config, peers.rank)
    device = next(loaded.model.parameters()).device
    facts: dict[str, Any] = {}  # the commit and the versions of the start of the run
    if config.rollout_matching.eval_detection.enabled:
        assert config.data.val_jsonl is not None, "checked with the config"
        run = {"run": str(config.training.output_dir)}
        facts = run | evaluation_facts(config, config.data.val_jsonl)

    def score(step: int) -> dict[str, float]:
        assert policy is not None, "a run that evaluates has a policy"
        evaluations: list[Evaluation] = []

        def answered() -> None:
            evaluations.append(evaluate(config, policy, own, seed, loaded.tokenizer, write_calls))

        with source.exclusive_access(), policy.backend.serving():
            policy.push_if_stale()
            peers.all_gather(answered, meanwhile=policy.repush_restarted)
        (evaluation,) = evaluations
        payloads = (evaluation.scores.payload(), evaluation.notes)
        scores, notes = (over_processes(payload, device) for payload in payloads)
        of_calls = {f"eval/{key}": value for key, value in notes.metrics().items()}
        metrics = scores.metrics() | of_calls
        if not facts:
            return metrics
        return metrics | finish_evaluation(config, step, evaluation.answers, facts, peers)

    return score


def score_checkpoint(
    config: Config,
    samples: list[Sample],
    clients: list[RolloutClient],
    folder: Path | None = None,
    placement: Placement | None = None,
) -> Evaluation:
    """Score the answers of `model.model` by the backend of `config`.

    folder, placement: of a colocated server, if there is one.
    """
    checkpoint, dtype = config.model.model, getattr(torch, config.model.torch_dtype)
    with waiting_for("the model to be loaded"):
        if (checkpoint / ADAPTER).is_file():  # merged in this type, as in the pushes of its run
            model = read_model(checkpoint, dtype, config.model.attn_implementation)
            loaded = prepared(config, model)
        else:
            loaded = load_model(config)
    folder = folder or config.training.output_dir
    with waiting_for("rollouts to be set up"):
        backend = open_backend(config, loaded, clients, folder, samples, placement)
    policy = Policy(backend, request_settings(config))
    try:
        with policy.backend.serving():
            policy.push_if_stale()
            return evaluate(config, policy, samples, evaluation_seed(config), loaded.tokenizer)
    finally:
        policy.close()


def evaluation_seed(config: Config, rank: int = 0) -> int:
    """Return the seed of the first sample of a process; sample i has the seed + i."""
    base = rank_seed_base(rollout_seed_base(config.training.seed, 0), rank)
    return request_seed(base, 0, 0)


def evaluation_facts(config: Config, data: Path) -> dict[str, Any]:
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
