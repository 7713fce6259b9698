"""What became of the rollouts of a step, counted answer by answer (MET-02)."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import get_args

import numpy as np

from learner.metrics import Payload
from learner.rollout_log import Judged
from learner.types import DropReason

_B = "stage2_ab/channel_b"


@dataclass
class RolloutStats:
    """Counts over the rollouts of one step, and the length of each in tokens."""

    rollouts: int = 0
    truncated: int = 0
    invalid: int = 0
    closure_dropped: int = 0
    repeat_terminated: int = 0
    ground_truths: int = 0
    valid: int = 0
    matched: int = 0
    false_positives: int = 0
    gated: int = 0
    appended: int = 0
    drop_reasons: Counter[str] = field(default_factory=Counter)
    new_tokens: list[int] = field(default_factory=list)

    def add(self, judged: Judged) -> None:
        rollout, parsed, match, target = judged.rollout, judged.parsed, judged.match, judged.target
        self.rollouts += 1
        self.truncated += parsed.truncated
        self.invalid += parsed.invalid_rollout
        self.repeat_terminated += rollout.repeat_terminated
        self.ground_truths += len(match.pairs) + len(match.false_negatives)
        self.valid += len(parsed.objects)
        self.matched += len(match.pairs)
        self.false_positives += len(match.false_positives)
        self.gated += match.gated
        self.drop_reasons.update(reason for _, reason in parsed.dropped)
        self.new_tokens.append(len(rollout.response_token_ids))
        self.closure_dropped += target is None
        self.appended += len(target.fn_keys) if target is not None else 0

    def merge(self, other: "RolloutStats") -> None:
        """Take over what another part of the same step has counted."""
        for counted in fields(self):
            total = getattr(self, counted.name) + getattr(other, counted.name)
            setattr(self, counted.name, total)

    def payload(self) -> Payload:
        """The step's rollout metrics, every reason for a drop among them."""
        dropped = self.drop_reasons
        payload = Payload()
        payload.add(
            {
                "rollout/parse_dropped_invalid": dropped.total(),
                "rollout/repeat_terminate_triggered_sequences": self.repeat_terminated,
                f"{_B}/invalid_rollout": self.invalid,
                f"{_B}/N_valid_pred": self.valid,
                f"{_B}/N_drop_invalid": dropped.total(),
                f"{_B}/matched": self.matched,
                f"{_B}/false_positives": self.false_positives,
                f"{_B}/gated": self.gated,
                f"{_B}/fn_appended": self.appended,
                f"{_B}/closure_supervision/N_drop": self.closure_dropped,
            }
        )
        payload.add({f"{_B}/strict_drop/{why}": dropped[why] for why in get_args(DropReason)})
        payload.rate(
            {
                "rollout/parse_truncated_rate": (self.truncated, self.rollouts),
                "rollout/gen_new_tokens_mean": (sum(self.new_tokens), self.rollouts),
                f"{_B}/match_rate": (self.matched, self.ground_truths),
            }
        )
        p99 = float(np.percentile(self.new_tokens or [0], 99))
        payload.note({"rollout/gen_new_tokens_p99": p99})
        return payload
