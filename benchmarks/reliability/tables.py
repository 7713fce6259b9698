"""What came of a run under load, as the tables of docs/reliability.md."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.reliability.samples import Held, Sample, growth, percentile

MOST_GROWTH_PERCENT = 2.0
MEMORY = ("rss_mib", "pss_mib")
COUNTED = ("threads", "sockets", "other_files")


@dataclass(frozen=True)
class Outcome:
    """quiet: what was held without any call, after the warm-up and at the end.

    health: statuses of `/health/` at the end. same_answers: greedy answers after the first weights
    were pushed again, as at the beginning.
    """

    counts: dict[str, int]
    wrong: list[str]
    push_seconds: list[float]
    quiet: tuple[dict[str, Held], dict[str, Held]]
    health: dict[str, int]
    same_answers: bool

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, found: dict[str, Any]) -> "Outcome":
        quiet = [{name: Held(**has) for name, has in look.items()} for look in found["quiet"]]
        return cls(**found | {"quiet": tuple(quiet)})


def tell(samples: Sequence[Sample], outcome: Outcome) -> int:
    """Print all of it; 1 when something was wrong."""
    faults = list(outcome.wrong)
    print("| calls | |\n|---|---|")
    for kind, number in sorted(outcome.counts.items()):
        print(f"| {kind} | {number:,} |")
    print("\n" + _growth_table(samples, faults))
    print("\n" + held_table(*outcome.quiet, faults))
    print("\n" + _latency_table(samples))
    pushed = outcome.push_seconds
    print(
        f"\n{len(pushed)} pushes to both servers, median {statistics.median(pushed):.2f} s, "
        f"longest {max(pushed):.2f} s; looks at `/health/` that did not say 200: "
        f"{sum(status != 200 for s in samples for status in s.health.values())} "
        f"of {sum(len(s.health) for s in samples)}; at the end {outcome.health}; "
        f"the first weights answer as at the beginning: {outcome.same_answers}"
    )
    if not outcome.same_answers or set(outcome.health.values()) != {200}:
        faults.append("not the server of the beginning")
    print("\n".join(["", "faults:", *faults]) if faults else "\nno faults")
    return int(bool(faults))


def _growth_table(samples: Sequence[Sample], faults: list[str]) -> str:
    """Medians of the first and the last ten minutes of an hour, after its warm-up.

    What is shared with others counts for more in PSS as they end, so that RSS alone is judged.
    """
    rows = [
        "| process | RSS | RSS, line | PSS | PSS, line | threads | sockets | other files |",
        "|---|---|---|---|---|---|---|---|",
    ]
    times = [sample.seconds for sample in samples]
    for name in samples[-1].held:
        cells = []
        for field in MEMORY:
            grown = growth(times, [getattr(s.held[name], field) for s in samples])
            cells += [
                f"{grown.first:.1f} -> {grown.last:.1f} MiB, {grown.medians_percent:+.2f} %",
                f"{grown.slope_percent:+.2f} %",
            ]
            most = max(grown.medians_percent, grown.slope_percent)
            if field == "rss_mib" and most > MOST_GROWTH_PERCENT:
                faults.append(f"{name} grew by {most:.2f} %")
        for field in COUNTED:
            grown = growth(times, [getattr(s.held[name], field) for s in samples])
            cells.append(f"{grown.first:g} -> {grown.last:g}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def held_table(before: dict[str, Held], after: dict[str, Held], faults: list[str]) -> str:
    """What was held without any call, twice; `faults` gets what is more the second time."""
    rows = ["| process | RSS | threads | sockets | other files |", "|---|---|---|---|---|"]
    for name in before | after:
        if name not in before or name not in after:
            faults.append(f"{name} was there only once")
            continue
        was, now = before[name], after[name]
        grown = 100 * (now.rss_mib / was.rss_mib - 1)
        counted = [(getattr(was, field), getattr(now, field)) for field in COUNTED]
        told = " | ".join(f"{old} -> {new}" for old, new in counted)
        rows.append(
            f"| {name} | {was.rss_mib:.1f} -> {now.rss_mib:.1f} MiB, {grown:+.2f} % | {told} |"
        )
        if grown > MOST_GROWTH_PERCENT:
            faults.append(f"{name} grew by {grown:.2f} %")
        faults += [
            f"{name} has more {field}: {old} -> {new}"
            for field, (old, new) in zip(COUNTED, counted, strict=True)
            if new > old
        ]
    return "\n".join(rows)


def _latency_table(samples: Sequence[Sample]) -> str:
    rows = ["| answers | p50 | p99 | longest | number |", "|---|---|---|---|---|"]
    for name, field in (("`GET /live/`", "live_ms"), ("`POST /infer/`", "infer_ms")):
        values = [value for sample in samples for value in getattr(sample, field)]
        rows.append(
            f"| {name} | {percentile(values, 50):.1f} ms | {percentile(values, 99):.1f} ms "
            f"| {max(values):.0f} ms | {len(values):,} |"
        )
    return "\n".join(rows)
