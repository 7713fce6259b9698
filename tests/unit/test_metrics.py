"""The declared metrics, and the payload that combines their parts, also over two processes."""

import json
import math
import os
import random
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.runs.declared import GROUPS, METRICS, declared_keys
from learner.runs.metrics import Payload, over_processes
from tests.unit.metrics_process import KINDS, Atom, payload_of, plain_metrics

ROOT = Path(__file__).parents[2]
B = "stage2_ab/channel_b"

# Whole numbers add up to the same sum in any order.
ATOMS = st.builds(
    Atom, st.sampled_from(list(KINDS)), st.integers(-(2**40), 2**40), st.integers(0, 999)
)
RANKS = st.lists(st.lists(ATOMS, max_size=8), min_size=1, max_size=3)


@pytest.mark.req("MET-01")
@given(RANKS)
def test_reduced_payloads_equal_plainly_combined_parts(ranks: list[list[Atom]]) -> None:
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
def test_merged_parts_of_a_step_equal_one_payload_of_all_parts(parts: list[list[Atom]]) -> None:
    whole = Payload()
    for atoms in parts:
        whole.merge(payload_of(atoms))
    together: list[Atom] = reduce(lambda a, b: a + b, parts, [])
    assert whole.metrics() == payload_of(together).metrics() == plain_metrics(parts)


@pytest.mark.req("MET-01")
def test_a_rate_is_a_quotient_of_sums_and_not_a_mean_of_rates() -> None:
    payload = Payload()
    payload.rate({"rollout/parse_truncated_rate": (1, 1)})
    payload.rate({"rollout/parse_truncated_rate": (0, 9)})
    assert payload.metrics() == {"rollout/parse_truncated_rate": 0.1}


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
def test_a_nan_loss_is_reported_as_nan() -> None:
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
def test_every_kind_has_its_reduction_and_its_form_of_key() -> None:
    families = {"counter": "sum", "loss": "sum", "rate": "rate"}
    for metric in METRICS:
        key, kind = metric.key, metric.kind
        assert metric.reduction == families.get(kind, "max"), key
        assert (kind == "seconds") == (metric.unit == "s"), key
        assert (kind == "seconds") == bool(re.search(r"(?<!_per)_s$", key)), key
        assert (kind == "loss") == key.startswith("loss/"), key
        assert (kind == "rate") >= key.endswith(("_rate", "_mean")), key


@pytest.mark.req("MET-02", "LOSS-06", "RES-32")
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
        f"{B}/prose_before": "counter",
        f"{B}/fenced": "counter",
        f"{B}/coord_unaligned": "counter",
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
    diagnostics = [key for key in declared_keys() if key.startswith("coord_diag/")]
    assert {key.split("/")[1] for key in diagnostics} == {"A1", "A2", "B"}, "never without a source"


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


def test_the_page_of_all_metrics_is_up_to_date() -> None:
    script = ROOT / "scripts/metrics_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/metrics.md").read_text()
    assert [key for key in KINDS if page.count(f"| `{key}` |") != 1] == []


# --- two processes over gloo

Case = tuple[list[Atom], list[Atom]]
MATCHED = f"{B}/matched"
P99, TRUNCATED = "rollout/gen_new_tokens_p99", "rollout/parse_truncated_rate"
ACTIVE = "rollout/repeat_terminate_active"
BY_HAND: Case = (
    [
        Atom(MATCHED, 2, 0),
        Atom(P99, 30, 0),
        Atom(TRUNCATED, 1, 2),
        Atom("sync/total_s", 4.5, 0),
        Atom(ACTIVE, 1, 0),
    ],
    [
        Atom(MATCHED, 5, 0),
        Atom(P99, 80, 0),
        Atom(TRUNCATED, 0, 8),
        Atom(ACTIVE, 1, 0),
        Atom("loss/B_coord/coord_w1", 0.25, 0),
    ],
)
COMBINED = {
    MATCHED: 7,
    P99: 80,
    TRUNCATED: 0.1,
    "sync/total_s": 4.5,
    ACTIVE: 1,
    "loss/B_coord/coord_w1": 0.25,
}


def drawn_cases(count: int) -> list[Case]:
    """Parts of both processes. Most keys occur in only one of them."""
    draw = random.Random(7)

    def atoms() -> list[Atom]:
        chosen = draw.choices(list(KINDS), k=draw.randrange(40))
        return [Atom(key, draw.randrange(10**9), draw.randrange(9)) for key in chosen]

    return [(atoms(), atoms()) for _ in range(count)]


@pytest.mark.req("MET-01")
@pytest.mark.slow
def test_two_processes_get_the_same_combined_metrics(tmp_path: Path) -> None:
    cases: list[Case] = [BY_HAND, ([], []), ([Atom(MATCHED, 1, 0)], []), *drawn_cases(60)]
    wanted = [plain_metrics(case) for case in cases]
    assert wanted[0] == pytest.approx(COMBINED)
    shared = [str(tmp_path / "store"), json.dumps(cases)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.metrics_process", str(rank), *shared],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    for out, _ in outputs:
        combined = json.loads(out.splitlines()[-1])
        assert combined == [pytest.approx(metrics) for metrics in wanted]


@pytest.mark.req("MET-01")
def test_a_single_process_keeps_its_payload() -> None:
    payload = payload_of(BY_HAND[0])
    assert over_processes(payload, torch.device("cpu")) is payload
