"""One line of every call, however it ended, and its place in the metrics (SRV-08).

Signs of life of a learner are told where they are refused.
"""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_server.call_record import CallRecord
from rollout_server.paths import route_of
from rollout_server.telemetry import Telemetry
from shared_contracts.errors import Problem

logger = logging.getLogger("rollout_server.access")

INFER = "/infer/"
KEEP = "/keep_communicator/"
WEIGHT_ROUTES = (
    "/init_communicator/",
    "/start_weight_update/",
    "/update_weights/",
    "/finish_weight_update/",
    KEEP,
    "/close_communicator/",
)


class AccessLog:
    """The outermost middleware: it sees the calls that other middlewares refuse, too.

    Puts the `CallRecord` of a call into `request.state.call_record`.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if route == INFER:
            with self._telemetry.in_flight():
                await self._noted(CallRecord(route), scope, receive, send)
        elif route in WEIGHT_ROUTES:
            await self._noted(CallRecord(route), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _noted(self, record: CallRecord, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["call_record"] = record
        refusal = bytearray()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif record.status >= 400:
                refusal.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            record.status, record.problem = 500, "internal"  # as it is answered further out
            raise
        finally:
            if refusal:
                record.problem = Problem.model_validate_json(refusal).kind
            self._telemetry.count_call(record)
            if record.route != KEEP or record.problem is not None:  # else every two seconds
                log_call(record)


def log_call(record: CallRecord) -> None:
    """One line; where lines are JSON its fields stand beside the message."""
    fields = _fields(record)
    logger.info("%s", " ".join(f"{k}={_shown(v)}" for k, v in fields.items()), extra=fields)


def _fields(record: CallRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "seconds": round(time.monotonic() - record.began, 4),
    }
    if record.problem is not None:
        fields["problem"] = record.problem
    return fields | _infer_fields(record) if record.route == INFER else fields


def _infer_fields(record: CallRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        f"{phase}_seconds": round(seconds, 4) for phase, seconds in record.seconds.items()
    }
    fields |= {
        "requests": record.requests,
        "images": record.images,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "guard_triggers": record.guard_triggers,
    }
    if record.weights_version is not None:
        fields["weights_version"] = "-".join(map(str, sorted(set(record.weights_version))))
    if record.request_id is not None:
        fields["request_id"] = record.request_id
    return fields


def _shown(value: object) -> str:
    """Callers choose their ids: none may forge a field or a line."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
