"""Packed rows on the real architecture: a segment cannot tell whether it has company."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learner.models.attention import attention_of
from learner.models.load import LoadedModel
from learner.models.packed_forward import check_packing
from learner.models.packs import Segment, make_segment
from shared_contracts.errors import ContractError
from tests.unit.loaded_models import loaded_from
from tests.unit.mixed_samples import mixed_samples
from tests.unit.toy_learner import ToyLearner


@pytest.fixture(scope="module")
def loaded(toy_checkpoint: Path) -> LoadedModel:
    loaded = loaded_from(toy_checkpoint)
    loaded.model.eval()
    return loaded


@pytest.fixture(scope="module")
def segments(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    samples = mixed_samples(tmp_path_factory.mktemp("images"))
    return ToyLearner(loaded).channel_a.segments(samples)


class Spoilt(nn.Module):
    """A model with a fault. leaks: it loses the text row of the position ids. bounds: it
    loses those of the segments. nan: its logits are no numbers.
    """

    def __init__(self, inner: nn.Module, fault: str) -> None:
        super().__init__()
        self.inner = inner
        self.fault = fault

    def forward(self, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if self.fault == "bounds":
            kwargs = {k: v for k, v in kwargs.items() if not k.startswith(("cu_seq", "max_len"))}
        leaks = self.fault == "leaks"
        output = self.inner(position_ids=position_ids[1:] if leaks else position_ids, **kwargs)
        if self.fault == "nan":
            output.logits.fill_(torch.nan)
        return output


@pytest.mark.req("PACK-04")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("leaks", r"training\.packing"),
        ("bounds", r"training\.packing"),
        ("nan", r"model\.model: the model's logits are NaN"),
    ],
)
def test_the_start_up_check_refuses_a_model_that_leaks(
    toy_checkpoint: Path, fault: str, found: str
) -> None:
    model: Any = loaded_from(toy_checkpoint).model
    model.set_attn_implementation(attention_of("auto" if fault == "bounds" else "sdpa"))
    check_packing(model)
    with pytest.raises(ContractError, match=found):
        check_packing(Spoilt(model, fault))


@pytest.mark.req("APPEND-03")
@pytest.mark.scenario("Supervision indices are validated against assistant span")
def test_an_index_outside_the_assistant_span_stops_the_step(
    loaded: LoadedModel, segments: list[Segment]
) -> None:
    good = segments[0]
    group = good.target.coord_groups[0]
    outside = group._replace(positions=(*group.positions[:3], len(good.target.token_ids)))
    broken = replace(good.target, coord_groups=[outside])
    with pytest.raises(ContractError, match=r"s0.*supervised index"):
        make_segment(loaded.inner, "s0", good.prompt, broken, has_dropped=False)
