"""The payload that combines the parts of several processes."""

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.runs.declared import COORD_DIAG, LOSSES, METRICS, SERVERS, TRAINER
from learner.runs.metrics import Payload, PhaseClock, over_processes
from learner.types import Channel
from tests.unit.small_run import metric_lines, run_quietly, small_mapping

B = "stage2_ab/channel_b"

KINDS = {metric.key: metric.kind for metric in METRICS}
SUMMED = ("counter", "loss")


class Atom(NamedTuple):
    """One part of a metric. whole: part of the denominator, used by rates only."""

    key: str
    value: float
    whole: float


def payload_of(atoms: Sequence[Atom]) -> Payload:
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
def test_a_phase_has_the_seconds_of_all_its_blocks() -> None:
    clock, seconds = PhaseClock(), list[float]()
    for _ in range(100):
        with clock.phase("learn"):
            pass
        seconds.append(clock.metrics()["time/learn_s"])
    assert seconds == sorted(set(seconds))


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


Line = dict[str, Any]
HF = {"rollout_backend": "hf", "max_new_tokens": 8, "eval_detection": {"enabled": True}}


def with_everything(mapping: dict[str, Any]) -> dict[str, Any]:
    stage2 = mapping["stage2_ab"]
    stage2 |= {"schedule": {"b_ratio": 0.5}, "n_softctx_iter": 2}
    for module in stage2["pipeline"]["objective"]:
        module["config"] |= {key: 0.5 for key in module["config"] if key.endswith("_weight")}
    monitor = {"name": "coord_diag", "enabled": True, "weight": 1.0, "channels": ["A", "B"]}
    stage2["pipeline"]["diagnostics"] = [{**monitor, "config": {}}]
    return mapping


@pytest.fixture(scope="module")
def lines(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> list[Line]:
    out = tmp_path_factory.mktemp("everything") / "run"
    short = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    given = small_mapping(toy_checkpoint, toy_data, out, training=short, rollout_matching=HF)
    return metric_lines(run_quietly(parse_config(with_everything(given))))


def step_of(lines: list[Line], channel: Channel) -> Line:
    (line,) = (line for line in lines if line.get("step/channel_b") == float(channel == "B"))
    return line


@pytest.mark.req("MET-01", "MET-03")
def test_every_key_of_the_log_is_declared(lines: list[Line]) -> None:
    assert len(lines) == 4, "two steps, an evaluation, the end of the run"
    logged = {key for line in lines for key in line} - {"step"}
    notes = {f"eval/{metric.key}" for metric in SERVERS}
    assert logged <= {metric.key for metric in METRICS} | TRAINER.keys() | notes


@pytest.mark.req("MET-01", "MET-02", "RES-22")
@pytest.mark.parametrize("channel", ["A", "B"])
def test_a_step_logs_the_keys_of_its_channel_alone(lines: list[Line], channel: Channel) -> None:
    line = step_of(lines, channel)
    own = {metric.key: metric for metric in METRICS if channel in metric.channels}
    assert {key for key, metric in own.items() if not metric.when} - line.keys() == set()
    assert line.keys() - own.keys() - TRAINER.keys() == {"step"}
    assert "packing/post_rollout_buffer" not in line, "there is no carry buffer"


@pytest.mark.req("MET-02", "LOSS-06", "CHA-01")
@pytest.mark.parametrize("channel", ["A", "B"])
def test_all_declared_losses_and_diagnostics_are_logged(
    lines: list[Line], channel: Channel
) -> None:
    line = step_of(lines, channel)
    wanted = {metric.key for metric in LOSSES + COORD_DIAG if channel in metric.channels}
    # These short answers repeat nothing, and are in no groups.
    wanted -= {"loss/B_rollout_text/duplicate_ul"}
    wanted -= {"loss/B_answer/policy_gradient", "loss/B_answer/kl"}
    assert {key for key in line if key.startswith(("loss/", "coord_diag/"))} == wanted
    losses = [line[key] for key in wanted if key.startswith("loss/")]
    assert sum(losses) == pytest.approx(line["loss"], rel=1e-4)
    rates = [line[f"coord_diag/{p}/acc_top5"] for p in ("A1", "A2", "B") if p[0] == channel]
    assert all(0 <= rate <= 1 for rate in rates)


@pytest.mark.req("MET-02")
def test_tail_control_audit_metrics_are_emitted(lines: list[Line]) -> None:
    line = step_of(lines, "B")
    assert 0 < line["rollout/gen_new_tokens_p99"] <= 8
    assert 0 <= line["rollout/parse_truncated_rate"] <= 1
    assert line["rollout/parse_dropped_invalid"] >= 0
    assert line["rollout/repeat_terminate_active"] in (0, 1)
    assert line["rollout/repeat_terminate_triggered_sequences"] >= 0
    assert (line["rollout/decode_greedy"], line["rollout/decode_sampling"]) == (1, 0)


@pytest.mark.req("MET-01")
def test_an_evaluation_logs_its_own_keys_alone(lines: list[Line]) -> None:
    (line,) = (line for line in lines if "eval/f1" in line)
    scores = {metric.key for metric in METRICS if metric.key.startswith("eval/")}
    of_others = {key for key in scores if "segm" in key} | {"eval/ap_medium", "eval/ap_large"}
    assert line.keys() == scores - of_others | {"step", "epoch"}, "small boxes in 64 x 64 pixels"


def combine(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    payload = Payload()
    payload.note({"rollout/gen_new_tokens_p99": (7.0, 5.0)[rank]})
    payload.add({f"{B}/matched": (1.0, 3.0)[rank]})
    payload.rate({f"{B}/match_rate": ((1.0, 4.0), (3.0, 4.0))[rank]})
    combined = over_processes(payload, torch.device("cpu")).metrics()
    (folder / f"{rank}.json").write_text(json.dumps(combined))
    dist.destroy_process_group()


@pytest.mark.req("MET-01")
def test_processes_log_sums_maxima_and_quotients_of_sums(tmp_path: Path) -> None:
    from torch.multiprocessing.spawn import spawn

    spawn(combine, (tmp_path,), nprocs=2)
    expected = {"rollout/gen_new_tokens_p99": 7.0, f"{B}/matched": 4.0, f"{B}/match_rate": 0.5}
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
