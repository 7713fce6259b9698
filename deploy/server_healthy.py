#!/usr/bin/env python3
"""Whether a rollout server can do its part of a run: server_healthy.py [BASE_URL]

A health check for containers, of the standard library alone; train_stage2.sh waits by it, too. It
exits with 0 when GET /health/ says 200, and also when the server lacks nothing but new weights: a
replica that was built again waits for the learner's next push, and a learner that waits for
/health/ first would never make it. Otherwise it prints what was found and exits with 1.
"""

import json
import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 5.0
MOST_BYTES, SHOWN = 2**20, 1000  # of an answer that says no
NEEDS_PUSH = "urn:rollmatch:push-needed"

DIRECTLY = build_opener(ProxyHandler({}))  # a proxy of the environment is not asked


def fault(base_url: str) -> str | None:
    """What is wrong with the server; None when nothing is."""
    try:
        with DIRECTLY.open(f"{base_url.rstrip('/')}/health/", timeout=TIMEOUT_S):
            return None
    except HTTPError as error:
        body = error.read(MOST_BYTES)
        told = body[:SHOWN].decode(errors="replace").encode("unicode_escape").decode()
        return None if problem_type(body) == NEEDS_PUSH else f"{error.code}: {told}"
    except (OSError, ValueError, HTTPException) as error:
        return str(error) or repr(error)


def problem_type(body: bytes) -> object:
    try:
        problem = json.loads(body)
    except ValueError:
        return None
    return problem.get("type") if isinstance(problem, dict) else None


if __name__ == "__main__":
    sys.exit(fault(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
