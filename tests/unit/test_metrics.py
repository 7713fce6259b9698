"""The declaration of all metrics, and the payload that combines their parts."""

import json
import math
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.runs.declared import GROUPS, METRICS, declared_keys
from learner.runs.metrics import Payload
from tests.unit.plain_metrics import KINDS, Atom, payload_of, plain_metrics

ROOT = Path(__file__).parents[2]
B = "stage2_ab/channel_b"

# Whole numbers add up to the same sum in any order.
ATOMS = st.builds(
    Atom, st.sampled_from(list(KINDS)), st.integers(-(2**40), 2**40), st.integers(0, 999)
)
RANKS = st.lists(st.lists(ATOMS, max_size=8), min_size=1, max_size=3)


@pytest.mark.req("MET-01")
@given(RANKS)
def test_processes_combine_as_their_parts_would(ranks: list[list[Atom]]) -> None:
    payloads = [payload_of(atoms) for atoms in ranks]
    reduced = [
        payload.reduced(
            lambda _: np.sum([p.sums for p in payloads], axis=0),
            lambda _: np.max([p.peaks for p in payloads], axis=0),
        ).metrics()
        for payload in payloads
    ]
    assert all(metrics == plain_metrics(ranks) for metrics in reduced)


@pytest.mark.req("MET-01")
@given(RANKS)
def test_parts_of_a_step_merge_as_if_one_had_counted_all(parts: list[list[Atom]]) -> None:
    whole = Payload()
    for atoms in parts:
        whole.merge(payload_of(atoms))
    together: list[Atom] = reduce(lambda a, b: a + b, parts, [])
    assert whole.metrics() == payload_of(together).metrics() == plain_metrics(parts)


@pytest.mark.req("MET-01")
def test_a_rate_is_a_quotient_of_sums_and_no_mean_of_rates() -> None:
    payload = Payload()
    payload.rate({"rollout/parse_truncated_rate": (1, 1)})
    payload.rate({"rollout/parse_truncated_rate": (0, 9)})
    assert payload.metrics() == {"rollout/parse_truncated_rate": 0.1}


@pytest.mark.req("MET-01")
def test_a_rate_of_nothing_is_zero_and_what_was_never_given_is_not_there() -> None:
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
def test_a_loss_that_is_no_number_stays_visible() -> None:
    payload = Payload()
    payload.add({"loss/A1_text/struct_ce": math.nan, "loss/A1_text/desc_ce": math.inf})
    payload.note({"time/learn_s": math.nan})
    values = payload.metrics()
    assert math.isnan(values["loss/A1_text/struct_ce"])
    assert values["loss/A1_text/desc_ce"] == math.inf
    assert math.isnan(values["time/learn_s"])


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


@pytest.mark.req("MET-01")
def test_every_kind_of_number_has_the_reduction_of_its_family() -> None:
    families = {"counter": "sum", "loss": "sum", "seconds": "max", "flag": "max", "rate": "rate"}
    for metric in METRICS:
        assert metric.reduction == families.get(metric.kind, "max"), metric.key
        assert (metric.kind == "seconds") == (metric.unit == "s"), metric.key
        assert (metric.kind == "seconds") == bool(re.search(r"(?<!_per)_s$", metric.key)), (
            metric.key
        )
        assert (metric.kind == "loss") == metric.key.startswith("loss/"), metric.key
        assert (metric.kind == "rate") >= metric.key.endswith(("_rate", "_mean")), metric.key


@pytest.mark.req("MET-02", "LOSS-06")
def test_the_keys_that_the_contract_names_are_declared_with_their_kind() -> None:
    kinds = {
        "rollout/repeat_terminate_active": "flag",
        "rollout/repeat_terminate_triggered_sequences": "counter",
        "rollout/gen_new_tokens_p99": "peak",
        "rollout/parse_truncated_rate": "rate",
        "rollout/parse_dropped_invalid": "counter",
        f"{B}/N_valid_pred": "counter",
        f"{B}/N_drop_invalid": "counter",
        f"{B}/match_rate": "rate",
        f"{B}/gated": "counter",
        f"{B}/fn_appended": "counter",
        f"{B}/invalid_rollout": "counter",
        f"{B}/closure_supervision/N_drop": "counter",
    }
    reasons = (
        "missing_desc missing_geom wrong_arity non_coord_token "
        "poly_unsupported unknown_geom bbox_invalid key_invalid"
    )
    kinds |= {f"{B}/strict_drop/{reason}": "counter" for reason in reasons.split()}
    for provenance in ("A1", "A2", "B"):
        for name in ("acc_top5", "p_gt_mean", "expected_bin_mae"):
            kinds[f"coord_diag/{provenance}/{name}"] = "rate"
    assert {key: KINDS.get(key) for key in kinds} == kinds
    assert sum(key.startswith(f"{B}/strict_drop/") for key in KINDS) == 8


@pytest.mark.req("LOSS-06")
def test_a_coordinate_diagnostic_always_says_which_logits_it_is_of() -> None:
    bare = [key for key in declared_keys() if key.startswith("coord_diag/")]
    assert {key.split("/")[1] for key in bare} == {"A1", "A2", "B"}
    assert {key.count("/") for key in bare} == {2}


@pytest.mark.req("MET-02")
def test_training_logs_no_overlap_of_boxes_or_masks() -> None:
    """Seed 000: IoU values serve matching alone. `bbox_ciou` is a loss that a config declares.

    F1@mIoU is a score of evaluations (EVAL-02).
    """
    trained = {key for key in declared_keys() if not key.startswith("eval/")}
    overlaps = {key for key in trained if "iou" in key.lower()}
    assert overlaps == {"loss/A2_coord/bbox_ciou", "loss/B_coord/bbox_ciou"}


def test_every_metric_is_declared_once_in_one_group_and_says_what_it_is() -> None:
    grouped = [metric for group in GROUPS for metric in group.metrics]
    assert tuple(grouped) == METRICS
    assert len(KINDS) == len(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS)


@pytest.mark.req("MET-01")
def test_metrics_are_plain_numbers_of_json() -> None:
    payload = payload_of([Atom(key, 3, 4) for key in KINDS])
    read = json.loads(json.dumps(payload.metrics()))
    assert read == payload.metrics()
    assert list(read) == list(KINDS)


def test_the_page_of_all_metrics_is_up_to_date() -> None:
    script = ROOT / "scripts/metrics_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/metrics.md").read_text()
    assert [key for key in KINDS if page.count(f"| `{key}` |") != 1] == []
