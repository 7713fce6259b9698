"""What is known of one call: filled while it runs, by those who know.

It ends in the metrics (`telemetry`) and in the access log (`access_log`), so it never
holds a prompt, an image or a token of auth.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from rollout_server.stopwatch import timed
from shared_contracts.infer import RolloutEnvelope

# wait       for the end of a weight update
# prepare    images, chat template, tokens
# generate   from the first request handed to an engine to the last answer
Phase = Literal["wait", "prepare", "generate"]

# answered    200, generated for this call
# repeated    200, what was generated for an earlier call with the same request id
# refused     4xx
# failed      5xx
# gone        the client closed the connection
Outcome = Literal["answered", "repeated", "refused", "failed", "gone"]

# What a call ends with that nobody waits for any more; it is never sent.
CLIENT_GONE = 499


@dataclass
class CallRecord:
    """route: with its trailing slash; began: of `time.monotonic`.

    weights_version: (lowest, highest) the answers are stamped with.
    seconds: by phase. problem: the kind it was refused with.
    """

    route: str
    began: float = field(default_factory=time.monotonic)
    request_id: str | None = None
    requests: int = 0
    images: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    guard_triggers: int = 0
    weights_version: tuple[int, int] | None = None
    seconds: dict[Phase, float] = field(default_factory=dict)
    repeated: bool = False
    status: int = CLIENT_GONE
    problem: str | None = None

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Times a `with` block, also one that fails."""
        return timed(self.seconds, name)

    def add_answers(self, envelopes: Sequence[RolloutEnvelope]) -> None:
        stamps = [envelope.coordexp for envelope in envelopes]
        self.generated_tokens += sum(e.response.usage.completion_tokens for e in envelopes)
        self.guard_triggers += sum(len(stamp.repeat_terminated_choices) for stamp in stamps)
        if stamps:
            versions = [version for stamp in stamps for version in stamp.weights_version]
            self.weights_version = (min(versions), max(versions))

    @property
    def outcome(self) -> Outcome:
        if self.status == CLIENT_GONE:
            return "gone"
        if self.status < 400:
            return "repeated" if self.repeated else "answered"
        return "refused" if self.status < 500 else "failed"
