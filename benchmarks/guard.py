"""What the repeat guard adds to a decode step of 256 sequences, with all its rules on."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Peer
from benchmarks.results import Result, median_of
from benchmarks.workload import engine_settings
from rollout_server.settings.options import ServerSettings
from shared_contracts.repeat_guard import RepeatTerminateConfig

BATCH = 256
STEP_MS = 20.0
SHARE_GOAL_PERCENT = 1.0
FLAT_GOAL = 1.1

TOY_WIDTH = 1342
QWEN_WIDTH = 151_936


@dataclass(frozen=True)
class Case:
    """generated: tokens of each sequence so far. width: of the logits."""

    generated: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.generated // 1024}k tokens, {self.width:,} logits"


SHORT, LONG = Case(1024, QWEN_WIDTH), Case(16 * 1024, QWEN_WIDTH)
CASES = (SHORT, LONG, Case(1024, TOY_WIDTH), Case(16 * 1024, TOY_WIDTH))

RULES = RepeatTerminateConfig(
    enabled=True,
    max_consecutive_token_repeats=64,
    ngram_size=32,
    ngram_repeats=4,
    max_object_keys=100_000,
)


def guarded_settings(checkpoint: Path) -> ServerSettings:
    return engine_settings(checkpoint).model_copy(update={"repeat_terminate": RULES})


def guard_results(peer: Peer, rounds: int) -> list[Result]:
    """Shares of a 20 ms step, and how much more the longest sequences take."""
    found: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        peer.say("round")
        found.append(json.loads(peer.hear()))
    counted = found[1:]
    shares = [_share(case, [round_[case.name] for round_ in counted]) for case in CASES]
    ratios = [round_[LONG.name] / round_[SHORT.name] for round_ in counted]
    name = f"guard, step at {LONG.generated // 1024}k over {SHORT.generated // 1024}k tokens"
    return [*shares, median_of(name, ratios, FLAT_GOAL, at_least=False)]


def _share(case: Case, milliseconds: list[float]) -> Result:
    return median_of(
        f"guard, share of a {STEP_MS:g} ms step of {BATCH}, {case.name}",
        [100 * each / STEP_MS for each in milliseconds],
        SHARE_GOAL_PERCENT,
        at_least=False,
        unit=" %",
    )
