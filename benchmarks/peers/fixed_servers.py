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
from shared_contracts.server_info import WorldSize
from tests.unit.scripted_server import envelope, info, live

_VERSION = '"weights_version":[1,1]'


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
        self.answers = {
            "/live/": live().model_dump_json(),
            "/get_world_size/": WorldSize(world_size=1).model_dump_json(),
            "/info/": info(max_num_seqs=2**16, max_model_len=2**16).model_dump_json(),
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
        version = call.get("expected_weights_version") or 0
        one = self.one.replace(_VERSION, f'"weights_version":[{version},{version}]')
        return f"[{','.join([one] * count)}]"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FixedServer

    def do_GET(self) -> None:
        self._send(self.server.answers[self.path])

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
    prompt, answer = list(range(int(prompt_tokens))), list(range(int(answer_tokens)))
    one = envelope(answer, prompt, text="x" * 4 * len(answer)).model_dump_json()
    servers = [
        FixedServer(float(seconds), float(sigma), int(sequences), one) for _ in range(int(count))
    ]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps([f"http://127.0.0.1:{s.server_port}" for s in servers]), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
