"""The payload that combines the parts of several processes."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.runs.declared import METRICS
from learner.runs.metrics import Payload

B = "stage2_ab/channel_b"

KINDS = {metric.key: metric.kind for metric in METRICS}
SUMMED = ("counter", "loss")


class Atom(NamedTuple):
    """One part of a metric. whole: part of the denominator, used by rates only."""

    key: str
    value: float
    whole: float


def payload_of(atoms: Sequence[Atom]) -> Payload:
    """The payload of a process that recorded `atoms` one after the other."""
    payload = Payload()
    for key, value, whole in atoms:
        if KINDS[key] == "rate":
            payload.rate({key: (value, whole)})
        elif KINDS[key] in SUMMED:
            payload.add({key: value})
        else:
            payload.note({key: value})
    return payload


def plain_metrics(atoms: Sequence[Atom]) -> dict[str, float]:
    """Counters and losses are summed; a rate is sum / sum; of the rest the highest counts."""
    found: dict[str, float] = {}
    for key in {atom.key for atom in atoms}:
        own = [atom for atom in atoms if atom.key == key]
        whole = sum(atom.whole for atom in own)
        if KINDS[key] == "rate":
            found[key] = sum(atom.value for atom in own) / whole if whole else 0.0
        else:
            values = [atom.value for atom in own]
            found[key] = sum(values) if KINDS[key] in SUMMED else max(values)
    return found


# Whole numbers add up to the same sum in any order.
ATOMS = st.builds(
    Atom, st.sampled_from(list(KINDS)), st.integers(-(2**40), 2**40), st.integers(0, 999)
)
RANKS = st.lists(st.lists(ATOMS, max_size=8), min_size=1, max_size=3)


@pytest.mark.req("MET-01")
@given(RANKS)
def test_merged_parts_of_a_step_equal_one_payload_of_all_parts(parts: list[list[Atom]]) -> None:
    whole = Payload()
    for atoms in parts:
        whole.merge(payload_of(atoms))
    together: list[Atom] = reduce(lambda a, b: a + b, parts, [])
    assert whole.metrics() == payload_of(together).metrics() == plain_metrics(together)


@pytest.mark.req("MET-01")
def test_a_rate_over_zero_is_zero_and_a_metric_never_recorded_is_absent() -> None:
    payload = Payload()
    assert payload.metrics() == {}
    payload.rate({f"{B}/match_rate": (0, 0)})
    payload.add({f"{B}/matched": 0})
    payload.note({"rollout/decode_beam": False})
    assert payload.metrics() == {
        f"{B}/match_rate": 0.0,
        f"{B}/matched": 0.0,
        "rollout/decode_beam": 0.0,
    }


@pytest.mark.req("MET-01")
def test_an_undeclared_key_and_another_kind_than_the_declared_one_are_errors() -> None:
    payload = Payload()
    with pytest.raises(KeyError, match="coord_diag/acc_top5"):
        payload.rate({"coord_diag/acc_top5": (1, 2)})
    with pytest.raises(AssertionError, match="time/learn_s is declared as a seconds"):
        payload.add({"time/learn_s": 1.0})
    with pytest.raises(AssertionError, match="match_rate is declared as a rate"):
        payload.note({f"{B}/match_rate": 0.5})
    assert payload.metrics() == {}
