"""Packed rows on the real architecture: a segment cannot tell whether it has company."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from learner.config.schema import AttentionChoice
from learner.models.attention import attention_of
from learner.models.packing_check import check_packing
from learner.models.packs import Segment, make_pack, make_segment
from learner.models.prompts import PromptEncoder
from learner.stages.coords import coord_token
from learner.stages.targets import build_ground_truth_target
from learner.types import GroundTruthObject, Role, Sample, Shape
from shared_contracts.errors import ContractError
from tests.unit.loaded_models import loaded_from
from tests.unit.mixed_samples import mixed_samples
from tests.unit.packed_logits import packed_logits
from tests.unit.toy_learner import ToyLearner

IMAGE_SIZES = [(64, 64), (96, 64), (64, 128)]


@pytest.fixture(scope="module")
def checkpoint(toy_checkpoint: Path) -> Path:
    return toy_checkpoint


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Qwen3VLForConditionalGeneration:
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    assert isinstance(loaded, Qwen3VLForConditionalGeneration)
    loaded.eval()
    return loaded


@pytest.fixture(scope="module")
def segments(
    checkpoint: Path,
    model: Qwen3VLForConditionalGeneration,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Segment]:
    """Three segments with images of different sizes and answers of different lengths."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    encode = PromptEncoder(processor, "Detect every object in the image.", None)
    folder = tmp_path_factory.mktemp("images")
    made = []
    for number, size in enumerate(IMAGE_SIZES):
        path = folder / f"{number}.png"
        pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3))
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        box = GroundTruthObject("red ellipse", Shape("bbox_2d", (10, 20, 300 + number, 400)))
        sample = Sample(f"s{number}", (path,), *size, (box,) * (number + 1))
        target = build_ground_truth_target(sample.objects, processor.tokenizer, "desc_first")
        made.append(
            make_segment(model.model, sample.sample_id, encode(sample), target, has_dropped=False)
        )
    return made


@pytest.mark.req("PACK-04")
@torch.no_grad()
def test_packed_logits_equal_those_of_the_segment_alone(
    model: Qwen3VLForConditionalGeneration, segments: list[Segment]
) -> None:
    packed = packed_logits(model, make_pack(segments))
    offset = 0
    for segment in segments:
        alone = packed_logits(model, make_pack([segment]))
        assert torch.allclose(packed[offset : offset + len(segment)], alone, atol=1e-4)
        offset += len(segment)


@pytest.mark.req("PACK-04")
@pytest.mark.req("FULL-01")
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@torch.no_grad()
def test_a_pack_keeps_several_images_and_none_apart_in_any_order(
    checkpoint: Path, tmp_path: Path, attention: AttentionChoice
) -> None:
    loaded = loaded_from(checkpoint)
    assert isinstance(loaded.model, Qwen3VLForConditionalGeneration)
    loaded.model.set_attn_implementation(attention_of(attention))
    segments = ToyLearner(loaded).channel_a.segments(mixed_samples(tmp_path))
    alone = [packed_logits(loaded.model, make_pack([segment])) for segment in segments]
    for order in ([0, 1, 2, 3], [2, 1, 3, 0], [1, 1, 0, 2]):
        packed = packed_logits(loaded.model, make_pack([segments[i] for i in order]))
        wanted = torch.cat([alone[i] for i in order])
        assert torch.allclose(packed, wanted, atol=1e-4), order


@pytest.mark.req("PACK-04")
@torch.no_grad()
def test_a_segment_alone_equals_the_models_own_forward(
    model: Qwen3VLForConditionalGeneration, segments: list[Segment]
) -> None:
    segment = segments[1]
    own = model(
        input_ids=segment.input_ids[None],
        mm_token_type_ids=make_pack([segment]).mm_token_types,
        pixel_values=segment.prompt.pixel_values,
        image_grid_thw=segment.prompt.image_grid_thw,
        attention_mask=torch.ones(1, len(segment), dtype=torch.long),
        use_cache=False,
    ).logits[0]
    assert torch.allclose(packed_logits(model, make_pack([segment])), own, atol=1e-4)


@pytest.mark.req("PACK-04", "APPEND-03")
def test_slots_and_roles_move_by_the_segments_offset(segments: list[Segment]) -> None:
    row = make_pack(segments).supervision
    ids = row.input_ids[row.coord_positions].tolist()
    assert len(ids) == 4 * 6
    assert row.boxes.shape == (6, 4)
    assert (row.roles[: segments[0].prompt.ids.numel()] == Role.PROMPT).all()
    first, last = row.coord_bins[:4].tolist(), row.coord_bins[-4:].tolist()
    assert first == [10, 20, 300, 400]
    assert last == [10, 20, 302, 400]


def test_supervised_slots_hold_the_coordinate_tokens(
    checkpoint: Path, segments: list[Segment]
) -> None:
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    row = make_pack(segments).supervision
    for token, expected in zip(
        row.input_ids[row.coord_positions].tolist(), row.coord_bins.tolist(), strict=True
    ):
        assert tokenizer.convert_ids_to_tokens(token) == coord_token(int(expected))


@pytest.mark.req("PACK-04")
def test_the_start_up_check_accepts_sdpa_and_refuses_a_model_that_leaks(
    model: Qwen3VLForConditionalGeneration,
) -> None:
    check_packing(model)

    class Leaky(nn.Module):
        """Drops the text row of the position ids, as a naive packed forward would."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, position_ids: torch.Tensor, **kwargs: object) -> object:
            return self.inner(position_ids=position_ids[1:], **kwargs)

    with pytest.raises(ContractError, match=r"training\.packing"):
        check_packing(Leaky())

    class Broken(nn.Module):
        """Its logits are no numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **kwargs: object) -> object:
            output = self.inner(**kwargs)
            output.logits.fill_(torch.nan)
            return output

    with pytest.raises(ContractError, match="logits move by nan"):
        check_packing(Broken())


@pytest.mark.req("APPEND-03")
def test_an_index_outside_the_assistant_span_stops_the_step(
    model: Qwen3VLForConditionalGeneration, segments: list[Segment]
) -> None:
    good = segments[0]
    group = good.target.coord_groups[0]
    outside = group._replace(positions=(*group.positions[:3], len(good.target.token_ids)))
    broken = replace(good.target, coord_groups=[outside])
    with pytest.raises(ContractError, match=r"s0.*supervised index"):
        make_segment(model.model, "s0", good.prompt, broken, has_dropped=False)
