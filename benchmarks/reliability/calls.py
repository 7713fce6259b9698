"""A hundred thousand generated calls of two real servers, one of them with the repeat guard on.

    .venv/bin/python -m benchmarks.reliability.calls [--calls N] [--seed N]

Three kinds, mixed by chance: schemathesis makes calls of every POST operation from the OpenAPI
document, half of them against it; hypothesis makes valid bodies of `/infer/`, with images, seeds
and all that sampling can be told; and between them every GET is asked. Each answer must be one
that the document declares, with the body it declares, and a 5xx only where a learner is missing
(see `tests/contract/openapi_calls.py`); a valid body must be answered with 200. By the end, each
server must be READY, give the same greedy tokens as before, and hold no more than after half of
the calls.

Prints the tables of docs/reliability.md; ends with code 1 when something did not hold.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode

from benchmarks.checkpoint import make_checkpoint
from benchmarks.reliability.infer_bodies import infer_bodies
from benchmarks.reliability.samples import Held, held_by
from benchmarks.reliability.servers import (
    ANSWER_S,
    GUARD,
    SETTLE_S,
    START_S,
    greedy_tokens,
    start_server,
)
from benchmarks.reliability.tables import held_table
from learner.rollout.server_process import ServerProcess
from tests.contract.openapi_calls import CHECKS, DOCUMENT, made_short, schema

# As many examples as hypothesis makes from one seed, with a call and a probe in each.
EXAMPLES = 500
# What is held is compared with what was after so much of the calls: an engine takes memory, in
# steps, for as long as it meets new sizes of pictures and prompts.
WARM_UP = 1 / 2
LEAST = 10_000
MOST_TOLD = 20

INFER = "POST /infer/"
VALID = "POST /infer/, valid"
# Shares of the calls. Generating a call of `/infer/` from the document takes 60 ms of one core.
SHARES = {
    INFER: 2,
    VALID: 3,
    "POST /init_communicator/": 1,
    "POST /start_weight_update/": 4,
    "POST /update_weights/": 3,
    "POST /finish_weight_update/": 3,
    "POST /load_adapter/": 1,
    "POST /close_communicator/": 2,
}


@dataclass
class Found:
    """answers: by operation and status. faults: what did not hold, in words."""

    name: str
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    held: list[dict[str, Held]] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """Calls of one server."""

    def __init__(self, server: ServerProcess, media: Path, found: Found) -> None:
        self._server = server
        self._found = found
        self._http = requests.Session()
        self._http.trust_env = False
        operations = {
            found.label: found
            for path, methods in DOCUMENT["paths"].items()
            for found in (schema[path][method.upper()] for method in methods)
        }
        self._infer = operations[INFER]
        self._probes = [op for label, op in operations.items() if label.startswith("GET")]
        strategies: dict[str, st.SearchStrategy[Any]] = {
            label: st.one_of([op.as_strategy(generation_mode=mode) for mode in GenerationMode])
            for label, op in operations.items()
            if label in SHARES
        }
        strategies[VALID] = infer_bodies(media)
        names = [name for name, share in SHARES.items() for _ in range(share)]
        self._calls = st.sampled_from(names).flatmap(
            lambda name: st.tuples(st.just(name), strategies[name])
        )

    def run(self, calls: int, first_seed: int) -> None:
        """At least so many calls."""
        began = time.monotonic()
        before = greedy_tokens(self._server.base_url)
        number = first_seed
        while (made := self._found.answers.total()) < calls:
            if not self._found.held and made >= WARM_UP * calls:
                self._found.held.append(self._held())
            seed(number)(self._examples())()
            number += 1
            print(
                f"{self._found.name}: {made:,} calls in {time.monotonic() - began:.0f} s",
                flush=True,
            )
        self._found.held.append(self._held())
        self._found.seconds = time.monotonic() - began
        if greedy_tokens(self._server.base_url) != before:
            self._fault("greedy tokens differ from those of the beginning")
        health = self._http.get(self._server.base_url + "/health/", timeout=ANSWER_S).json()
        if health.get("state") != "READY":
            self._fault(f"/health/ says {health}")

    def _examples(self) -> Callable[[], None]:
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(call=self._calls, again=st.booleans(), probe=st.sampled_from(self._probes))
        def example(call: tuple[str, Any], again: bool, probe: Any) -> None:
            name, made = call
            if name == VALID:
                self._check_valid(made, again)
            else:
                made.body = made_short(made.body)
                self._check(name, made)
            self._check(probe.label, probe.Case())

        return example

    def _check_valid(self, body: dict[str, Any], again: bool) -> None:
        """again: the call has an id, and comes twice."""
        id_of_call = {"request_id": f"call-{self._found.answers.total()}"} if again else {}
        case = self._infer.Case(body=body | id_of_call, media_type="application/json")
        tries = [self._check(VALID, case) for _ in range(1 + again)]
        answers = [answer for answer in tries if answer is not None]
        for answer in answers:
            if answer.status_code != 200:
                self._fault(f"{VALID}: {answer.status_code} {answer.text[:500]} to {body}")
            if answer.content != answers[0].content:
                self._fault(f"{VALID}: another answer the second time to {body}")

    def _check(self, name: str, case: Case[Any]) -> Any:
        """Make the call and hold its answer against the document."""
        try:
            answer = case.call(self._server.base_url, session=self._http, timeout=ANSWER_S)
            self._found.answers[name, answer.status_code] += 1
            case.validate_response(answer, CHECKS)
        except (AssertionError, FailureGroup, requests.RequestException) as error:
            parts = error.exceptions if isinstance(error, FailureGroup) else [error]
            self._fault(f"{name}: {' '.join(map(repr, parts))} to {case.as_curl_command()}")
            return None
        return answer

    def _fault(self, text: str) -> None:
        self._found.faults.append(f"{self._found.name}: {text}"[:2000])
        print("fault:", self._found.faults[-1], file=sys.stderr, flush=True)

    def _held(self) -> dict[str, Held]:
        time.sleep(SETTLE_S)
        return held_by(self._server.pid, f"{self._found.name}: server")


def campaign(name: str, guarded: bool, checkpoint: Path, calls: int, first_seed: int) -> Found:
    """Start a server of its own and call it."""
    found = Found(name)
    with tempfile.TemporaryDirectory() as folder:
        media = Path(folder) / "media"
        media.mkdir()
        more: dict[str, Any] = {"repeat_terminate": GUARD.model_dump()} if guarded else {}
        more |= {"allowed_media_dirs": [str(media)]}
        with start_server("server", checkpoint, Path(folder), **more) as server:
            server.wait_until_healthy(START_S)
            print(f"{name}: the calls begin", flush=True)
            Campaign(server, media, found).run(calls, first_seed)
    return found


def tell(found: list[Found]) -> int:
    """Print all of it; 1 when something did not hold."""
    answers: Counter[tuple[str, int]] = sum((f.answers for f in found), Counter())
    print("\n| operation | calls | by status |\n|---|---|---|")
    for name in sorted({name for name, _ in answers}):
        by_status = {status: n for (op, status), n in sorted(answers.items()) if op == name}
        told = ", ".join(f"{status}: {n:,}" for status, n in by_status.items())
        print(f"| `{name}` | {sum(by_status.values()):,} | {told} |")
    print(f"| all | {answers.total():,} | in {max(f.seconds for f in found):.0f} s |")
    faults = [fault for one in found for fault in one.faults]
    for one in found:
        before, after = one.held
        print("\n" + held_table(before, after, faults))
    print("\n".join(["", f"{len(faults)} faults", *faults[:MOST_TOLD]]))
    return int(bool(faults))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.calls < LEAST:
        parser.error(f"--calls: at least {LEAST:,}, or nothing is compared")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder))
        half = -(-options.calls // 2)
        jobs = [
            ("guard off", False, checkpoint, half, options.seed),
            ("guard on", True, checkpoint, half, options.seed + 1_000_000),
        ]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            found = pool.starmap(campaign, jobs)
    sys.exit(tell(found))


if __name__ == "__main__":
    main()
