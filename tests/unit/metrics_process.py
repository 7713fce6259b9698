"""One of two learner processes that combine their metrics; started by a test.

    python -m tests.unit.metrics_process RANK STORE CASES MODEL DATA

Prints what it knows afterwards: the metrics of every case, and of one step of channel A in which
process RANK has RANK + 1 samples.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.metrics.processes import over_processes
from learner.model.load import load_model
from learner.runlog import CallLog
from learner.train import build_runner
from tests.unit.plain_metrics import Atom, payload_of
from tests.unit.small_run import small_config

CPU = torch.device("cpu")


def step_metrics(rank: int, model: Path, data: ToyData) -> dict[str, float]:
    config = small_config(model, data, model.parent)
    loaded = load_model(config)
    runner = build_runner(config, loaded, None, CallLog(model.parent))
    samples = read_samples(data.train_jsonl, allow_poly=False)[: rank + 1]
    _, report = runner.run(loaded.model, samples, 0, lambda loss: loss.backward())
    return report.metrics


def main() -> None:
    rank, store, cases, model, data = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=200),
    )
    ranks = [[Atom(*atom) for atom in case[int(rank)]] for case in json.loads(cases)]
    combined = [over_processes(payload_of(atoms), CPU).metrics() for atoms in ranks]
    step = step_metrics(int(rank), Path(model), ToyData.under(Path(data)))
    print(json.dumps({"combined": combined, "step": step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
