"""Parse, match and target of 256 answers of 100 objects.

Descriptions are those of the part `parser`, shapes the crowds of the part `matching`. Times are of
the processor, not of the clock; all targets of a round are kept, as a step keeps them.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from benchmarks.command import Bench
from benchmarks.data_plane_parts.matching import draw_scene
from benchmarks.data_plane_parts.parser import DESCRIPTIONS, qwen_tokenizer
from benchmarks.results import Result, median_of
from learner.config import load_config
from learner.stages.formats.coord_json import serialize_objects
from learner.stages.targets import run_stages
from learner.stages.tokens import IM_END
from learner.types import AssessedRollout, GroundTruthObject, RolloutOutput, Sample

ANSWERS = 256
OBJECTS = 100
POLYGONS = range(8, 13)
CONFIG = load_config(Path(__file__).parents[2] / "configs/stage2_rollout_aligned/base.yaml")

Answer = tuple[Sample, RolloutOutput]


def measure(bench: Bench) -> list[Result]:
    """Each round draws answers of its own."""
    tokenizer = qwen_tokenizer()
    name = f"parse, match and target of {ANSWERS} answers of {OBJECTS}"
    kinds = (("boxes", (), 3), ("polygons of 8 to 12 points", POLYGONS, 6))
    return [
        median_of(
            f"{name} {kind}", _seconds(bench.rounds, tokenizer, corners), goal, False, unit=" s"
        )
        for kind, corners, goal in kinds
    ]


def _seconds(
    rounds: int, tokenizer: PreTrainedTokenizerFast, corners: Sequence[int]
) -> list[float]:
    _run(_answers(tokenizer, 8, rounds, corners), tokenizer)
    seconds = []
    for round_ in range(rounds):
        answers = _answers(tokenizer, ANSWERS, round_, corners)
        start = time.process_time()
        assessed = _run(answers, tokenizer)
        seconds.append(time.process_time() - start)
        assert all(each.target is not None for each in assessed), "each answer has a target"
    return seconds


def _run(answers: Sequence[Answer], tokenizer: PreTrainedTokenizerFast) -> list[AssessedRollout]:
    samples, rollouts = zip(*answers, strict=True)
    return run_stages(samples, rollouts, tokenizer, CONFIG)


def _answers(
    tokenizer: PreTrainedTokenizerFast, count: int, round_: int, corners: Sequence[int]
) -> list[Answer]:
    """Answers of `OBJECTS` objects each, and as many ground truths."""
    rng = random.Random(round_)
    end = tokenizer.encode(IM_END)
    answers = []
    for n in range(count):
        predicted, truths = (
            [GroundTruthObject(rng.choice(DESCRIPTIONS), shape) for shape in shapes]
            for shapes in draw_scene(OBJECTS, round_ * ANSWERS + n, corners)
        )
        ids = tokenizer.encode(serialize_objects(predicted, "desc_first")) + end
        rollout = RolloutOutput([], ids, "", "stop", False, (0, 0), None)
        answers.append((Sample(f"bench:{n}", (), 999, 999, tuple(truths)), rollout))
    return answers
