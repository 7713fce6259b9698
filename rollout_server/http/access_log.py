"""The access log: one line for each call, and its metrics (SRV-08)."""

import logging
import time
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.http.problems import CLOSE
from rollout_server.serving.telemetry import (
    CLIENT_GONE,
    COUNTS,
    GENERATING,
    INFER,
    CallRecord,
    Telemetry,
)
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem

logger = logging.getLogger("rollout_server.access")


@dataclass
class AccessLog:
    """Middleware around all guards, so that it logs refused calls of `routes`, too.

    `request.state.call_record` is the `CallRecord` of a call.
    """

    app: ASGIApp
    telemetry: Telemetry
    routes: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = f"{scope['path'].rstrip('/')}/" if scope["type"] == "http" else ""
        if route in self.routes:
            generates = route in GENERATING
            with self.telemetry.in_flight.track_inprogress() if generates else nullcontext():
                await self._record(CallRecord(route), scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _record(self, record: CallRecord, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["call_record"] = record
        problem = bytearray()
        is_problem = is_complete = is_gone = False

        async def observed_receive() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone |= message["type"] == "http.disconnect" and not is_complete
            return message

        async def observed_send(message: Message) -> None:
            nonlocal is_problem, is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                if record.status == 500:  # its error goes on to uvicorn, which closes
                    headers.update(CLOSE)
                is_problem = headers.get("content-type") == PROBLEM_MEDIA_TYPE
            else:
                is_complete = not message.get("more_body", False)
                if is_problem:
                    problem.extend(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, observed_receive, observed_send)
        except Exception:
            record.status, record.problem = 500, "internal"  # Starlette's outermost answer
            raise
        finally:
            if is_gone:
                record.status = CLIENT_GONE
            if problem:
                record.problem = Problem.model_validate_json(problem).kind
            self.telemetry.count_call(record)
            log_call(record)


def log_call(record: CallRecord) -> None:
    """Write one line; in JSON, with the fields as keys."""
    fields: dict[str, object] = {
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "seconds": round(time.monotonic() - record.began, 4),
    }
    if record.problem is not None:
        fields["problem"] = record.problem
    if record.route in GENERATING:
        fields |= {f"{phase}_seconds": round(s, 4) for phase, s in record.seconds.items()}
        if record.route == INFER:
            fields |= {name: getattr(record, name) for name in COUNTS}
        if record.weights_version is not None:
            fields["weights_version"] = "-".join(map(str, sorted(set(record.weights_version))))
        if record.request_id is not None:
            fields["request_id"] = record.request_id
    logger.info("%s", " ".join(f"{k}={_escape(v)}" for k, v in fields.items()), extra=fields)


def _escape(value: object) -> str:
    """Escape a caller's id, so that it cannot forge a field or a line."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
