"""The manifest that the server expects, and its refusals (SYNC-05)."""

from pathlib import Path
from typing import get_args

import pytest
import transformers
from transformers import AutoConfig

from learner.models.toy import ToyFamily
from learner.rollout.sync.weights import MergedWeights
from rollout_server.weights.manifest import MOST_LISTED, check_manifest, checkpoint_parameters
from shared_contracts.errors import ProblemError
from shared_contracts.weights import DtypeName, ParameterMeta
from tests.contract.toy_checkpoints import make_checkpoint

EXPECTED = {"a": [2, 3], "b": [4]}


@pytest.mark.req("SYNC-02", "SYNC-05", "SYNC-06")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", get_args(ToyFamily))
def test_a_learner_sends_what_the_server_expects(
    tmp_path: Path, family: ToyFamily, tie: bool
) -> None:
    folder = make_checkpoint(tmp_path / "model", seed=0, tie=tie, family=family)
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    model = getattr(transformers, architecture).from_pretrained(folder)
    manifest = MergedWeights(model).metadata("bfloat16")
    check_manifest(manifest, checkpoint_parameters(folder), "bfloat16")
    wide = {each.name.rpartition(".")[2] for each in manifest if each.dtype == "float32"}
    assert wide == ({"A_log"} if family.startswith("qwen3_5") else set())
    sent = {each.name: each.shape for each in manifest}
    assert checkpoint_parameters(folder) == sent
    assert ("lm_head.weight" in sent) == (not tie)
    assert any(".experts.0.gate_proj." in name for name in sent) == family.endswith("_moe")


def parameter(name: str, *shape: int, dtype: DtypeName = "float32") -> ParameterMeta:
    return ParameterMeta(name=name, dtype=dtype, shape=list(shape))


A, B = parameter("a", 2, 3), parameter("b", 4)


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("sent", "faults"),
    [
        ([B, A], []),
        ([A], [("b", "missing", "[4]")]),
        ([A, B, A], [("a", "duplicate", "2 times")]),
        ([A, B, parameter("c", 1)], [("c", "unexpected", "the model has no such parameter")]),
        ([A, parameter("b", 2, 2)], [("b", "shape", "[2, 2], not [4]")]),
        ([A, parameter("b", 4, dtype="bfloat16")], [("b", "dtype", "bfloat16, not float32")]),
        ([], [("a", "missing", "[2, 3]"), ("b", "missing", "[4]")]),
    ],
)
def test_every_fault_is_named(
    sent: list[ParameterMeta], faults: list[tuple[str, str, str]]
) -> None:
    if not faults:
        check_manifest(sent, EXPECTED, "float32")
        return
    name, kind, detail = faults[0]
    with pytest.raises(ProblemError) as caught:
        check_manifest(sent, EXPECTED, "float32")
    problem = caught.value.problem
    assert (problem.kind, problem.status) == ("manifest-mismatch", 422)
    assert f"{len(faults)} fault(s)" in problem.detail
    assert problem.detail.endswith(f"{name} ({kind}): {detail}")
    assert problem.errors == [{"where": n, "fault": k, "detail": d} for n, k, d in faults]


@pytest.mark.req("SYNC-05")
def test_a_long_list_of_faults_is_cut_and_counted() -> None:
    unknown = [parameter(f"c{number}", 1) for number in range(1000)]
    with pytest.raises(ProblemError, match="1000 fault") as caught:
        check_manifest([A, B, *unknown], EXPECTED, "float32")
    assert len(caught.value.problem.errors or []) == MOST_LISTED
