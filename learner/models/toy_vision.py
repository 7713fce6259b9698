"""Pretraining of a toy model's vision tower: dense detection on toy scenes.

The tower of a published checkpoint is trained on images. That of a toy model is random, and learns
slowly from the loss of answers if 6 to 20 shapes overlap. Here it is trained alone, with a loss at
each of its tokens, as in anchor-free detectors (FCOS, Tian et al. 2019). A token is a square cell
of the image. Two linear heads predict the object with its centre in the cell, the largest one of
several: its kind (or none), and its four coordinates, as logits over the coordinate rows of the
model. The heads are not saved.
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
from learner.stages.tokens import COORD_BINS
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

FAMILY = "qwen3_vl"
BATCH = 16
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 100
MAX_GRAD_NORM = 1.0
SIGMA = 8.0
# Weight of the loss of kinds; the loss of boxes, which is much larger, has 1.
KIND_WEIGHT = 3.0
# Steps between reports of the losses.
REPORT_EVERY = 100

_DO = "Give scenes of one toy world"


class Losses(NamedTuple):
    """Means over some steps, in nats: of the kind in a cell, and of a coordinate of a box."""

    kind: float
    box: float

    def line(self, step: int, steps: int) -> str:
        return f"step {step}/{steps}, loss of kinds {self.kind:.3f}, of boxes {self.box:.3f}"


Report = Callable[[int, Losses], None]


def pretrain_vision(
    model: Path, samples: Sequence[Sample], out: Path, steps: int, seed: int, report: Report
) -> None:
    """Write the checkpoint `model` to `out` with a pretrained vision tower, otherwise unchanged.

    samples: of square images of one size, with boxes. steps: of `BATCH` samples each.
    report: called with the number of the step and the losses since the previous call.

    Raises ContractError for a model of another family, for a sample without exactly one image, for
    images of different sizes, and if `out` is not empty.
    """
    if (family := AutoConfig.from_pretrained(model).model_type) != FAMILY:
        raise ContractError(
            "toy pretrain-vision --model",
            f"{model} is a {family}",
            f"Give a {FAMILY}, as learner toy make-model makes it without --family",
        )
    with publish_directory(out) as part, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = Qwen3VLForConditionalGeneration.from_pretrained(model)
        processor = AutoProcessor.from_pretrained(model)
        merge = whole.model.visual.spatial_merge_size
        scenes = _Scenes.of(samples, processor.image_processor, merge)
        _train(_Detector(whole, len(scenes.descriptions)), scenes, steps, report)
        whole.save_pretrained(part)
        processor.save_pretrained(part)


class _Scenes(NamedTuple):
    """n samples as tensors, of t tokens and p patches each.

    patches: (n, p, values), float16; grid: (1, 3), frames, rows and columns of an image's patches.
    kinds: (n, t), indices into `descriptions`; its length means "none".
    boxes: (n, t, 4) in bins, undefined without an object.
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
            if len(sample.images) != 1:
                found = f"it has {len(sample.images)} images, and pretraining needs one"
                raise ContractError(sample.sample_id, found, _DO)
            batch = images(images=[open_upright(sample.images[0])], return_tensors="pt")
            patches.append(batch["pixel_values"].half())
            grids.append(batch["image_grid_thw"])
        if len({tuple(grid.flatten().tolist()) for grid in grids}) > 1:
            raise ContractError("toy pretrain-vision --data", "images of different sizes", _DO)
        side = int(grids[0][0, 1]) // merge
        descriptions = sorted({each.desc for sample in samples for each in sample.objects})
        kinds = torch.full((len(samples), side, side), len(descriptions))
        boxes = torch.zeros(*kinds.shape, 4)
        for n, sample in enumerate(samples):
            for each in sorted(sample.objects, key=_area):  # the largest one overwrites the others
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
        """Return both losses of a batch, (2,), as in `Losses`. Shapes as in `_Scenes`."""
        output = self.tower(patches.float().flatten(0, 1), grid_thw=grid.expand(len(patches), 3))
        # The language model adds deepstack features in its first layers.
        tokens = (output.pooler_output + sum(output.deepstack_features)).view(*kinds.shape, -1)
        kind = cross_entropy(self.kind(tokens).flatten(0, 1), kinds.flatten())
        is_object = kinds < self.none
        queries = self.query(tokens).view(*boxes.shape, -1)[is_object]
        targets = soft_targets(boxes[is_object].flatten(), SIGMA, None)
        box = cross_entropy((queries @ self.rows.T).flatten(0, 1), targets)
        return torch.stack([kind, box])


def _train(detector: _Detector, scenes: _Scenes, steps: int, report: Report) -> None:
    """Train with AdamW, a warm-up and a cosine schedule to zero."""
    optimizer = torch.optim.AdamW(detector.parameters(), lr=LEARNING_RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, steps // 10), steps)
    since_report: list[Tensor] = []
    for step in range(1, steps + 1):
        batch = torch.randint(len(scenes.patches), (BATCH,))
        losses = detector(
            scenes.patches[batch], scenes.grid, scenes.kinds[batch], scenes.boxes[batch]
        )
        optimizer.zero_grad()
        (KIND_WEIGHT * losses[0] + losses[1]).backward()
        nn.utils.clip_grad_norm_(detector.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        since_report.append(losses.detach())
        if step % REPORT_EVERY == 0 or step == steps:
            report(step, Losses(*torch.stack(since_report).mean(0).tolist()))
            since_report.clear()
