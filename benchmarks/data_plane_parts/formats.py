"""How many tokens a box takes in each answer format, with Qwen's tokenizer.

The descriptions are the 80 names of COCO. A box is counted as what one more of it adds to an answer
of one. The spread is that of the descriptions.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from benchmarks.command import Bench
from benchmarks.data_plane_parts.parser import qwen_tokenizer
from benchmarks.results import Result
from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.stages.formats import AnswerFormat
from learner.types import GroundTruthObject, Shape

MORE = 10
# Limits of the last two; that of `object_keys` is none, and is what the seeds' format takes.
GOALS = {"object_keys": 33, "objects_array": 26, "compact": 10}

COCO = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball,
kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup,
fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard,
cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear,
hair drier, toothbrush""".replace("\n", " ").split(", ")


def measure(_: Bench) -> list[Result]:
    """One round: the count is the same in each."""
    tokenizer = qwen_tokenizer()
    results = []
    for name, goal in GOALS.items():
        answers = load_registered(ANSWER_FORMATS, name)
        tokens = [_tokens(desc, answers, tokenizer) for desc in COCO]
        mean = sum(tokens) / len(tokens)
        what = f"tokens of a box in `{name}`"
        results.append(Result(what, mean, tuple(tokens), goal, at_least=False, detail="80 names"))
    return results


def _tokens(desc: str, answers: AnswerFormat, tokenizer: PreTrainedTokenizerFast) -> float:
    box = GroundTruthObject(desc, Shape("bbox_2d", (10, 20, 300, 400)))

    def length(objects: Sequence[GroundTruthObject]) -> int:
        text = answers.write(objects, "desc_first")
        return len(tokenizer.encode(text, add_special_tokens=False))

    return (length([box] * (1 + MORE)) - length([box])) / MORE
