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


@dataclass(frozen=True)
class Case:
    """generated: tokens of each sequence so far. width: of the logits."""

    generated: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.generated // 1024}k tokens, {self.width:,} logits"


SHORT, LONG = CASES = (Case(1024, 151_936), Case(16 * 1024, 151_936))
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
    counted = [json.loads(peer.ask("round")) for _ in range(rounds + 1)][1:]
    shares = [
        median_of(
            f"guard, share of a {STEP_MS:g} ms step of {BATCH}, {case.name}",
            [100 * round_[case.name] / STEP_MS for round_ in counted],
            SHARE_GOAL_PERCENT,
            at_least=False,
            unit=" %",
        )
        for case in CASES
    ]
    ratios = [round_[LONG.name] / round_[SHORT.name] for round_ in counted]
    name = f"guard, step at {LONG.generated // 1024}k over {SHORT.generated // 1024}k tokens"
    return [*shares, median_of(name, ratios, FLAT_GOAL, at_least=False)]
