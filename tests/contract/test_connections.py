"""What one connection may cost a server: bytes of header, seconds, places, descriptors."""

import contextlib
import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn

from rollout_server.http.app import create_app
from rollout_server.http.connections import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    RESERVED_DESCRIPTORS,
    bounded_protocol,
)
from rollout_server.serving.pool import Pool
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from tests.contract.test_limits import SlowPool, settings

Address = tuple[str, int]
SHORT_S = 0.4
JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def listening(
    max_connections: int = 64,
    header_s: float = 20.0,
    body_s: float = 20.0,
    pool: Pool | None = None,
) -> Iterator[Address]:
    """A server without engines on a real socket."""
    app = create_app(pool or Pool(settings()))
    http = bounded_protocol(max_connections, header_s, body_s)
    config = uvicorn.Config(app, http=http, ws="none", log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.force_exit = server.should_exit = True
            thread.join()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with listening() as address:
        yield address


@pytest.fixture(scope="module")
def hasty() -> Iterator[Address]:
    """A server that waits for a moment only."""
    with listening(header_s=SHORT_S, body_s=SHORT_S) as address:
        yield address


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=20)


def answer_of(peer: socket.socket) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(peer)
    answer.begin()
    return answer


def problem_of(peer: socket.socket) -> str:
    """The kind of the problem that is answered; the connection is closed after it."""
    answer = answer_of(peer)
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate_json(answer.read())
    assert problem.status == answer.status
    assert peer.recv(1) == b""
    return problem.kind


def lives(address: Address) -> bool:
    with connect(address) as peer:
        peer.sendall(b"GET /live/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return answer_of(peer).status == 200


def send_until_refused(peer: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that were sent before the server had enough."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            peer.sendall(piece)
            sent += len(piece)
    return sent


# --- bytes


@pytest.mark.req("SRV-06", "WIRE-05")
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(b"GET /live/ HTTP/1.1\r\nx: ", b"a" * 4096, id="a value without end"),
        pytest.param(b"GET /live/ HTTP/1.1\r\n", b"a" * 4096, id="a name without end"),
        pytest.param(b"GET /", b"a" * 4096, id="a path without end"),
        pytest.param(b"GET /live/ HTTP/1.1\r\n", b"x: y\r\n" * 64, id="fields without end"),
    ],
)
def test_a_header_without_end_is_refused(address: Address, start: bytes, piece: bytes) -> None:
    with connect(address) as peer:
        peer.sendall(start)
        # More than this cannot lie in the buffers of two sockets on one machine.
        sent = send_until_refused(peer, piece, most=64 * 2**20)
        assert sent < 64 * 2**20
    with connect(address) as peer:
        peer.sendall((start + piece * (2 * MAX_HEADER_BYTES // len(piece)))[: MAX_HEADER_BYTES + 1])
        assert problem_of(peer) == "header-too-large"
    assert lives(address)


@pytest.mark.req("SRV-06")
def test_as_many_fields_as_a_header_may_have(address: Address) -> None:
    for fields, status in ((MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)):
        with connect(address) as peer:
            peer.sendall(b"GET /live/ HTTP/1.1\r\n" + b"x: y\r\n" * fields + b"\r\n")
            assert answer_of(peer).status == status


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"1;" + b"x" * 4096 + b"\r\na\r\n", id="extensions of chunks"),
        pytest.param(b"0\r\nx: " + b"x" * 300_000, id="trailers"),
    ],
)
def test_a_body_of_framing_alone_is_refused(address: Address, piece: bytes) -> None:
    with connect(address) as peer:
        peer.sendall(
            b"POST /infer/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        assert send_until_refused(peer, piece, most=64 * 2**20) < 64 * 2**20


@pytest.mark.req("SRV-06")
def test_a_body_of_single_bytes_is_a_body(address: Address) -> None:
    body = json.dumps({"infer_requests": []}).ljust(100_000)
    with connect(address) as peer:
        peer.sendall(
            b"POST /infer/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
            + b"".join(b"1\r\n%c\r\n" % byte for byte in body.encode())
            + b"0\r\n\r\n"
        )
        assert answer_of(peer).status == 503  # its engines have not started


# --- seconds


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"GET /live/ HTTP/1.1\r\nx: ", "too-slow", id="half a header"),
        pytest.param(
            b"POST /infer/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{",
            "too-slow",
            id="half a body",
        ),
    ],
)
def test_a_silent_connection_is_closed(hasty: Address, sent: bytes, kind: str | None) -> None:
    with connect(hasty) as peer:
        peer.sendall(sent)
        if kind is None:
            assert peer.recv(1) == b""
        else:
            assert problem_of(peer) == kind


@pytest.mark.req("SRV-06")
def test_a_connection_between_two_calls_is_kept(hasty: Address) -> None:
    connection = http.client.HTTPConnection(*hasty, timeout=20)
    for _ in range(3):
        connection.request("GET", "/live/")
        assert connection.getresponse().read()
        peer = connection.sock
        time.sleep(2 * SHORT_S)
        assert connection.sock is peer
    connection.close()


@pytest.mark.req("SRV-06")
def test_the_next_header_of_a_connection_has_a_deadline_too(hasty: Address) -> None:
    connection = http.client.HTTPConnection(*hasty, timeout=20)
    connection.request("GET", "/live/")
    assert connection.getresponse().read()
    connection.sock.sendall(b"GET /live/ HTTP/1.1\r\nx: ")
    assert problem_of(connection.sock) == "too-slow"
    connection.close()


# --- places


def closed(peer: socket.socket) -> bool:
    peer.settimeout(0.2)
    try:
        return peer.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.req("SRV-06")
def test_silent_connections_make_room_for_one_that_speaks() -> None:
    with listening(max_connections=8) as address, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(8)]
        assert lives(address)
        eventually(lambda: closed(silent[0]))
        assert not closed(silent[-1])


@pytest.mark.req("SRV-06")
def test_half_sent_bodies_keep_nobody_out() -> None:
    half = (
        b"POST /infer/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    with listening(max_connections=200) as address, contextlib.ExitStack() as stack:
        for _ in range(100):  # more than calls may run at once
            stack.enter_context(connect(address)).sendall(half)
        connection = http.client.HTTPConnection(*address, timeout=20)
        connection.request("POST", "/infer/", b'{"infer_requests": []}', JSON)
        assert connection.getresponse().status == 503  # its engines have not started
        connection.close()


@pytest.mark.req("SRV-06")
def test_descriptors_are_kept_for_the_engines() -> None:
    """Both ends are in this process, so the client opens all of its descriptors first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening(max_connections=10_000) as address, contextlib.ExitStack() as stack:
        assert lives(address)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while stack.enter_context(open(os.devnull)).fileno() < highest:
            """Fill what other tests left free below the highest descriptor."""
        peers = [stack.enter_context(socket.socket()) for _ in range(40)]
        with socket.socket() as lowest_free:
            limit = lowest_free.fileno() + 10 + RESERVED_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for peer in peers:
            peer.settimeout(20)
            peer.connect(address)
        eventually(lambda: sum(map(closed, peers)) >= len(peers) - 12)
        assert not closed(peers[-1])


@pytest.mark.req("SRV-06", "WIRE-05")
def test_where_every_place_is_taken_by_a_call_a_new_connection_is_told() -> None:
    pool = SlowPool(settings())
    with listening(max_connections=1, pool=pool) as address:
        call = http.client.HTTPConnection(*address, timeout=20)
        call.request("POST", "/infer/", b'{"infer_requests": []}', JSON)
        assert pool.running.wait(20)
        with connect(address) as peer:
            assert problem_of(peer) == "too-many-connections"
        pool.may_end.set()
        assert call.getresponse().status == 200
        call.close()
