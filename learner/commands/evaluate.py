"""`learner eval`: score a checkpoint by its rollouts (EVAL-01)."""

import os
from pathlib import Path
from typing import Annotated

import typer

from learner.cores import share_cores


def evaluate(
    config: Annotated[
        Path, typer.Option(help="Training YAML: model, data, prompt, and who answers.")
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Score this one, e.g. RUN/checkpoint-500. (model.model)"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL file of samples. (data.val_jsonl)")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder. (one in training.output_dir/evaluations)"),
    ] = None,
) -> None:
    """Score a checkpoint by its rollouts, and write what it answered.

    Servers of the config get its weights, so they must be nobody else's meanwhile.
    """
    from rich.console import Console

    from learner.config import load_config
    from learner.console import tell
    from learner.data.show import print_tables
    from learner.evaluation.plan import plan_evaluation
    from learner.preflight import reach_servers
    from learner.rollout.colocate import learner_environment
    from learner.rollout.describe import describe_backend

    plan = plan_evaluation(load_config(config), checkpoint, data, out)
    console = Console()
    answering = describe_backend(plan.config, plan.placement)
    tell(console, f"Checkpoint: {plan.checkpoint}")
    tell(console, f"Samples: {len(plan.samples)} of {plan.data}")
    tell(console, f"Answers: {answering}")
    clients = reach_servers(plan.config)

    share_cores()
    os.environ.update(learner_environment(plan.placement))
    from learner.eval_run import run_evaluation, tables

    scored = run_evaluation(plan, clients, console)
    print_tables(tables(scored))
    tell(console, f"\nEvaluation: {plan.out}")
