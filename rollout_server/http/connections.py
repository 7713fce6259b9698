"""h11 connections with a deadline for the header of a request."""

import asyncio
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem

# `h11_max_incomplete_event_size` of the `uvicorn.Config`.
HEADER_BYTES = 64 * 2**10
HEADER_S = 10.0


class DeadlineProtocol(H11Protocol):
    """One connection, for `uvicorn.Config(http=...)`.

    `header_s` limits the time until the first byte, the time of a header, and the time of a body
    that the app does not read. `guards.BodyLimit` limits the time of other bodies, and uvicorn's
    keep-alive the time between two requests.
    """

    header_s = HEADER_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 refuses with a problem instead of uvicorn's plain text."""
        if len(self.conn.trailing_data[0]) > HEADER_BYTES:
            detail = f"it has more than {HEADER_BYTES} bytes"
            self._refuse(Problem.of("header-too-large", detail, "header"))
        else:
            self._refuse(Problem.of("bad-request", msg, "connection"))

    def _update_timer(self) -> None:
        body_is_unread = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (body_is_unread or self._is_in_header()):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_s, self._expire)

    def _is_in_header(self) -> bool:
        return self.conn.their_state is h11.IDLE and len(self.conn.trailing_data[0]) > 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._is_in_header():
            detail = f"the header was not complete after {self.header_s:g} s"
            self._refuse(Problem.of("too-slow", detail, "header"))
        self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = problem.model_dump_json(exclude_none=True).encode()
            headers = [
                ("content-type", PROBLEM_MEDIA_TYPE),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = HTTPStatus(problem.status).phrase
            for event in (
                h11.Response(status_code=problem.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # drops the app's own answer
        self.transport.close()
