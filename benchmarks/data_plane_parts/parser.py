"""`parse_rollout` with Qwen's own BPE, after a warm-up, against a plain scanner.

The peer decodes each id, tracks braces and strings by character, and calls `json.loads` on each
object. It does not check an object, find its description among the tokens, or cut the answer. It
must find the same keys and coordinates. Complete answers of 20 to 60 objects in both field orders.
Times are of the processor, not of the clock; of each side the best of several goes.
"""

import json
import random
import time
from collections.abc import Callable
from importlib.resources import files

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from benchmarks.command import Bench
from benchmarks.results import Result, median_of
from learner.stages.formats.coord_json import parse_rollout, serialize_objects
from learner.stages.tokens import COORD_BINS, IM_END, CoordVocab, coord_token, decode_exactly
from learner.types import FieldOrder, GroundTruthObject, Shape

ANSWERS = 10
TRIES = 5
DESCRIPTIONS = (
    *("cat", "person", "traffic light", "person in a red jacket", "stop sign", "bicycle"),
    *("a man's left hand", 'box labelled "fragile"', "half-open door (white)", "出租车", "café 🚕"),
)

Objects = list[tuple[str, list[int]]]
Decode = Callable[[int], str]


def measure(bench: Bench) -> list[Result]:
    """Each round draws answers of its own."""
    tokenizer = qwen_tokenizer()
    vocab = CoordVocab.from_tokenizer(tokenizer)

    def decode(token_id: int) -> str:
        return decode_exactly(tokenizer, [token_id])

    ours, peers = [], []
    for round_ in range(bench.rounds):
        answers = _answers(tokenizer, round_)
        for ids in answers:
            found = [(found.key, found.coords) for found in parse_rollout(ids, tokenizer).objects]
            assert found == _scan_plainly(ids, decode, vocab), "the peer found other objects"
        ours.append(1 / _seconds_per_token(lambda ids: parse_rollout(ids, tokenizer), answers))
        peers.append(1 / _seconds_per_token(lambda ids: _scan_plainly(ids, decode, vocab), answers))
    ratios = [a / b for a, b in zip(ours, peers, strict=True)]
    both = f"{max(ours):,.0f} and {max(peers):,.0f} tokens/s"
    return [
        median_of("parser, complete answers", ours, 500_000, True, " tokens/s"),
        median_of("parser over a plain scanner decoding each id", ratios, 3, True, detail=both),
    ]


# ---- answers -------------------------------------------------------------------------


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's BPE ranks, as the SDK `dashscope` ships them, with the coordinate tokens added."""
    ranks = files("dashscope") / "resources" / "qwen.tiktoken"
    tokenizer = TikTokenConverter(str(ranks), extra_special_tokens=[IM_END]).converted()
    tokenizer.add_tokens([coord_token(k) for k in range(COORD_BINS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END)


def _answers(tokenizer: PreTrainedTokenizerFast, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [_answer(tokenizer, rng.randrange(20, 61), rng) for _ in range(ANSWERS)]


def _answer(tokenizer: PreTrainedTokenizerFast, n_objects: int, rng: random.Random) -> list[int]:
    objects = []
    for _ in range(n_objects):
        (x1, x2), (y1, y2) = (sorted(rng.randrange(COORD_BINS) for _ in range(2)) for _ in "xy")
        objects.append(
            GroundTruthObject(rng.choice(DESCRIPTIONS), Shape("bbox_2d", (x1, y1, x2, y2)))
        )
    order: FieldOrder = "desc_first" if rng.randrange(2) else "geometry_first"
    ids: list[int] = tokenizer.encode(serialize_objects(objects, order), add_special_tokens=False)
    return ids


# ---- the peer ------------------------------------------------------------------------


def _scan_plainly(ids: list[int], decode: Decode, vocab: CoordVocab) -> Objects:
    """Key and coordinates of each object, character by character."""
    objects: Objects = []
    depth = 0
    in_string = escaped = False
    key: list[str] = []
    value: list[str] = []
    first = 0
    for position, token_id in enumerate(ids):
        for char in decode(token_id):
            if depth > 1:
                value.append(char)
            if in_string:
                if escaped:
                    escaped = False
                elif char == "\\":
                    escaped = True
                elif char == '"':
                    in_string = False
                elif depth == 1:
                    key.append(char)
            elif char == '"':
                in_string = True
                if depth == 1:
                    key = []
            elif char == "{":
                depth += 1
                if depth == 2:
                    value, first = ["{"], position
            elif char == "}":
                depth -= 1
                if depth == 1:
                    found = vocab.bins.get
                    bins = [found(token) for token in ids[first : position + 1]]
                    if "bbox_2d" in json.loads("".join(value)):
                        objects.append(("".join(key), [k for k in bins if k is not None]))
    return objects


def _seconds_per_token(work: Callable[[list[int]], object], answers: list[list[int]]) -> float:
    """Seconds per token of the best try, after one that does not count."""
    best = float("inf")
    for _ in range(TRIES + 1):
        start = time.process_time()
        for ids in answers:
            work(ids)
        best = min(best, time.process_time() - start)
    return best / sum(map(len, answers))
