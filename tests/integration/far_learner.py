"""A learner on another host, for tests of the network between it and its server.

    python -m tests.integration.far_learner URL GROUP_PORT CHECKPOINT

For every line on stdin it does one thing and prints a line of JSON:

    connect    form the weight group                     {"connected": weights version}
    push       push the checkpoint's weights             {"pushed": version}
    push half  the same; prints {"half": true} in the middle of the transfer and goes on
               with the next line
    ask        greedy answers of some prompts            {"answers": [token ids]}

Meanwhile a call that fails prints {"failed": reason}, a server that is lost {"lost": reason};
what ends with an error, {"error": message}.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from learner.data.jsonl import build_request
from learner.rollout.backend import Call, Journal
from learner.rollout.client import RolloutClient
from learner.rollout.server import ServerBackend
from learner.rollout.sync.push import PhaseTimeouts, WeightPusher
from learner.rollout.sync.weights import MergedWeights, OneSource
from learner.types import Sample
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig
from shared_contracts.weights import DtypeName
from tests.contract.running_server import PROMPT

GROUP_S = 2.0
# What the learner has for a phase in which the server has `GROUP_S`.
PHASE_S = 7.0
# How long servers are waited for.
TIMEOUT_S = 30.0
LIVE_INTERVAL_S = 0.2
PROMPTS = 8
MAX_TOKENS = 400


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class SayingJournal(Journal):
    def call(self, call: Call) -> None:
        super().call(call)
        if call.outcome != "answered":
            say(failed=call.outcome)

    def lost(self, server: str, reason: str) -> None:
        super().lost(server, reason)
        say(lost=reason)


class HalvableWeights(MergedWeights):
    """Stops half way, once, when `stop` is set."""

    stop = False

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        middle = len(self.metadata(dtype)) // 2
        for number, named in enumerate(super().tensors(dtype)):
            if self.stop and number == middle:
                self.stop = False
                say(half=True)
                sys.stdin.readline()
            yield named


class FarLearner:
    def __init__(self, url: str, group_port: int, checkpoint: Path) -> None:
        client = RolloutClient(url, TIMEOUT_S, live_interval_s=LIVE_INTERVAL_S)
        client.wait_until_pushable()
        self.weights = HalvableWeights(Qwen3VLForConditionalGeneration.from_pretrained(checkpoint))
        timeouts = PhaseTimeouts(GROUP_S, GROUP_S, PHASE_S, PHASE_S, PHASE_S, PHASE_S)
        pusher = WeightPusher(
            client, group_port, OneSource(self.weights), "gloo", 2**16, "sample", timeouts
        )
        self.backend = ServerBackend([client], [pusher], PROMPTS, SayingJournal())
        self.version = 0

    def do(self, wanted: str) -> None:
        match wanted:
            case "connect":
                self.version = self.backend.connect()
                say(connected=self.version)
            case "push" | "push half":
                self.weights.stop = wanted == "push half"
                self.version += 1
                self.backend.push_weights(self.version)
                say(pushed=self.version)
            case "ask":
                say(answers=self.answers())

    def answers(self) -> list[list[int]]:
        samples = [Sample(str(number), (), 64, 64, ()) for number in range(PROMPTS)]
        requests = [build_request(s, f"{PROMPT} {s.sample_id}", None) for s in samples]
        config = RequestConfig(max_tokens=MAX_TOKENS, temperature=0.0, return_details=True)
        outputs = self.backend.rollout(requests, config)
        held = (self.version, self.version)
        assert {output.weights_version for output in outputs} == {held}
        return [output.response_token_ids for output in outputs]


def main() -> None:
    url, group_port, checkpoint = sys.argv[1:]
    learner = FarLearner(url, int(group_port), Path(checkpoint))
    while wanted := sys.stdin.readline().strip():
        try:
            learner.do(wanted)
        except RunError as error:
            say(error=str(error))
    learner.backend.close()


if __name__ == "__main__":
    main()
