"""Hostile connections to a server on a real uvicorn, with the scripted engine (SRV-06)."""

import http.client
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rollout_server.http.guards import HEADER_BYTES, DeadlineProtocol
from rollout_server.serving.pool import Pool
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from tests.contract import scripted_engine
from tests.contract.served_app import Address, app_of, served_app, settings

pytestmark = pytest.mark.req("SRV-06", "WIRE-05")

MAX_BODY = 2**16
CALLS = 2
TOKEN = "f00d-cafe"
CALL = b'{"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}]}'
HOST = b"host: localhost\r\n"
POST = (
    b"POST /infer/ HTTP/1.1\r\ncontent-type: application/json\r\n"
    + HOST
    + f"authorization: Bearer {TOKEN}\r\n".encode()
)
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /live/ HTTP/1.1\r\n" + HOST


@contextmanager
def serving(folder: Path, header_s: float = 60.0, body_s: float = 60.0) -> Iterator[Address]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    limits = settings(max_body_mib=MAX_BODY / 2**20, max_concurrent_calls=CALLS, token_file=token)
    with served_app(
        app_of(Pool(limits, scripted_engine.build), body_s=body_s),
        force_exit=True,
        http=type("HastyProtocol", (DeadlineProtocol,), {"header_s": header_s}),
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=3600,
        ws="none",
    ) as address:
        yield address


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(tmp_path_factory.mktemp("patient")) as address:
        yield address


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(tmp_path_factory.mktemp("hasty"), header_s=0.3, body_s=0.3) as address:
        yield address


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def drip(peer: socket.socket, piece: bytes) -> None:
    """Send pieces until the server answers or closes."""
    for _ in range(6000):
        with suppress(ConnectionError):  # closed since the last look
            peer.sendall(piece)
        if select.select([peer], [], [], 0.01)[0]:
            return
    raise AssertionError("the server still reads")


def problem_of(peer: socket.socket) -> str:
    """The kind of the problem in the answer."""
    answer = http.client.HTTPResponse(peer)
    answer.begin()
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate_json(answer.read())
    assert problem.status == answer.status
    return problem.kind


def is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:  # the server did not read everything
        return True


@pytest.mark.parametrize(
    ("before", "start", "piece"),
    [
        pytest.param(b"", GET + b"x: ", b"a", id="value"),
        pytest.param(CHUNKED, b"", b"1", id="chunk size"),
        pytest.param(CHUNKED + b"0\r\n", b"x: ", b"a", id="trailer"),
    ],
)
def test_endless_header_is_refused(
    address: Address, before: bytes, start: bytes, piece: bytes
) -> None:
    """h11 keeps what comes after `before`. The server reads all that is sent, then closes."""
    with connect(address) as peer:
        peer.sendall(before + (start + piece * (HEADER_BYTES + 1))[: HEADER_BYTES + 1])
        assert problem_of(peer) == "header-too-large"
        assert is_closed(peer)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(GET + b"x: ", b"a", id="header"),
        pytest.param(POST + b"content-length: 60000\r\n\r\n", b" ", id="body"),
    ],
)
def test_dripped_header_or_body_has_a_deadline(hasty: Address, start: bytes, piece: bytes) -> None:
    with connect(hasty) as peer:
        peer.sendall(start)
        drip(peer, piece)
        assert problem_of(peer) == "too-slow"
        assert is_closed(peer)


def test_silent_connection_is_closed_and_an_idle_one_is_not(hasty: Address) -> None:
    with connect(hasty) as silent, connect(hasty) as idle:
        idle.sendall(GET + b"\r\n")
        answer = http.client.HTTPResponse(idle)
        answer.begin()
        assert (answer.status, len(answer.read()) > 0) == (200, True)
        assert is_closed(silent)  # it is the older one
        with connect(hasty) as later:
            assert is_closed(later)
        assert not select.select([idle], [], [], 0)[0]


def test_large_body_is_refused_before_its_end_and_the_rest_has_a_deadline(hasty: Address) -> None:
    for drips in (False, True):
        with connect(hasty) as announced:
            announced.sendall(POST + b"content-length: %d\r\n\r\n" % 2**30)
            assert problem_of(announced) == "body-too-large"
            if drips:
                drip(announced, b" ")
            assert is_closed(announced)
    with connect(hasty) as chunked:
        chunked.sendall(CHUNKED + (b"1000\r\n" + b" " * 0x1000 + b"\r\n") * 17)
        assert problem_of(chunked) == "body-too-large"
        drip(chunked, b"1\r\n \r\n")
        assert is_closed(chunked)


def test_body_without_the_token_is_not_read(address: Address) -> None:
    head = POST.replace(b"Bearer", b"Basic") + b"content-length: %d\r\n\r\n" % 2**40
    with connect(address) as peer:
        peer.sendall(head)
        assert problem_of(peer) == "unauthorized"


# The server refuses the first, h11 the second.
SMUGGLED: dict[str, bytes] = {
    "both lengths": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 4\r\n\r\n") + b"0\r\n\r\n",
    "chunk without its end": CHUNKED + b"1\r\naa0\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_call_of_unclear_length_is_refused_with_all_that_follows(
    address: Address, name: str
) -> None:
    with connect(address) as peer:
        peer.sendall(SMUGGLED[name] + GET + b"\r\n")
        assert problem_of(peer) == "bad-request"
        assert is_closed(peer)


def test_incomplete_calls_do_not_keep_others_out(address: Address) -> None:
    with ExitStack() as stack:
        for sent in (b"", GET, POST + b"content-length: 100\r\n\r\n{") * 32:
            stack.enter_context(connect(address)).sendall(sent)
        peer = stack.enter_context(connect(address))
        peer.sendall(POST + b"content-length: %d\r\n\r\n" % len(CALL) + CALL)
        answer = http.client.HTTPResponse(peer)
        answer.begin()
        assert answer.status == 200
