"""Limits of one connection: bytes of header, seconds of waiting, number of connections.

uvicorn has none of these bounds for the httptools parser, and the first alone for h11, which
reads large bodies slowly. `bounded_protocol` adds them in httptools' own callbacks. While the
server waits for its peer, it is in one of three phases:

    phase   from                        until                   bounds
    header  connected, or a first byte  the end of the header   HEADER_S, MAX_HEADER_BYTES,
                                                                MAX_HEADERS
    body    the end of the header       the end of the message  BODY_S; what is no body between
                                                                two pieces of it: MAX_HEADER_BYTES
    idle    an answer has been sent     the next first byte     uvicorn's keep-alive time-out

If too many connections are open, the server closes the one for which it has waited longest. It
never closes a connection whose call is being answered. If all are such, it refuses the new one.
"""

import asyncio
import math
import resource
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared_contracts.errors import PROBLEM_MEDIA_TYPE, PROBLEM_TITLES, Problem

MAX_HEADER_BYTES = 64 * 2**10
MAX_HEADERS = 100
HEADER_S = 10.0
BODY_S = 120.0
# What connections leave free: engines are built again, and images opened, while the server runs.
RESERVED_DESCRIPTORS = 64


def bounded_protocol(
    max_connections: int, header_s: float = HEADER_S, body_s: float = BODY_S
) -> "type[BoundedProtocol]":
    """Return the `http` of a `uvicorn.Config`: connections with these limits."""
    bounds = {"max_connections": max_connections, "header_s": header_s, "body_s": body_s}
    return type("BoundedProtocol", (BoundedProtocol,), bounds)


class _Refused(Exception):
    """Raised to end the parsing of a message that is refused."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    max_connections: int
    header_s: float
    body_s: float

    _deadline: asyncio.TimerHandle | None = None
    # When the server began to wait for the peer; infinite while the peer waits for an answer.
    _waits_since = math.inf
    _in_header = True
    _header_bytes = _header_count = _framing_left = 0
    _refusal: Problem | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()
        self._wait("header", self.header_s)
        if self._is_one_too_many() and not self._close_the_longest_waiting():
            detail = "the server holds as many connections as it may; try again"
            self._refuse(Problem.of("too-many-connections", detail, "connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    # --- a place among the others

    def _is_one_too_many(self) -> bool:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The kernel gives the lowest free descriptor, so its number says how many were in use.
        return len(self.connections) > self.max_connections or any(
            other.transport.get_extra_info("socket").fileno() >= limit - RESERVED_DESCRIPTORS
            for other in self.connections
            if not other.transport.is_closing()
        )

    def _close_the_longest_waiting(self) -> bool:
        since, longest = math.inf, self
        for other in self.connections:
            assert isinstance(other, BoundedProtocol)
            if (
                other is not self
                and other._waits_since < since
                and not other.transport.is_closing()
            ):
                since, longest = other._waits_since, other
        if longest is self:
            return False
        longest.transport.abort()
        return True

    # --- waiting for the peer

    def _wait(self, phase: str, seconds: float) -> None:
        self._stop_waiting()
        self._waits_since = time.monotonic()
        self._deadline = self.loop.call_later(seconds, self._is_late, phase, seconds)

    def _stop_waiting(self) -> None:
        self._waits_since = math.inf
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self, phase: str, seconds: float) -> None:
        detail = f"the {phase} was not there within {seconds:g} s"
        self._refuse(Problem.of("too-slow", detail, phase))

    def _expect_header(self) -> None:
        self._in_header = True
        self._header_bytes = self._header_count = 0

    # --- what arrives

    def data_received(self, data: bytes) -> None:
        if self._in_header:
            if self._header_bytes == 0 and self._deadline is None:
                self._wait("header", self.header_s)
            self._header_bytes += len(data)
        else:
            self._framing_left -= len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_header and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_large_header())
        elif not self._in_header and self._framing_left < 0:
            detail = f"more than {MAX_HEADER_BYTES} bytes of it are no content"
            self._refuse(Problem.of("bad-request", detail, "body"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._refusal = _large_header()
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._framing_left = MAX_HEADER_BYTES
        self._wait("body", self.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # A body that comes a byte a chunk is six times as long on the wire.
        self._framing_left = min(self._framing_left + 8 * len(body), MAX_HEADER_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._expect_header()
        super().on_message_complete()
        self._idle_if_answered()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_if_answered()

    def _idle_if_answered(self) -> None:
        if self._in_header and self.cycle.response_complete:
            self._waits_since = time.monotonic()

    # --- refusals

    def send_400_response(self, msg: str) -> None:
        """Answer a message that cannot be parsed; uvicorn's own answer is plain text."""
        self._refuse(self._refusal or Problem.of("bad-request", msg, "header"))

    def _refuse(self, problem: Problem) -> None:
        """Answer, unless an answer has begun or there is no call, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        asked = self._header_bytes > 0 or not self._in_header or problem.status == 503
        if asked and (
            self.cycle is None or not self.cycle.response_started or self.cycle.response_complete
        ):
            self.transport.write(_answer(problem))
        self.transport.close()


def _large_header() -> Problem:
    detail = f"it has more than {MAX_HEADER_BYTES} bytes, or {MAX_HEADERS} fields"
    return Problem.of("header-too-large", detail, "header")


def _answer(problem: Problem) -> bytes:
    body = problem.model_dump_json(exclude_none=True).encode()
    _, title = PROBLEM_TITLES[problem.kind]
    head = (
        f"HTTP/1.1 {problem.status} {title}\r\n"
        f"content-type: {PROBLEM_MEDIA_TYPE}\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
