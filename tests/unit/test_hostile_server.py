"""A server that sends whatever it likes cannot hang, bloat or crash a learner, nor its terminal."""

import gzip
import json
import resource
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from learner.operate.doctor.servers import reach
from learner.operate.launch_plan import addresses_here
from learner.rollout.answers import TOKEN_CHARACTERS, UNKNOWN, Expected, most_bytes
from learner.rollout.backend import Journal
from learner.rollout.client import MOST_BYTES, SERVER_ERRORS, RolloutClient, ServerUnreachable
from learner.rollout.parallel_calls import run_within
from learner.rollout.server_handle import Part, ServerHandle
from learner.rollout.sync.push import WeightSyncError
from learner.stages.tokens import decode_exactly
from shared_contracts.errors import ContractError, ContractErrors, ProblemError
from shared_contracts.infer import InferCall, RequestConfig
from shared_contracts.rollout_config import ServerAddress, ServerConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from shared_contracts.weights import (
    MOST_VERSION_STEP,
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)
from tests.unit.fleets import fleet_of
from tests.unit.push_worker import Worker, pusher_to
from tests.unit.scripted_rollouts import ScriptedRollouts
from tests.unit.scripted_server import envelope, health, info, live, problem, scripted_server

MIB = 2**20
# What a kernel may take from a server beyond what a learner reads.
KERNEL_BYTES = 16 * MIB
# Long for an answer on loopback, and short for a call that hangs.
HANGS_S = 30.0
SOON_S = 0.3
PATIENT_S = 20.0
IMPATIENT = {"timeout_s": SOON_S, "infer_timeout_s": SOON_S, "transfer_s": SOON_S}

CALL = InferCall.model_validate(
    {
        "infer_requests": [{"messages": [{"role": "user", "content": "?"}], "uuid": "a.jsonl:1"}],
        "request_config": {"max_tokens": 8, "seed": 7, "return_details": True},
    }
)
INIT = InitCommunicator(host="127.0.0.1", port=9, world_size=3, attempt="a")
START = StartWeightUpdate(
    version=4, parameters=[ParameterMeta(name="w", dtype="int8", shape=[1])], attempt="a"
)
FINISH = FinishWeightUpdate(
    version=4, digests=[ParameterDigest(name="w", digest="0" * 16)], attempt="a"
)

Call = Callable[[RolloutClient], object]
CALLS: dict[str, Call] = {
    "GET /health/": RolloutClient.health,
    "GET /live/": RolloutClient.live,
    "GET /info/": RolloutClient.info,
    "GET /get_world_size/": RolloutClient.world_size,
    "POST /infer/": lambda client: client.infer(CALL),
    "POST /init_communicator/": lambda client: client.init_communicator(INIT),
    "POST /start_weight_update/": lambda client: client.start_weight_update(START),
    "POST /update_weights/": lambda client: client.update_weights(
        UpdateWeights(version=4, attempt="a")
    ),
    "POST /finish_weight_update/": lambda client: client.finish_weight_update(FINISH),
    "POST /sleep/": lambda client: client.sleep(),
    "POST /wake_up/": lambda client: client.wake_up(),
    "POST /keep_communicator/": lambda client: client.keep_communicator("a"),
    "POST /close_communicator/": lambda client: client.close_communicator("a"),
}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


# --- The server -------------------------------------------------------------------------


class Peer:
    """The server's end of connections. sent: bytes that it got rid of, over all of them."""

    def __init__(self) -> None:
        self.sent = 0
        self.over = threading.Event()

    def send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent += len(data)


Attack = Callable[[Callable[[bytes], None], threading.Event], None]


@contextmanager
def hostile(attack: Attack) -> Iterator[tuple[str, Peer]]:
    """A server that answers every request with `attack`, until the client hangs up."""
    peer = Peer()
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            _take_request(connection)
            attack(lambda data: peer.send(connection, data), peer.over)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", peer
    finally:
        peer.over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def _take_request(connection: socket.socket) -> None:
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(65536)
    head, _, body = said.partition(b"\r\n\r\n")
    length = next((int(h[15:]) for h in head.split(b"\r\n") if h.startswith(b"Content-Length")), 0)
    while len(body) < length:
        body += connection.recv(65536)


def whole(body: bytes, status: str = "200 OK", **headers: str) -> Attack:
    """One answer that ends."""
    headers = {"Content_Type": "application/json", "Content_Length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""])

    def attack(send: Callable[[bytes], None], over: threading.Event) -> None:
        send(head.encode("latin-1") + body)
        over.wait()

    return attack


def endless(start: bytes, again: bytes, pause_s: float = 0.0) -> Attack:
    def attack(send: Callable[[bytes], None], over: threading.Event) -> None:
        send(start)
        while not over.wait(pause_s):
            send(again)

    return attack


def hold(start: bytes) -> Attack:
    def attack(send: Callable[[bytes], None], over: threading.Event) -> None:
        send(start)
        over.wait()

    return attack


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BOMB = b"[" + b"[]," * (64 * MIB)


@cache
def bombs() -> dict[str, Attack]:
    """192 MiB each, in some 200 KB."""
    packed = {"gzip": gzip.compress(BOMB, 1), "deflate": zlib.compress(BOMB, 1), "zstd": b"{}"}
    return {name: whole(body, Content_Encoding=name) for name, body in packed.items()}


SLOW = {
    "silent": hold(b""),
    "header drips": endless(OK, b"a", 0.02),
    "body drips": endless(OK + b"Content-Length: 999999999\r\n\r\n", b" ", 0.02),
    "chunks drip": endless(CHUNKED, b"1\r\n \r\n", 0.02),
    "body stops": hold(OK + b"Content-Length: 100\r\n\r\n{"),
    "refusal drips": endless(b"HTTP/1.1 503 No\r\nContent-Length: 999999999\r\n\r\n", b" ", 0.02),
    "interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.001),
}
HUGE = {
    "endless header": endless(OK, b"X-%s: 1\r\n" % (b"y" * 8000)),
    "endless header line": endless(OK + b"X: ", b"y" * 65536),
    "endless body": endless(OK + b"\r\n", b" " * 65536),
    "endless chunks": endless(CHUNKED, b"10000\r\n" + b"[" * 65536 + b"\r\n"),
    "long content-length": endless(OK + b"Content-Length: 99999999999\r\n\r\n", b" " * 65536),
    "endless refusal": endless(b"HTTP/1.1 500 No\r\n\r\n", b"<title>" * 9362),
    "endless trailer": endless(CHUNKED + b"0\r\n", b"X-%s: 1\r\n" % (b"y" * 8000)),
}
ODD = {
    "nothing": whole(b""),
    "no HTTP": hold(b"\xff\x00\x1b[2J\r\n\r\n"),
    "control characters in a header": hold(b"HTTP/1.1 200 OK\r\nA\x1b[2J: \x1b[2J\r\n\r\n"),
    "deep JSON": whole(b"[" * 500_000),
    "many values": whole(b"[" + b"[]," * 300_000 + b"0]"),
    "many fields": whole(b"{" + b",".join(b'"%x":1' % i for i in range(90_000)) + b"}"),
    "a long number": whole(b'{"world_size": ' + b"9" * 900_000 + b"}"),
    "no number": whole(b'{"world_size": NaN}'),
    "half a character": whole(b'{"world_size": "\\ud800"}'),
    "other characters": whole('{"world_size": 1}'.encode("utf-16")),
    "unclosed titles": whole(b"<title>" * 140_000, "503 No", Content_Type="text/html"),
    "unclosed scripts": whole(b"<script " * 120_000, "500 No"),
    "charset bz2": whole(b"<p>", "500 No", Content_Type="text/html; charset=bz2"),
    "charset hex": whole(b"<p>", "200 OK", Content_Type="text/html; charset=hex"),
    "a status of its own": whole(b'{"status": "\x1b[2J"}', "299 \x1b[2J"),
    "another protocol": whole(b"", "101 Switching Protocols", Upgrade="x", Connection="upgrade"),
    "a redirect": whole(b"", "307 Go", Location="http://127.0.0.1:9/"),
    "other lengths": whole(b"{}", Content_Length="1, 2"),
}


def client_of(url: str, **changes: Any) -> RolloutClient:
    """It has time for every answer that ends, also on a busy machine."""
    limits = {"timeout_s": PATIENT_S, "infer_timeout_s": PATIENT_S, "transfer_s": PATIENT_S}
    return RolloutClient(url, **(limits | {"phase_margin_s": 0.0} | changes))


def refusal_of(call: Call, attack: Attack, **changes: Any) -> tuple[Exception, Peer]:
    """The error that the call ends with, which is fit for a terminal and names the server."""
    with hostile(attack) as (url, peer), client_of(url, **changes) as client:
        with pytest.raises((ContractError, *SERVER_ERRORS)) as caught:
            run_within(lambda: call(client), HANGS_S)
        said = str(caught.value)
        assert url in said
        assert said.isprintable()
        assert len(said) < 4000
    return caught.value, peer


# --- Bytes and seconds ------------------------------------------------------------------


@pytest.mark.req("RES-25", "SYNC-04")
@pytest.mark.parametrize("attack", SLOW)
@pytest.mark.parametrize("route", CALLS)
def test_no_call_waits_for_an_answer_that_does_not_end(route: str, attack: str) -> None:
    error, _ = refusal_of(CALLS[route], SLOW[attack], **IMPATIENT)
    assert isinstance(error, ServerUnreachable)
    assert "timed out" in str(error)


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("attack", HUGE)
@pytest.mark.parametrize("route", CALLS)
def test_no_call_reads_an_answer_longer_than_it_can_be(route: str, attack: str) -> None:
    _, peer = refusal_of(CALLS[route], HUGE[attack], infer_timeout_s=None)
    assert peer.sent < most_bytes(CALL, Expected()) + MOST_BYTES + KERNEL_BYTES


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("attack", ODD)
@pytest.mark.parametrize("route", CALLS)
def test_an_answer_that_is_none_is_the_servers_error(route: str, attack: str) -> None:
    error, _ = refusal_of(CALLS[route], ODD[attack])
    assert isinstance(error, SERVER_ERRORS)


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("route", CALLS)
def test_a_compressed_answer_is_refused_by_name(route: str) -> None:
    """None was asked for, and it can be a thousand times as long as it was sent."""
    for name, bomb in bombs().items():
        error, _ = refusal_of(CALLS[route], bomb)
        assert f"its body is encoded as {name}, and only identity was asked for" in str(error)


@pytest.mark.req("RES-25", "CFG-06")
@pytest.mark.parametrize("attack", ["body drips", "chunks drip", "body stops"])
def test_an_answer_to_infer_that_has_begun_ends_in_time_without_an_infer_timeout(
    attack: str,
) -> None:
    """While `/live/` says that all is well: it is the same server."""

    def lively(send: Callable[[bytes], None], over: threading.Event) -> None:
        SLOW[attack](send, over)

    error, _ = refusal_of(CALLS["POST /infer/"], lively, infer_timeout_s=None, transfer_s=SOON_S)
    assert isinstance(error, ServerUnreachable)
    assert "timed out" in str(error)


@pytest.mark.slow
@pytest.mark.req("RES-25")
def test_nothing_that_a_server_sends_makes_a_learner_large() -> None:
    """A process of its own: what Rust and the kernel hold is counted, too."""
    attacks = {**HUGE, **bombs(), "many values": ODD["many values"], "fields": ODD["many fields"]}
    most = most_bytes(CALL, Expected())
    attacks["lists of lists"] = whole(b"[" + b"[0]," * (most // 4 - 1) + b"0]")
    with ExitStack() as stack:
        urls = [stack.enter_context(hostile(attack))[0] for attack in attacks.values()]
        run = [sys.executable, "-m", "tests.unit.test_hostile_server", *urls]
        grown = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert grown.returncode == 0, grown.stderr
    assert int(grown.stdout) < 100


def _grow(urls: Sequence[str]) -> None:
    """Ask every server for everything, and tell by how many MiB this process has grown."""
    with suppress(*SERVER_ERRORS):
        RolloutClient("http://127.0.0.1:9", timeout_s=1.0).live()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for url in urls:
        client = RolloutClient(url)
        for route in ("GET /info/", "POST /infer/", "POST /finish_weight_update/"):
            with suppress(*SERVER_ERRORS):
                CALLS[route](client)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


@pytest.mark.req("RES-25")
def test_the_bound_of_rollouts_follows_from_the_call_and_fits_every_honest_answer(
    qwen_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = qwen_tokenizer.get_vocab()
    texts = [decode_exactly(qwen_tokenizer, [number]) for number in tokens.values()]
    longest = max(texts, key=lambda text: len(json.dumps(text)))
    assert max(map(len, texts)) <= TOKEN_CHARACTERS
    expected = Expected(vocabulary=len(tokens), context=4096)

    def bound(n: int, requests: int, new: int | None) -> int:
        asked = RequestConfig(n=n, max_tokens=new, return_details=True)
        one = CALL.infer_requests[0]
        call = InferCall(infer_requests=[one] * requests, request_config=asked)
        return most_bytes(call, expected)

    for n, requests, new in ((1, 1, 8), (3, 5, 100)):
        ids, prompt = [len(tokens) - 1] * new, [len(tokens) - 1] * (4096 - new)
        made = envelope(ids, prompt, 7, longest * new, n)
        body = json.dumps([made.model_dump(mode="json")] * requests)
        assert len(body) <= bound(n, requests, new)
    assert bound(1, 1, 8) < bound(1, 1, None) == bound(1, 1, 10**9)


# --- Fields -----------------------------------------------------------------------------

STATUS = WeightStatus(state="UPDATING", weights_version=3, server_epoch="e-0")
READY = CommunicatorReady(
    weights_version=3, world_size=3, transport="gloo", server_epoch="e-0", dtype="float32"
)
REPORT = SyncReport(
    status=STATUS.model_copy(update={"weights_version": 4}),
    seconds={"load": 1.0},
    bytes=1,
    verified=1,
)
HONEST: dict[str, Any] = {
    "GET /health/": health().model_dump(),
    "GET /live/": live().model_dump(),
    "GET /info/": info().model_dump(),
    "GET /get_world_size/": {"world_size": 1},
    "POST /infer/": [envelope([5, 6], [1, 2], 7, "text").model_dump()],
    "POST /init_communicator/": READY.model_dump(),
    "POST /start_weight_update/": STATUS.model_dump(),
    "POST /update_weights/": STATUS.model_dump(),
    "POST /finish_weight_update/": REPORT.model_dump(),
    "POST /sleep/": STATUS.model_dump(),
    "POST /wake_up/": STATUS.model_dump(),
    "POST /keep_communicator/": STATUS.model_dump(),
    "POST /close_communicator/": STATUS.model_dump(),
}
NAN, ENDLESS = float("nan"), float("inf")
CHOICE, STAMP = "0.response.choices.0", "0.coordexp"
FAULTS: list[tuple[str, str, Any]] = [
    ("GET /health/", "weights_version", -1),
    ("GET /health/", "weights_version", 2**70),
    ("GET /health/", "replicas.0.heartbeat_age_s", ENDLESS),
    ("GET /health/", "replicas.0.restarts", -1),
    ("GET /live/", "heartbeat_age_s.0", ENDLESS),
    ("GET /info/", "weights_version", -1),
    ("GET /info/", "world_size", 0),
    ("GET /info/", "world_size", 2**40),
    ("GET /info/", "max_num_seqs", -1),
    ("GET /info/", "weight_group_heard_s", ENDLESS),
    ("GET /info/", "repeat_terminate.active", None),
    ("GET /get_world_size/", "world_size", 0),
    ("GET /get_world_size/", "world_size", 2**40),
    ("POST /init_communicator/", "weights_version", -1),
    ("POST /init_communicator/", "weights_version", 2**62),
    ("POST /init_communicator/", "world_size", 2),
    ("POST /init_communicator/", "transport", "ipc"),
    ("POST /start_weight_update/", "weights_version", -1),
    ("POST /start_weight_update/", "state", "BUSY"),
    ("POST /update_weights/", "weights_version", -1),
    ("POST /finish_weight_update/", "status.weights_version", 3),
    ("POST /finish_weight_update/", "seconds.load", ENDLESS),
    ("POST /finish_weight_update/", "seconds.load", -1.0),
    ("POST /finish_weight_update/", "seconds", {str(i): 0.0 for i in range(65)}),
    ("POST /finish_weight_update/", "bytes", -1),
    ("POST /finish_weight_update/", "verified", -1),
    ("POST /keep_communicator/", "weights_version", -1),
    ("POST /close_communicator/", "weights_version", -1),
    ("POST /infer/", "0.response.choices", []),
    ("POST /infer/", "0.response.choices", HONEST["POST /infer/"][0]["response"]["choices"] * 2),
    ("POST /infer/", f"{CHOICE}.index", 1),
    ("POST /infer/", f"{CHOICE}.index", -1),
    ("POST /infer/", f"{CHOICE}.logprobs", {"content": []}),
    ("POST /infer/", f"{CHOICE}.token_ids", None),
    ("POST /infer/", f"{CHOICE}.token_ids.1", 512),
    ("POST /infer/", f"{CHOICE}.token_ids.1", -1),
    ("POST /infer/", f"{CHOICE}.token_ids.1", 2**70),
    ("POST /infer/", f"{CHOICE}.token_ids", [1] * 9),
    ("POST /infer/", f"{CHOICE}.message.content", "x" * (2 * TOKEN_CHARACTERS + 1)),
    ("POST /infer/", f"{CHOICE}.finish_reason", "\x1b[2J"),
    ("POST /infer/", f"{CHOICE}.logprobs", [ENDLESS]),
    ("POST /infer/", "0.response.prompt_token_ids", None),
    ("POST /infer/", "0.response.prompt_token_ids", []),
    ("POST /infer/", "0.response.prompt_token_ids.0", 512),
    ("POST /infer/", "0.response.prompt_token_ids.0", -1),
    ("POST /infer/", "0.response.usage.total_tokens", 5),
    ("POST /infer/", "0.response.usage.prompt_tokens", -1),
    (
        "POST /infer/",
        "0.response.usage",
        {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    ),
    ("POST /infer/", f"{STAMP}.weights_version", [-1, 0]),
    ("POST /infer/", f"{STAMP}.weights_version", [2, 1]),
    ("POST /infer/", f"{STAMP}.weights_version", []),
    ("POST /infer/", f"{STAMP}.seed", 8),
    ("POST /infer/", f"{STAMP}.repeat_terminated_choices", [3]),
    ("POST /infer/", f"{STAMP}.repeat_terminate_triggered", 1),
    ("POST /infer/", f"{STAMP}.server_epoch", "\x1b[2J"),
    ("POST /infer/", f"{STAMP}.\x1b[2J", 1),
]


def changed(body: Any, field: str, value: Any) -> Any:
    """A copy of the body with another value in a field, and that field as a message names it."""
    copy = json.loads(json.dumps(body))
    *path, last = [int(part) if part.isdecimal() else part for part in field.split(".")]
    inner = copy
    for key in path:
        inner = inner[key]
    inner[last] = value
    return copy


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("route", CALLS)
def test_an_honest_answer_is_taken(route: str) -> None:
    body = json.dumps(HONEST[route]).encode()
    with hostile(whole(body)) as (url, _), client_of(url, expected=Expected(512, 64)) as client:
        assert CALLS[route](client) is not None


@pytest.mark.req("RES-25")
@pytest.mark.parametrize(("route", "field", "value"), FAULTS)
def test_a_field_that_cannot_be_is_named_with_the_server(
    route: str, field: str, value: Any
) -> None:
    body = json.dumps(changed(HONEST[route], field, value)).replace("Infinity", "1e999")
    attack = whole(body.encode())
    error, _ = refusal_of(CALLS[route], attack, expected=Expected(512, 64))
    assert isinstance(error, ProblemError)
    assert error.problem.title == "Not an answer of a rollout server"
    assert [part for part in field.split(".") if part.isalpha() or "_" in part][-1] in str(error)


def test_a_fault_of_a_rollout_names_its_request() -> None:
    body = changed(HONEST["POST /infer/"], f"{CHOICE}.token_ids.1", 512)
    attack = whole(json.dumps(body).encode())
    error, _ = refusal_of(CALLS["POST /infer/"], attack, expected=Expected(512, 64))
    assert isinstance(error, ProblemError)
    assert error.problem.detail == (
        "[0].response.choices[0].token_ids[1]: 512, and the model has 512 ids (request a.jsonl:1)"
    )


@pytest.mark.req("RES-25", "SYNC-06")
@pytest.mark.parametrize(("field", "value"), [("bytes", 1), ("verified", 10**6), ("trial", True)])
def test_a_report_of_another_push_than_was_made_is_refused(field: str, value: Any) -> None:
    with scripted_server() as server:
        worker = Worker(server)
        server.routes["POST /finish_weight_update/"] = lambda body: worker.finish(body).model_copy(
            update={field: value}
        )
        with pusher_to(server) as pusher, pytest.raises(WeightSyncError) as caught:
            pusher.push(version=1)
    assert (caught.value.side, caught.value.phase) == ("server", "verify")
    assert server.base_url in str(caught.value)


# --- What is shown ----------------------------------------------------------------------

STEERING = "\x1b[2J\x1b]0;title\x07\r\u202e\u200b\x9b1m" + "y" * 10_000


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("route", CALLS)
@pytest.mark.parametrize("status", ["200 OK", "422 \x1b[2J", "503 No"])
def test_no_text_of_a_server_steers_a_terminal(route: str, status: str) -> None:
    said = {"type": STEERING, "title": STEERING, "detail": STEERING, "where": STEERING}
    faults = [{"where": STEERING, STEERING: STEERING, "index": STEERING}]
    body = said | {"status": int(status[:3]), "errors": faults}
    for sent in (json.dumps(body).encode(), STEERING.encode()):
        refusal_of(CALLS[route], whole(sent, status))


@pytest.mark.req("RES-25")
def test_what_a_server_says_of_itself_is_printable_and_short() -> None:
    body = changed(HONEST["GET /info/"], "model", STEERING)
    body = changed(body, "versions", {STEERING: STEERING})
    body = changed(body, "replicas.0.detail", STEERING)
    with hostile(whole(json.dumps(body).encode())) as (url, _), client_of(url) as client:
        told = client.info()
    for text in (told.model, told.replicas[0].detail, *told.versions, *told.versions.values()):
        assert text.isprintable()
        assert len(text) < 3000


@pytest.mark.req("RES-25", "DIST-05")
@pytest.mark.parametrize("index", [1, -1, 2**70, None, "0", True, [0]])
def test_a_refusal_that_names_no_request_of_the_call_is_told_as_it_is(index: Any) -> None:
    status, said = problem("invalid-request", "too long", "messages")
    refused = said.model_copy(update={"errors": [{"index": index}, {}]})
    with scripted_server() as server, RolloutClient(server.base_url) as client:
        server.routes["POST /infer/"] = lambda _: (status, refused)
        member = ServerHandle(client, Journal(), lambda _: None)
        with pytest.raises(ProblemError, match="too long"):
            member.answer(CALL, Part(range(1)), threading.Event())


@pytest.mark.req("RES-25", "SYNC-05")
def test_a_server_so_far_ahead_that_others_would_refuse_the_next_push_is_named() -> None:
    with scripted_server() as one, scripted_server() as other:
        rollouts = [ScriptedRollouts(one), ScriptedRollouts(other)]
        rollouts[1].version = MOST_VERSION_STEP + 1
        with pytest.raises(ContractError) as caught, fleet_of(rollouts, 8, 20.0):
            pass
    assert caught.value.where == f"POST {other.base_url}/init_communicator/"
    assert "another server of the run has 0" in caught.value.found


# --- Looks without a client -------------------------------------------------------------


@pytest.mark.req("RES-25", "DEP-01")
def test_the_health_check_of_a_container_is_bounded() -> None:
    with hostile(endless(b"HTTP/1.1 500 No\r\n\r\n", b"\x1b[2J" * 16384)) as (url, peer):
        run = [sys.executable, "deploy/server_healthy.py", url]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr) < 5000) == (1, True)
    assert done.stderr.strip().isprintable()
    assert peer.sent < MOST_BYTES + KERNEL_BYTES


@pytest.mark.req("RES-25", "DEP-03")
@pytest.mark.parametrize("attack", ["endless body", "endless header", "gzip"])
def test_a_look_at_a_port_that_is_taken_is_bounded(attack: str) -> None:
    with hostile((HUGE | bombs())[attack]) as (url, peer):
        server = ServerAddress(base_url=url, group_port=1)
        with pytest.raises(ContractErrors, match="another program listens"):
            run_within(lambda: addresses_here([server], {}), HANGS_S)
    assert peer.sent < MOST_BYTES + KERNEL_BYTES


@pytest.mark.req("RES-25", "DEP-03")
@pytest.mark.parametrize("attack", ["endless body", "no HTTP", "gzip"])
def test_the_doctor_tells_a_server_of_another_kind(attack: str) -> None:
    """Healthy once, and then anything: the look without a token is the next one."""
    honest, first = whole(json.dumps(HONEST["GET /health/"]).encode()), threading.Event()

    def turns(send: Callable[[bytes], None], over: threading.Event) -> None:
        then = (HUGE | ODD | bombs())[attack] if first.is_set() else honest
        first.set()
        then(send, over)

    with hostile(turns) as (url, peer), ExitStack() as closing:
        address = ServerAddress(base_url=url, group_port=1)
        server = ServerConfig(servers=(address,))
        reached = run_within(lambda: reach(address, server, UNKNOWN, closing), HANGS_S)
    assert [finding.status for finding in reached.findings] == ["ok", "fail"]
    assert all(str(finding).isprintable() for finding in reached.findings)
    assert peer.sent < MOST_BYTES + KERNEL_BYTES


if __name__ == "__main__":
    _grow(sys.argv[1:])
