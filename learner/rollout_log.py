"""The answers of channel B and what became of each: `rollouts/step_000012.jsonl` (MET-03).

One line per sample. Other processes than the first write `step_000012.rank1.jsonl`. Steps are
counted from 0, as in `rollout_calls.jsonl`: step 12 is the line of `"step": 13` in
`metrics.jsonl`, where a step is counted when it is done. Imports no torch.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from learner.log_cut import ROLLOUTS
from learner.publish import publish_text
from learner.types import MatchResult, ParsedRollout, RolloutOutput, Sample

# So many equal ids in a row, as the placeholders of an image are, are written as [id, count].
_RUN = 4


class Judged(NamedTuple):
    """An answer, and what channel B made of it. supervised: it is trained on."""

    sample: Sample
    rollout: RolloutOutput
    parsed: ParsedRollout
    match: MatchResult
    supervised: bool


class RolloutLog:
    """Writes the answers of one process. folder: of the run."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder / ROLLOUTS
        self._rank = rank

    def write(self, step: int, judged: Sequence[Judged]) -> None:
        """All of a step at once; the file appears whole or not at all.

        Raises RunError when the disk is full.
        """
        self._folder.mkdir(exist_ok=True)
        of_rank = f".rank{self._rank}" if self._rank else ""
        records = [{"step": step, "rank": self._rank, **record_of(each)} for each in judged]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        publish_text(self._folder / f"step_{step:06d}{of_rank}.jsonl", "".join(lines))


def record_of(judged: Judged) -> dict[str, Any]:
    """What is logged of an answer, in values of JSON."""
    sample, rollout, parsed, match, supervised = judged
    return {
        "sample_id": sample.sample_id,
        "seed": rollout.seed,
        "weights_version": list(rollout.weights_version),
        "finish_reason": rollout.finish_reason,
        "repeat_terminated": rollout.repeat_terminated,
        "supervised": supervised,
        "parse": {
            "truncated": parsed.truncated,
            "invalid": parsed.invalid_rollout,
            "objects": [
                {"key": o.key, "kind": o.kind, "coords": o.coords, "desc": o.desc}
                for o in parsed.objects
            ],
            "dropped": [list(entry) for entry in parsed.dropped],
        },
        "match": {
            "pairs": [list(pair) for pair in match.pairs],
            "false_positives": list(match.false_positives),
            "false_negatives": list(match.false_negatives),
            "gated": match.gated,
        },
        "text": rollout.text,
        "prompt_token_ids": folded(rollout.prompt_token_ids),
        "response_token_ids": list(rollout.response_token_ids),
    }


def folded(ids: Iterable[int]) -> list[int | list[int]]:
    """Ids with `[id, count]` in place of a run of equal ones; `unfolded` is its inverse."""
    short: list[int | list[int]] = []
    for value, run in groupby(ids):
        count = sum(1 for _ in run)
        short += [[value, count]] if count >= _RUN else [value] * count
    return short


def unfolded(short: Iterable[int | list[int]]) -> list[int]:
    """The ids that `folded` was given."""
    ids: list[int] = []
    for item in short:
        ids += [item[0]] * item[1] if isinstance(item, list) else [item]
    return ids
