"""The manifest that the server expects, and its refusals (SYNC-05)."""

from pathlib import Path
from typing import get_args

import pytest
import transformers
from transformers import AutoConfig

from learner.models.toy import ToyFamily
from learner.rollout.sync.weights import MergedWeights
from rollout_server.weights.manifest import check_manifest, checkpoint_parameters
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
    ("sent", "found"),
    [
        ([A], r"1 parameter.* b is sent as nothing, and the model has float32 \[4\]"),
        ([A, B, A], r"a is sent as float32 \[2, 3\] and float32 \[2, 3\]"),
        ([A, B, parameter("c", 1)], "c is sent as float32 .1., and the model has no such"),
        ([A, parameter("b", 2, 2)], r"1 .* b is sent as float32 \[2, 2\], .* float32 \[4\]"),
        ([A, parameter("b", 4, dtype="bfloat16")], "b is sent as bfloat16"),
        ([], "2 parameter.* a is sent as nothing"),
    ],
)
def test_the_first_fault_is_named(sent: list[ParameterMeta], found: str) -> None:
    with pytest.raises(ProblemError, match=found) as caught:
        check_manifest(sent, EXPECTED, "float32")
    assert (caught.value.problem.kind, caught.value.problem.status) == ("manifest-mismatch", 422)
    check_manifest([B, A], EXPECTED, "float32")
