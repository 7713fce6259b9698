"""Tokens per second of `/infer/` over a peer's, round by round: ours, peer; peer, ours; ..."""

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.processes import Peer
from benchmarks.results import Result, median_of
from benchmarks.workload import ANSWER_TOKENS, Scene, infer_call, make_scenes, openai_messages

REQUESTS = 64


class UnequalWork(Exception):
    """A side did not generate, or was not prompted with, what the comparison is about."""


@dataclass(frozen=True)
class Work:
    """Figures of one side and one batch. prompt_tokens, tokens: over all requests."""

    seconds: float
    prompt_tokens: int
    tokens: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Side = Callable[[list[Scene]], Work]


def compare(
    name: str,
    sides: tuple[Side, Side],
    rounds: int,
    goal: float,
    with_image: bool,
    same_template: bool = True,
) -> Result:
    """Ratio of the rates in `rounds` rounds of new prompts, after one that does not count.

    sides: ours, the peer's.
    same_template: whether both must count the same prompt tokens.
    """
    pairs = []
    for number in range(rounds + 1):
        scenes = make_scenes(number, REQUESTS, with_image)
        pair = _one_round(sides, scenes, ours_first=number % 2 == 0)
        _check(name, pair, same_template)
        print(f"{name}: {pair[0].rate:.0f} / {pair[1].rate:.0f} tokens/s", flush=True)
        pairs.append(pair)
    counted = pairs[1:]
    medians = [statistics.median(work.rate for work in side) for side in zip(*counted, strict=True)]
    return median_of(
        name,
        [a.rate / b.rate for a, b in counted],
        goal,
        at_least=True,
        detail=f"{medians[0]:.0f} and {medians[1]:.0f} tokens/s, {rounds} rounds",
    )


def _one_round(
    sides: tuple[Side, Side], scenes: list[Scene], ours_first: bool
) -> tuple[Work, Work]:
    if ours_first:
        ours = sides[0](scenes)
        return ours, sides[1](scenes)
    peer = sides[1](scenes)
    return sides[0](scenes), peer


def _check(name: str, pair: tuple[Work, Work], same_template: bool) -> None:
    expected = REQUESTS * ANSWER_TOKENS
    if any(work.tokens != expected for work in pair):
        raise UnequalWork(f"{name}: {[w.tokens for w in pair]} tokens instead of {expected}")
    if same_template and pair[0].prompt_tokens != pair[1].prompt_tokens:
        raise UnequalWork(f"{name}: prompts of {[w.prompt_tokens for w in pair]} tokens")


def rollout_side(base_url: str, calls: int = 1) -> Side:
    """The batch as `calls` concurrent `POST /infer/`, to our server or ms-swift's."""
    http = httpx.Client(base_url=base_url, timeout=600, trust_env=False)
    threads = ThreadPoolExecutor(calls)

    def post(body: dict[str, Any]) -> Any:
        return http.post("/infer/", json=body).raise_for_status().json()

    def run(scenes: list[Scene]) -> Work:
        size = len(scenes) // calls
        bodies = [infer_call(scenes[i : i + size]) for i in range(0, len(scenes), size)]
        began = time.perf_counter()
        answers = list(threads.map(post, bodies))
        seconds = time.perf_counter() - began
        usages = [item["response"]["usage"] for items in answers for item in items]
        prompt_tokens, tokens = (
            sum(usage[kind] for usage in usages) for kind in ("prompt_tokens", "completion_tokens")
        )
        return Work(seconds, prompt_tokens, tokens)

    return run


def in_process_side(peer: Peer) -> Side:
    """The batch inside the peer, which measures itself."""

    def run(scenes: list[Scene]) -> Work:
        conversations = [openai_messages(scene) for scene in scenes]
        batch = {"conversations": conversations, "max_tokens": ANSWER_TOKENS}
        return Work(**json.loads(peer.ask(json.dumps(batch))))

    return run
