"""Rollout servers whose engines take a fixed time: what remains is what the learner makes of it.

    python -m benchmarks.peers.fixed_servers SERVERS SECONDS SIGMA SEQUENCES PROMPT_TOKENS \
        ANSWER_TOKENS

Prints the base URLs as a line of JSON. An engine decodes at most SEQUENCES at once, each of them in
`answer_s` seconds; a call waits until there is a place for all of its sequences.
Every answer has the weights version that the call expects.
"""

import json
import math
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.processes import end_with_benchmark
from shared_contracts.infer import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    RolloutEnvelope,
    RolloutStamp,
    Usage,
)
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info, Live, RepeatTerminateStatus, WorldSize

EPOCH = "fixed"
_VERSION = 987654321  # stands in the prepared answer where the version goes


def envelope(prompt_tokens: int, answer_tokens: int) -> str:
    """One element of an answer, as JSON; prepared once, so that a server costs next to nothing."""
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=answer_tokens,
        total_tokens=prompt_tokens + answer_tokens,
    )
    choice = Choice(
        index=0,
        message=ChatMessage(content="x" * 4 * answer_tokens),
        finish_reason="stop",
        token_ids=list(range(answer_tokens)),
    )
    response = ChatCompletionResponse(
        model="fixed",
        choices=[choice],
        usage=usage,
        id="r",
        created=0,
        prompt_token_ids=list(range(prompt_tokens)),
    )
    stamp = RolloutStamp(
        repeat_terminate_triggered=0,
        repeat_terminated_choices=[],
        weights_version=(_VERSION, _VERSION),
        server_epoch=EPOCH,
        seed=None,
        finish="stop",
    )
    return RolloutEnvelope(response=response, coordexp=stamp).model_dump_json()


def info() -> Info:
    return Info(
        model="fixed",
        world_size=1,
        replicas=[],
        max_model_len=2**16,
        max_num_seqs=2**16,
        enable_lora=False,
        weights_state="READY",
        weights_version=0,
        weight_transport="gloo",
        server_epoch=EPOCH,
        repeat_terminate=RepeatTerminateStatus(active=False, config=RepeatTerminateConfig()),
        versions={"rollmatch": "0"},
    )


def answer_s(uuid: str, seconds: float, sigma: float) -> float:
    """Return the seconds of an answer: lognormal around `seconds`, the same for each uuid."""
    return seconds * math.exp(sigma * random.Random(uuid).gauss())


class FixedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, seconds: float, sigma: float, sequences: int, one: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = threading.Condition()
        self.free = sequences
        self.seconds = seconds
        self.sigma = sigma
        self.one = one
        self.told = {
            "/live/": Live(server_epoch=EPOCH, heartbeat_age_s=[0.0]).model_dump_json(),
            "/get_world_size/": WorldSize(world_size=1).model_dump_json(),
            "/info/": info().model_dump_json(),
        }

    def answer(self, call: dict[str, Any]) -> str:
        count = len(call["infer_requests"])
        longest = max(
            answer_s(request["uuid"], self.seconds, self.sigma)
            for request in call["infer_requests"]
        )
        with self.engine:
            self.engine.wait_for(lambda: self.free >= count)
            self.free -= count
        time.sleep(longest)
        with self.engine:
            self.free += count
            self.engine.notify_all()
        one = self.one.replace(str(_VERSION), str(call.get("expected_weights_version") or 0))
        return f"[{','.join([one] * count)}]"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FixedServer

    def do_GET(self) -> None:
        self._send(self.server.told[self.path])

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self._send(self.server.answer(json.loads(self.rfile.read(length))))

    def _send(self, body: str) -> None:
        content = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing of every call."""


def main() -> None:
    count, seconds, sigma, sequences, prompt_tokens, answer_tokens = sys.argv[1:]
    end_with_benchmark()
    one = envelope(int(prompt_tokens), int(answer_tokens))
    servers = [
        FixedServer(float(seconds), float(sigma), int(sequences), one) for _ in range(int(count))
    ]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps([f"http://127.0.0.1:{s.server_port}" for s in servers]), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
