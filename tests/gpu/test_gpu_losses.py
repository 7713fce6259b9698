"""The objectives on a GPU: as on the CPU, in the memory they may take."""

import pytest
import torch
from torch import Tensor

from learner.objectives.logit_stats import ForwardStats, Supervision
from learner.objectives.pipeline import PackLoss, Pipeline
from tests.unit.loss_rows import COORD_IDS, EVERYTHING, VOCAB, annotation_row
from tests.unit.packed_logits import as_given


def loss_of(logits: Tensor, row: Supervision) -> PackLoss:
    pipeline = Pipeline(EVERYTHING, COORD_IDS)
    selection = pipeline.select(row.to(logits.device), "A")
    reading = pipeline.reader(selection).anchor(as_given(logits))
    return pipeline(ForwardStats(reading, reading), selection, "A")


@pytest.mark.gpu
@pytest.mark.req("LOSS-05", "LOSS-06")
def test_loss_and_gradient_are_those_of_the_cpu() -> None:
    row = annotation_row()
    draw = torch.Generator().manual_seed(0)
    there = torch.randn(len(row.roles), VOCAB, generator=draw).requires_grad_()
    here = there.detach().cuda().requires_grad_()
    found, expected = loss_of(here, row), loss_of(there, row)
    found.total.backward()
    expected.total.backward()
    assert found.atoms == pytest.approx(expected.atoms, rel=1e-4)
    assert found.diagnostics == pytest.approx(expected.diagnostics, rel=1e-4)
    assert here.grad is not None
    assert there.grad is not None
    assert torch.allclose(here.grad.cpu(), there.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.req("LOSS-04")
def test_a_wide_vocabulary_takes_one_gradient_and_a_few_chunks() -> None:
    row, width = annotation_row(), 2**24
    logits = torch.randn(len(row.roles), width, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_of(logits, row).total.backward()
    taken = torch.cuda.max_memory_allocated() - before
    chunk = 4 * width
    assert taken < logits.nbytes + 4 * chunk
