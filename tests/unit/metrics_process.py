"""One of two learner processes that combine their metrics; started by a test.

    python -m tests.unit.metrics_process RANK STORE CASES

Prints what it knows afterwards: the metrics of every case, and of one step of its own.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from learner.config import load_config
from learner.models.packed_forward import Segment
from learner.objectives.pipeline import Pipeline
from learner.runs.metrics import over_processes
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.training.recipes import Recipe
from learner.training.step import PlainEngine, StepRunner
from learner.types import Sample
from tests.unit.plain_metrics import Atom, payload_of

CPU = torch.device("cpu")
WARMUP = Path(__file__).parents[2] / "configs" / "demo" / "warmup.yaml"


class Untaught(ChannelA):
    """Leaves all samples out: a step without a forward, that needs no model."""

    def segments(self, samples: Sequence[Sample]) -> list[Segment]:
        return []


def step_metrics(encoding: Encoding) -> dict[str, float]:
    config = load_config(WARMUP)
    channel_b = ChannelB(encoding, config.rollout_matching.matching, allow_poly=False)
    pipeline = Pipeline(config.pipeline, list(range(1000)))
    runner = StepRunner(config, Recipe(config, Untaught(encoding), channel_b, pipeline), None)
    _, report = runner.run(nn.Linear(1, 1), [], 0, PlainEngine())
    return report.metrics


def main() -> None:
    rank, store, cases = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=200),
    )
    ranks = [[Atom(*atom) for atom in case[int(rank)]] for case in json.loads(cases)]
    combined = [over_processes(payload_of(atoms), CPU).metrics() for atoms in ranks]
    step = step_metrics(Encoding(*[None] * 4))  # type: ignore[arg-type]  # nothing is encoded
    print(json.dumps({"combined": combined, "step": step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
