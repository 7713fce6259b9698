"""What the rollout-aligned objective teaches: which tokens, which bins, and nothing else.

The answers are written by hand; parser, matching, targets, segments and objective are real. The
logits are random, so that a gradient of exactly 0 is one of a token that is not taught.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.config import parse_config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.models.packs import Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.objectives.logit_stats import ForwardStats
from learner.objectives.pipeline import Pipeline
from learner.training.channels import ChannelB, Encoding
from learner.types import GroundTruthObject, Sample, Shape
from tests.unit.answers import coords, encode, pieces
from tests.unit.config_faults import ALIGNED
from tests.unit.loaded_models import loaded_from
from tests.unit.packed_logits import as_given
from tests.unit.small_run import rollout


def poly(desc: str, *bins: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("poly", bins))


def box(desc: str, *bins: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("bbox_2d", bins))


ROOF = poly("red roof", 300, 100, 520, 480, 90, 470)
SIGN = box("sign", 600, 610, 900, 905)


def entry(index: int, item: GroundTruthObject) -> str:
    bins = coords(*item.shape.coords)
    return f'"object_{index}": {{"desc": "{item.desc}", "{item.shape.kind}": {bins}}}'


ROOF_SAID = entry(1, poly("a house", 310, 90, 500, 500, 80, 490))
GHOST_SAID = entry(3, poly("ghost", 950, 0, 999, 0, 999, 60))


@dataclass(frozen=True)
class Lesson:
    """The target of one answer, and the gradient of random logits (L, V)."""

    segment: Segment
    text: list[str]
    gradient: Tensor

    @property
    def rows(self) -> Tensor:
        """Gradient of the logits that predict each token of the target, (T, V)."""
        return self.gradient[len(self.segment) - len(self.text) - 1 : -1]

    @property
    def taught(self) -> set[int]:
        """Positions in the target of the tokens with a gradient; nothing else has one."""
        found = set(self.rows.any(dim=-1).nonzero().squeeze(1).tolist())
        assert int(self.gradient.any(dim=-1).sum()) == len(found)
        return found

    @property
    def tail(self) -> set[int]:
        """Tokens of what was appended, the closure included."""
        return set(range(self.segment.target.prefix_len, len(self.text)))

    def of(self, part: str) -> set[int]:
        """Positions of the tokens that hold a character of a part of the target's text."""
        whole = "".join(self.text)
        assert whole.count(part) == 1, part
        start, stop = whole.index(part), whole.index(part) + len(part)
        ends = np.cumsum([len(piece) for piece in self.text]).tolist()
        spans = [(end - len(piece), end) for end, piece in zip(ends, self.text, strict=True)]
        return {i for i, (first, end) in enumerate(spans) if first < stop and end > start}

    def coordinates(self, part: str) -> set[int]:
        """Those of them that are coordinate tokens."""
        return {i for i in self.of(part) if self.text[i].startswith("<|coord_")}


@pytest.fixture(scope="module")
def loaded(toy_checkpoint: Path) -> LoadedModel:
    return loaded_from(toy_checkpoint)


def teach(loaded: LoadedModel, scene: Sample, answer: str) -> Lesson:
    config = parse_config(ALIGNED)
    prompt = PromptEncoder(loaded.processor, "Detect every object in the image.", None)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
    said = rollout(prompt(scene).ids.tolist(), encode(loaded.tokenizer, answer))
    (segment,), _ = ChannelB(encoding, config).segments([scene], [said])
    generator = torch.Generator().manual_seed(3)
    vocabulary = len(loaded.processor.tokenizer)
    logits = torch.randn(len(segment), vocabulary, generator=generator).double()
    logits.requires_grad_()
    pipeline = Pipeline(config.pipeline, loaded.vocab.ids)
    selection = pipeline.select(make_pack([segment]).supervision, "B")
    stats = pipeline.reader(selection).anchor(as_given(logits))
    loss = pipeline(ForwardStats(stats, stats), selection, "B")
    (gradient,) = torch.autograd.grad(loss.total, logits)
    return Lesson(segment, pieces(loaded.tokenizer, segment.target.token_ids), gradient)


# --- Which tokens are taught -------------------------------------------------------------

GHOST_BOX = entry(1, box("ghost", 0, 0, 9, 9))


@pytest.mark.scenario(
    "CE masking follows matched/FP/FN policy",
    "Stop-neutral masking is not applied",
    "Desc can be fully masked while keeping structure CE",
)
@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "RES-05", "RES-09", "CHB-01")
@pytest.mark.parametrize(
    ("said", "truths", "coordinates", "silent"),
    [
        ([ROOF_SAID, GHOST_SAID], [ROOF, SIGN], ROOF_SAID, SIGN),
        ([ROOF_SAID], [ROOF], ROOF_SAID, None),
        ([entry(1, poly("ghost", 950, 0, 999, 0, 999, 60))], [ROOF], None, ROOF),
        ([GHOST_BOX], [ROOF], None, ROOF),
    ],
    ids=["a match and a ghost", "nothing missed", "a false polygon", "a false box"],
)
def test_of_an_answer_only_matched_coordinates_are_taught_and_all_of_the_append_but_descriptions(
    loaded: LoadedModel,
    toy_data: ToyData,
    said: list[str],
    truths: list[GroundTruthObject],
    coordinates: str | None,
    silent: GroundTruthObject | None,
) -> None:
    scene = replace(read_samples(toy_data.train_jsonl, allow_poly=False)[0], objects=tuple(truths))
    lesson = teach(loaded, scene, "{" + ", ".join(said) + "}")
    assert lesson.tail >= lesson.of("}<|im_end|>")
    matched = set() if coordinates is None else lesson.coordinates(coordinates)
    described = set() if silent is None else lesson.of(silent.desc)
    assert lesson.taught == matched | (lesson.tail - described)
    eos = lesson.segment.target.token_ids[-1]
    assert lesson.rows[-1, eos] < 0, "the logit of <|im_end|> is pulled up"
