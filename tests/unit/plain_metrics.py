"""How the numbers of several processes meet, written out plainly."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from learner.runs.declared import METRICS
from learner.runs.metrics import Payload

KINDS = {metric.key: metric.kind for metric in METRICS}


class Atom(NamedTuple):
    """One part of a metric; whole: the denominator's part, of a rate alone."""

    key: str
    value: float
    whole: float


def payload_of(atoms: Sequence[Atom]) -> Payload:
    """What a process has that gave these parts, one after the other."""
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
    """Sum of counters and losses, highest of the rest, and for rates sum / sum."""
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
