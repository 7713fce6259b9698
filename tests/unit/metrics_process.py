"""Metrics of several processes, computed plainly, and one of two processes that combine theirs.

    python -m tests.unit.metrics_process RANK STORE CASES

prints the combined metrics of each case as JSON. A test starts both processes.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from learner.runs.declared import METRICS
from learner.runs.metrics import Payload, over_processes

KINDS = {metric.key: metric.kind for metric in METRICS}


class Atom(NamedTuple):
    """One part of a metric. whole: part of the denominator, used by rates only."""

    key: str
    value: float
    whole: float


def payload_of(atoms: Sequence[Atom]) -> Payload:
    """The payload of a process that recorded `atoms` one after the other."""
    payload = Payload()
    for key, value, whole in atoms:
        match KINDS[key]:
            case "counter" | "loss":
                payload.add({key: value})
            case "seconds" | "flag" | "peak" | "whole":
                payload.note({key: value})
            case "rate":
                payload.rate({key: (value, whole)})
    return payload


def plain_metrics(ranks: Sequence[Sequence[Atom]]) -> dict[str, float]:
    """Counters and losses are summed; a rate is sum / sum; of the rest the highest counts."""
    given: dict[str, list[Atom]] = defaultdict(list)
    for rank in ranks:
        for atom in rank:
            given[atom.key].append(atom)
    return {key: _value(key, atoms) for key, atoms in given.items()}


def _value(key: str, atoms: Sequence[Atom]) -> float:
    values = [atom.value for atom in atoms]
    match KINDS[key]:
        case "counter" | "loss":
            return math.fsum(values)
        case "rate":
            whole = math.fsum(atom.whole for atom in atoms)
            return math.fsum(values) / whole if whole else 0.0
    return max(values)


def main() -> None:
    rank, store, cases = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=200),
    )
    own = [[Atom(*atom) for atom in case[int(rank)]] for case in json.loads(cases)]
    device = torch.device("cpu")
    print(json.dumps([over_processes(payload_of(atoms), device).metrics() for atoms in own]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
