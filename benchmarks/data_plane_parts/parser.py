"""`parse_rollout` with Qwen's own BPE, after a warm-up, against plain scanners.

    decoding each id    the peer a reader of the rules writes first: `tokenizer.decode([id])`, its
                        characters one by one, braces and strings tracked, `json.loads` of an object
    remembering pieces  the milder peer: the same with each id decoded once and for all

Neither peer checks an object, finds its description among the tokens, or cuts the answer; they
must find the same keys and coordinates. Complete answers of 20 to 60 objects in both field
orders. Times are of the processor, not of the clock; of each side the best of several goes.
"""

import json
import random
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from benchmarks.results import Result, median_of
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.formats.coord_json import parse_rollout, serialize_objects
from learner.stages.tokens import IM_END, CoordVocab, decode_exactly
from learner.types import FieldOrder, GroundTruthObject, Shape

ANSWERS = 10
TRIES = 5
DESCRIPTIONS = (
    *("cat", "person", "traffic light", "person in a red jacket", "stop sign", "bicycle"),
    *("a man's left hand", 'box labelled "fragile"', "half-open door (white)", "出租车", "café 🚕"),
)

Objects = list[tuple[str, list[int]]]
Decode = Callable[[int], str]


class UnequalObjects(Exception):
    """A peer found other keys or coordinates."""


def measure(rounds: int) -> list[Result]:
    """Each round draws answers of its own."""
    tokenizer = qwen_tokenizer()
    return [
        *_speed(tokenizer, rounds),
        _linearity(tokenizer, rounds),
        *(_hostile(name, tokenizer, rounds) for name in HOSTILE),
    ]


def _speed(tokenizer: PreTrainedTokenizerFast, rounds: int) -> list[Result]:
    vocab = CoordVocab.from_tokenizer(tokenizer)

    def decode(token_id: int) -> str:
        return decode_exactly(tokenizer, [token_id])

    remember = cache(decode)
    rates: dict[str, list[float]] = {"ours": [], "decoding": [], "remembering": []}
    for round_ in range(rounds):
        answers = _answers(tokenizer, round_)
        for ids in answers:
            _compare(ids, tokenizer, vocab, remember)
        sides = {
            "ours": lambda ids: parse_rollout(ids, tokenizer),
            "decoding": lambda ids: _scan_plainly(ids, decode, vocab),
            "remembering": lambda ids: _scan_plainly(ids, remember, vocab),
        }
        for name, side in sides.items():
            rates[name].append(1 / _seconds_per_token(side, answers))
    ours, decoding, remembering = rates["ours"], rates["decoding"], rates["remembering"]
    both = "{:,.0f} and {:,.0f} tokens/s".format
    return [
        median_of("parser, complete answers", ours, 500_000, True, " tokens/s"),
        _ratio("parser over a plain scanner decoding each id", ours, decoding, 3, both),
        _ratio("parser over a plain scanner remembering pieces", ours, remembering, 0.5, both),
    ]


def _ratio(
    name: str, ours: list[float], theirs: list[float], goal: float, both: Callable[..., str]
) -> Result:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median_of(name, ratios, goal, True, detail=both(max(ours), max(theirs)))


def _linearity(tokenizer: PreTrainedTokenizerFast, rounds: int) -> Result:
    def work(ids: list[int]) -> object:
        return parse_rollout(ids, tokenizer)

    ratios = []
    for round_ in range(rounds):
        rng = random.Random(round_)
        long = [_answer(tokenizer, 520, rng)]
        short = [_answer(tokenizer, 33, rng) for _ in range(ANSWERS)]
        ratios.append(_seconds_per_token(work, long) / _seconds_per_token(work, short))
    return median_of("parser, a token of 16k over one of 1k", ratios, 1.2, False)


# ---- hostile answers -----------------------------------------------------------------

# What comes once, and what comes again and again; None for tokens from all of the vocabulary.
HOSTILE: dict[str, tuple[str, str | None]] = {
    "garbage": ("{", None),
    "one endless string": ('{"object_1": {"desc": "', 'a \\" cat '),
    "deep nesting": ('{"object_1": ', '{"a": ['),
    "objects that are no JSON": ("{", '"object_1": {"desc": "cat",, "bbox_2d": []}, '),
    "commas": ("{", ", "),
}


def _hostile(name: str, tokenizer: PreTrainedTokenizerFast, rounds: int) -> Result:
    start, again = HOSTILE[name]
    ratios = []
    for round_ in range(rounds):
        ids = tokenizer.encode(start)
        if again is None:
            rng = random.Random(round_)
            ids += [rng.randrange(len(tokenizer)) for _ in range(16_000)]
        else:
            repeated = tokenizer.encode(again)
            ids += repeated * (16_000 // len(repeated))
        hostile = _seconds_per_token(lambda ids: parse_rollout(ids, tokenizer), [ids])
        answers = _answers(tokenizer, round_)
        ordinary = _seconds_per_token(lambda ids: parse_rollout(ids, tokenizer), answers)
        ratios.append(hostile / ordinary)
    return median_of(f"parser, a token of {name} over an ordinary one", ratios, 2, False)


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


def _compare(
    ids: list[int], tokenizer: PreTrainedTokenizerFast, vocab: CoordVocab, decode: Decode
) -> None:
    ours = [(found.key, found.coords) for found in parse_rollout(ids, tokenizer).objects]
    theirs = _scan_plainly(ids, decode, vocab)
    if ours != theirs:
        raise UnequalObjects(f"{len(ours)} and {len(theirs)} objects")


def _seconds_per_token(work: Callable[[list[int]], object], answers: list[list[int]]) -> float:
    """Of the best try, after one that does not count."""
    best = float("inf")
    for _ in range(TRIES + 1):
        start = time.process_time()
        for ids in answers:
            work(ids)
        best = min(best, time.process_time() - start)
    return best / sum(map(len, answers))
