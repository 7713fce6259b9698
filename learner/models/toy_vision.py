"""Pretraining of a toy model's vision tower: dense detection on toy scenes.

A published checkpoint has seen images before it learns to answer. The random tower of a toy model
has not, and the loss of answers alone teaches it slowly where 6 to 20 shapes overlap. Here the
tower learns alone, from a loss at each of its tokens, as the anchor-free detectors do (FCOS, Tian
et al. 2019). A token stands for a square cell of the image. Two linear heads predict the object
whose centre lies in the cell, the largest one of several: its kind (or none), and its four
coordinates, as logits over the coordinate rows of the model. The heads are dropped at the end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoProcessor,
    BaseImageProcessor,
    Qwen3VLForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

from learner.data.images import open_upright
from learner.models.coord_tokens import vocab_modules
from learner.objectives.coord_reg import soft_targets
from learner.runs.atomic_files import publish_directory
from learner.stages.coords import COORD_BINS
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

FAMILY = "qwen3_vl"
BATCH = 16
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 100
MAX_GRAD_NORM = 1.0
SIGMA = 8.0
# Of the loss of kinds beside the loss of boxes, which is larger by far.
KIND_WEIGHT = 3.0
# How often the losses are told, in steps.
TOLD_EVERY = 100

_DO = "Give scenes of one toy world"


class Losses(NamedTuple):
    """Means over some steps, in nats: of the kind in a cell, and of a coordinate of a box."""

    kind: float
    box: float

    def told(self, step: int, steps: int) -> str:
        return f"step {step}/{steps}, loss of kinds {self.kind:.3f}, of boxes {self.box:.3f}"


Tell = Callable[[int, Losses], None]


def pretrain_vision(
    model: Path, samples: Sequence[Sample], out: Path, steps: int, seed: int, tell: Tell
) -> None:
    """Write the checkpoint `model` to `out` with a pretrained vision tower; all else is as it was.

    samples: of square images of one size, with boxes. steps: of `BATCH` samples each.
    tell: is given the number of the step and the losses since it was called last.

    Raises:
        ContractError: a model of another family, a sample that has not one image, images that
            differ in size, or `out` is not empty.
    """
    _check(model, samples)
    with publish_directory(out) as part, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = Qwen3VLForConditionalGeneration.from_pretrained(model)
        processor = AutoProcessor.from_pretrained(model)
        merge = whole.model.visual.spatial_merge_size
        scenes = _Scenes.of(samples, processor.image_processor, merge)
        _train(_Detector(whole, len(scenes.descriptions)), scenes, steps, tell)
        whole.save_pretrained(part)
        processor.save_pretrained(part)


def _check(model: Path, samples: Sequence[Sample]) -> None:
    found = AutoConfig.from_pretrained(model).model_type
    if found != FAMILY:
        raise ContractError(
            "toy pretrain-vision --model",
            f"{model} is a {found}",
            f"Give a {FAMILY}, as learner toy make-model makes it without --family",
        )
    for sample in samples:
        if len(sample.images) != 1:
            raise ContractError(
                sample.sample_id,
                f"{len(sample.images)} images, where the vision tower learns from one",
                _DO,
            )


class _Scenes(NamedTuple):
    """All samples as tensors: n of them, of t tokens and p patches each.

    patches: (n, p, values), float16; grid: (1, 3), frames, rows and columns of the patches of one.
    kinds: (n, t), places in `descriptions`, or one more for "none".
    boxes: (n, t, 4) in bins, anything where there is none.
    """

    patches: Tensor
    grid: Tensor
    kinds: Tensor
    boxes: Tensor
    descriptions: list[str]

    @classmethod
    def of(cls, samples: Sequence[Sample], images: BaseImageProcessor, merge: int) -> "_Scenes":
        """merge: patches along a side of a token's cell."""
        patches, grids = [], []
        for sample in samples:
            (path,) = sample.images
            seen = images(images=[open_upright(path)], return_tensors="pt")
            patches.append(seen["pixel_values"].half())
            grids.append(seen["image_grid_thw"])
        if len({tuple(grid.flatten().tolist()) for grid in grids}) > 1:
            raise ContractError("toy pretrain-vision --data", "images of different sizes", _DO)
        side = int(grids[0][0, 1]) // merge
        descriptions = sorted({each.desc for sample in samples for each in sample.objects})
        kinds = torch.full((len(samples), side, side), len(descriptions))
        boxes = torch.zeros(*kinds.shape, 4)
        for n, sample in enumerate(samples):
            for each in sorted(sample.objects, key=_area):  # the largest one comes last, and stays
                box = torch.tensor(each.shape.coords, dtype=torch.float)
                column, row = ((box[:2] + box[2:]) / 2 / COORD_BINS * side).long().tolist()
                kinds[n, row, column] = descriptions.index(each.desc)
                boxes[n, row, column] = box
        return cls(
            torch.stack(patches), grids[0], kinds.flatten(1), boxes.flatten(1, 2), descriptions
        )


def _area(item: GroundTruthObject) -> int:
    x1, y1, x2, y2 = item.shape.coords
    return (x2 - x1) * (y2 - y1)


class _Detector(nn.Module):
    """The vision tower of `model` and the two heads."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, kinds: int) -> None:
        super().__init__()
        self.tower, self.none = model.model.visual, kinds
        rows = vocab_modules(model)[0].weight[-COORD_BINS:].detach()
        width = rows.shape[1]
        # Logits start with a standard deviation of about 0.3.
        self.register_buffer("rows", rows * 0.3 / rows.std(), persistent=False)
        self.kind = nn.Linear(width, kinds + 1)
        self.query = nn.Linear(width, 4 * width)

    def forward(self, patches: Tensor, grid: Tensor, kinds: Tensor, boxes: Tensor) -> Tensor:
        """Both losses of a batch of b: (2,), as in `Losses`. Shapes as in `_Scenes`."""
        seen = self.tower(patches.float().flatten(0, 1), grid_thw=grid.expand(len(patches), 3))
        # As the language model adds them up, layer by layer.
        tokens = (seen.pooler_output + sum(seen.deepstack_features)).view(*kinds.shape, -1)
        kind = cross_entropy(self.kind(tokens).flatten(0, 1), kinds.flatten())
        there = kinds < self.none
        queries = self.query(tokens).view(*boxes.shape, -1)[there]
        targets = soft_targets(boxes[there].flatten(), SIGMA, None)
        box = cross_entropy((queries @ self.rows.T).flatten(0, 1), targets)
        return torch.stack([kind, box])


def _train(detector: _Detector, scenes: _Scenes, steps: int, tell: Tell) -> None:
    """AdamW with a warm-up and a cosine to zero."""
    optimizer = torch.optim.AdamW(detector.parameters(), lr=LEARNING_RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, steps // 10), steps)
    told: list[Tensor] = []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(scenes.patches), (BATCH,))
        losses = detector(
            scenes.patches[chosen], scenes.grid, scenes.kinds[chosen], scenes.boxes[chosen]
        )
        optimizer.zero_grad()
        (KIND_WEIGHT * losses[0] + losses[1]).backward()
        nn.utils.clip_grad_norm_(detector.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        told.append(losses.detach())
        if step % TOLD_EVERY == 0 or step == steps:
            tell(step, Losses(*torch.stack(told).mean(0).tolist()))
            told.clear()
