"""What evaluations have in common, of a run and of `learner eval`: seeds, facts, where they go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner.backends import open_backend
from learner.config.schema import Config
from learner.evaluation.folder import EvaluationLog
from learner.evaluation.scores import Evaluation, evaluate
from learner.model.load import LoadedModel, load_model
from learner.peers import Peers
from learner.rollout.client import RolloutClient
from learner.rollout.colocate import Placement
from learner.rollout.policy import Policy, asking_of
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.trainer.runlog import software
from learner.types import Sample


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
    policy = Policy(opened, asking_of(config))
    try:
        policy.push_if_stale()
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


def evaluation_log(config: Config, peers: Peers) -> EvaluationLog:
    """Where an evaluation of a run leaves its answers, in the run's folder."""
    folder, data = Path(config.training.output_dir), config.data.val_jsonl
    assert data is not None, "checked with the config"
    facts = {"run": str(folder), **evaluation_facts(config, data)}
    save = config.rollout_matching.eval_detection.save_answers
    return EvaluationLog(folder, data, facts, polygons=config.allow_poly, save=save, peers=peers)
