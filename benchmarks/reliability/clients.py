"""Clients of a server for an hour.

Each is a thread that makes one call after another, of a kind drawn at random, and compares the
answer with the one that this kind must have. A client notes a wrong answer and goes on.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import httpx

from benchmarks.workload import infer_call, make_scenes

TIMEOUT_S = 120.0
LONGEST_PAUSE_S = 0.4
MAX_BODY_MIB = 2
TOO_LARGE = b" " * (MAX_BODY_MIB * 2**20 + 1)
JSON = {"content-type": "application/json"}
NO_VERSION = 10**9
LONG_TOKENS = 256
MOST_NOTED = 50


class Notes:
    """The calls of all clients: counts by kind, wrong answers, milliseconds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.infer_ms: list[float] = []
        self._lock = threading.Lock()

    def count(self, kind: str, wrong: str | None) -> None:
        with self._lock:
            self.counts[kind] += 1
            if wrong is not None:
                self.counts["wrong"] += 1
                self.wrong = [*self.wrong, f"{kind}: {wrong}"][:MOST_NOTED]


class Client(threading.Thread):
    """gate: calls are made while it is set. idle: set between calls while the gate is shut."""

    def __init__(self, base_url: str, seed: int, notes: Notes, gate: threading.Event) -> None:
        super().__init__(daemon=True)
        self.idle = threading.Event()
        self._base_url = base_url
        self._chance = random.Random(seed)
        self._notes = notes
        self._gate = gate
        self._number = 1_000_000 * seed
        self._kinds: dict[str, tuple[int, Callable[[], str | None]]] = {
            "answered": (50, self._answered),
            "sampled": (10, self._sampled),
            "asked twice": (8, self._asked_twice),
            "refused": (10, self._refused),
            "other weights": (6, self._other_weights),
            "hung up": (8, self._hung_up),
            "hung up, asked again": (4, self._hung_up_and_asked_again),
            "probed": (4, self._probed),
        }

    def run(self) -> None:
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        with httpx.Client(
            base_url=self._base_url, timeout=TIMEOUT_S, trust_env=False
        ) as self._http:
            while True:
                if not self._gate.is_set():
                    self.idle.set()
                    self._gate.wait()
                    self.idle.clear()
                (kind,) = self._chance.choices(names, weights)
                try:
                    wrong = self._kinds[kind][1]()
                except httpx.HTTPError as error:
                    wrong = repr(error)
                self._notes.count(kind, wrong)
                time.sleep(self._chance.uniform(0, LONGEST_PAUSE_S))

    # --- kinds of calls; each returns what was wrong with the answer

    def _answered(self) -> str | None:
        began = time.perf_counter()
        body = self._body(tokens=self._chance.choice([8, 16, 32, 64]))
        wrong = self._post(body)
        self._notes.infer_ms.append(1000 * (time.perf_counter() - began))
        return wrong

    def _sampled(self) -> str | None:
        config = {"temperature": 1.0, "seed": self._chance.randrange(2**31), "n": 2}
        body = self._body(tokens=16)
        body["request_config"] |= config
        return self._post(body)

    def _asked_twice(self) -> str | None:
        body = self._body(tokens=16) | {"request_id": self._request_id()}
        first = self._http.post("/infer/", json=body)
        again = self._http.post("/infer/", json=body)
        if (first.status_code, again.status_code) != (200, 200):
            return _told(again if first.status_code == 200 else first)
        return None if first.content == again.content else "another answer the second time"

    def _refused(self) -> str | None:
        bad: list[tuple[int, Callable[[], httpx.Response]]] = [
            (422, lambda: self._send(self._broken_image())),
            (422, lambda: self._send(self._body(tokens=8) | {"colour": "red"})),
            (
                400,
                lambda: self._http.post("/infer/", content=b'{"infer_requests": [', headers=JSON),
            ),
            (404, lambda: self._http.get("/nothing/")),
            (405, lambda: self._http.get("/infer/")),
            (409, lambda: self._http.post("/update_weights/", json={"attempt": "none"})),
            (413, lambda: self._http.post("/infer/", content=TOO_LARGE, headers=JSON)),
        ]
        status, call = self._chance.choice(bad)
        answer = call()
        return None if answer.status_code == status else f"not {status}, {_told(answer)}"

    def _other_weights(self) -> str | None:
        answer = self._send(self._body(tokens=8) | {"expected_weights_version": NO_VERSION})
        return None if answer.status_code == 409 else _told(answer)

    def _hung_up(self) -> str | None:
        self._hang_up(self._body(tokens=LONG_TOKENS))
        return None

    def _hung_up_and_asked_again(self) -> str | None:
        body = self._body(tokens=16) | {"request_id": self._request_id()}
        self._hang_up(body)
        return self._post(body)

    def _probed(self) -> str | None:
        for path in ("/health/", "/info/", "/metrics/", "/get_world_size/", "/openapi.json"):
            answer = self._http.get(path)
            if answer.status_code != 200:
                return _told(answer)
        return None

    # --- parts of them

    def _post(self, body: dict[str, Any]) -> str | None:
        answer = self._send(body)
        if answer.status_code != 200:
            return _told(answer)
        asked, config = len(body["infer_requests"]), body["request_config"]
        choices = [e["response"]["choices"] for e in answer.json()]
        if [len(found) for found in choices] != [config.get("n", 1)] * asked:
            return f"{asked} requests, and {answer.text[:200]}"
        return None

    def _send(self, body: dict[str, Any]) -> httpx.Response:
        return self._http.post("/infer/", json=body)

    def _hang_up(self, body: dict[str, Any]) -> None:
        """Close the connection in the middle of the call, if the answer has not come by then."""
        after_s = self._chance.uniform(0.02, 0.5)
        with suppress(httpx.TimeoutException):
            httpx.post(self._base_url + "/infer/", json=body, timeout=after_s, trust_env=False)

    def _body(self, tokens: int) -> dict[str, Any]:
        """One to four requests, about half of them with an image; none was asked before."""
        self._number += 1
        count = self._chance.randint(1, 4)
        pictures = self._chance.randint(0, count)
        scenes = make_scenes(self._number, pictures, with_image=True)
        scenes += make_scenes(self._number, count - pictures, with_image=False)
        return infer_call(scenes, tokens)

    def _broken_image(self) -> dict[str, Any]:
        body = self._body(tokens=8)
        body["infer_requests"][-1]["images"] = ["data:image/png;base64,bm8="]
        return body

    def _request_id(self) -> str:
        return UUID(int=self._chance.getrandbits(128)).hex


def _told(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.text[:300]}"
