"""The client of one rollout server, over real HTTP."""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from learner.rollout import client as client_module
from learner.rollout.client import RolloutClient, ServerUnreachable, may_pass, needs_push
from shared_contracts.errors import PROBLEM_TITLES, ContractError, Problem, ProblemError
from shared_contracts.infer import InferCall, RequestConfig
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from shared_contracts.weights import GroupCall, WeightStatus
from tests.unit.config_faults import changed
from tests.unit.fleets import PausedClock, wait_until
from tests.unit.scripted_server import (
    INFER,
    HangUp,
    Reply,
    ScriptedServer,
    envelope,
    health,
    info,
    live,
    problem,
    report,
    scripted_server,
)

CONTENT = [{"type": "image"}, {"type": "text", "text": "Detect."}]
REQUEST = {
    "messages": [{"role": "user", "content": CONTENT}],
    "images": ["/data/a.png"],
    "uuid": "train.jsonl:1",
}
CONFIG = {"max_tokens": 8, "temperature": 0.0, "seed": 7, "return_details": True}
CALL = InferCall.model_validate({"infer_requests": [REQUEST], "request_config": CONFIG})

HEALTH = "GET /health/"
_LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


of_a_proxy = client_module.may_be_of_a_proxy
BAD_GATEWAY = "<html>\n<title>502 Bad Gateway</title>\n"


@pytest.mark.req("WIRE-05", "WIRE-02")
@pytest.mark.parametrize(
    ("reply", "kind", "detail", "place"),
    [
        (problem("invalid-request", "no", "at"), PROBLEM_TITLES["invalid-request"], "no", " at"),
        ((502, BAD_GATEWAY), (502, "Bad Gateway"), "<html> <title>502 Bad Gateway</title>", ""),
    ],
    ids=["problem", "page"],
)
def test_refusal_is_a_problem_with_its_place(
    server: ScriptedServer, reply: Reply, kind: tuple[int, str], detail: str, place: str
) -> None:
    server.routes[INFER] = lambda _: reply
    with pytest.raises(ProblemError) as caught:
        RolloutClient(server.base_url).infer(CALL)
    found = caught.value.problem
    assert (found.status, found.title, found.detail) == (*kind, detail)
    assert found.where == f"POST {server.base_url}/infer/{place}"
    assert may_pass(caught.value) is of_a_proxy(caught.value) is (found.status == 502)


STARTING = problem("not-ready", "replica 0: its engine is being built, for 12 s", "replicas")
MISDIRECTED = problem("misdirected", "this host is not served", "Host")


@pytest.mark.req("SYNC-05", "SYNC-07")
@pytest.mark.parametrize("last", [health(version=4), problem("push-needed", "asleep", "weights")])
def test_server_is_waited_for_until_it_takes_a_push(server: ScriptedServer, last: Reply) -> None:
    replies = [STARTING] * 3 + [last]
    server.routes[HEALTH] = lambda _: replies.pop(0)
    RolloutClient(server.base_url, _LIMIT_S, clock=PausedClock()).wait_until_pushable()
    assert replies == []


@pytest.mark.req("SYNC-04", "WIRE-05")
@pytest.mark.parametrize(
    ("host", "reply", "found", "do", "waits"),
    [
        ("127.0.0.2", STARTING, "Connection refused", "`rollout-server serve`.*base_url", True),
        ("127.0.0.1", STARTING, "not ready after .* s: .* for 12 s", "Wait until it is", True),
        ("127.0.0.1", "<title>a web site</title>", "a web site", "rollout-server serve", False),
        ("localhost", MISDIRECTED, "not served", "server:.*`--allowed-host localhost`", False),
        ("0.0.0.0", MISDIRECTED, "not served", r"learner's .*servers\[\]\.base_url", False),
        ("0.0.0.0", "<title>a web site</title>", "a web site", r"learner's .*base_url", False),
        ("a..b", STARTING, "Name or service not known", "correct .*base_url", True),
        ("1.2.3.400", STARTING, "Invalid IPv4 address", "correct .*base_url", True),
    ],
)
def test_server_that_cannot_be_pushed_to_is_reported_with_what_to_do(
    server: ScriptedServer, host: str, reply: Reply, found: str, do: str, waits: bool
) -> None:
    server.routes[HEALTH] = lambda _: reply
    url, clock = server.base_url.replace("127.0.0.1", host), PausedClock()
    with pytest.raises(ContractError) as caught:
        RolloutClient(url, _LIMIT_S, clock=clock).wait_until_pushable()
    assert caught.value.where == f"GET {url}/health/"
    assert re.search(found, caught.value.found)
    assert re.search(do, caught.value.do)
    assert bool(clock.pauses) is waits
    assert clock.now == 0 or _LIMIT_S <= clock.now < _LIMIT_S + 2.0


def test_proxies_of_the_environment_are_ignored(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server.routes["POST /infer/"] = lambda _: [envelope([5], [1])]
    client = RolloutClient(server.base_url, timeout_s=_LIMIT_S)
    assert client.health().status == "ok"
    assert len(client.infer(CALL)) == 1


# --- A server that is slow, and one that is gone ----------------------------------------


@dataclass
class LiveScript:
    """Replies of `/live/`, the last one repeated; `/infer/` and None come after `enough`."""

    replies: list[Reply]
    enough: int
    seen: int = 0

    def install(self, server: ScriptedServer) -> None:
        server.routes |= {"GET /live/": self.live, "POST /infer/": self.answer}

    def live(self, _: object) -> Reply:
        reply = self.replies[min(self.seen, len(self.replies) - 1)]
        self.seen += 1
        return reply or self.answer(_)

    def answer(self, _: object) -> Reply:
        wait_until(lambda: self.seen >= self.enough)
        return [envelope([5], [1])]


GONE = problem("not-ready", "no upstream", "gateway")


def watching(server: ScriptedServer) -> RolloutClient:
    return RolloutClient(server.base_url, _LIMIT_S, infer_timeout_s=-1, live_interval_s=0.01)


@pytest.mark.req("CFG-06", "RES-26")
def test_slow_server_is_waited_for_while_it_lives(server: ScriptedServer) -> None:
    lives = [live("a-0"), live("a-1"), GONE, HangUp(), live("a-1"), GONE, live("a-2")]
    LiveScript(lives, enough=20).install(server)
    assert len(watching(server).infer(CALL)) == 1


@pytest.mark.req("CFG-06", "SYNC-07")
@pytest.mark.parametrize(
    "replies",
    [[live("a-0"), each] for each in (GONE, HangUp(), problem("unauthorized", "no", "it"))]
    + [[None]],
)
def test_call_ends_when_the_server_stops_living(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, replies: list[Reply]
) -> None:
    monkeypatch.setattr(client_module, "_LIVE_TIMEOUT_S", 0.2 if replies == [None] else 60.0)
    found = "the server is gone: /live/ failed 3 times in a row"
    script = LiveScript(replies, enough=100)
    script.install(server)
    with pytest.raises(ServerUnreachable, match=found) as caught:
        watching(server).infer(CALL)
    assert script.seen == len(replies) + 2
    script.enough = 0
    assert f"POST {server.base_url}/infer/: " in str(caught.value)


@pytest.mark.req("CFG-06")
def test_connections_have_tcp_keep_alive(server: ScriptedServer) -> None:
    found, port = list[tuple[int, int]](), urlsplit(server.base_url).port
    tcp = socket.AF_INET, socket.SOCK_STREAM

    def look(_: object) -> Reply:
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.fromfd(int(descriptor), *tcp) as peer:
                if peer.getpeername()[1:] == (port,):
                    on = peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    found.append((on, peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)))
        return health()

    server.routes[HEALTH] = look
    RolloutClient(server.base_url).health()
    assert found == [(1, 30)]


@pytest.mark.req("CFG-06", "SRV-07")
def test_call_that_ends_early_closes_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = list[socket.socket]()

        def hold_the_first() -> None:
            held.append(listening.accept()[0])
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hold_the_first, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match="is gone"):
            RolloutClient(url, live_interval_s=0.01).infer(CALL)
        with held[0] as connection:
            connection.settimeout(_LIMIT_S)
            while connection.recv(4096):
                pass


@pytest.mark.req("DIST-05")
def test_only_temporary_errors_are_retried() -> None:
    assert may_pass(ServerUnreachable("no"))
    assert not of_a_proxy(ServerUnreachable("no"))
    for kind in PROBLEM_TITLES:
        error = ProblemError(Problem.of(kind, "", ""))
        assert needs_push(error) is (kind == "push-needed")
        temporary = error.problem.status in (429, 502, 503, 504)
        assert may_pass(error) is (temporary and not needs_push(error))
        assert not of_a_proxy(error), "its type is not that of a proxy"


@pytest.mark.req("SRV-06", "SRV-08", "WIRE-06")
@pytest.mark.parametrize(("token", "sent"), [("s3cret\n", "Bearer s3cret"), (" \n", None)])
def test_every_call_sends_the_token_of_the_environment_and_no_log_has_it(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    token: str,
    sent: str | None,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", "httpcore")  # which a server in this process would have quieted
    settings = info(RepeatTerminateConfig(enabled=True, max_object_keys=3), max_num_seqs=7)
    server.routes |= {"GET /info/": lambda _: settings, INFER: lambda _: [envelope([5], [1])]}
    client = RolloutClient(server.base_url)
    client.wait_until_pushable()
    client.world_size()
    assert client.info() == settings
    client.infer(CALL)
    RolloutClient(server.base_url, token="").live()
    assert server.authorizations == [*[sent] * 4, None]
    assert caplog.records, "the HTTP library logs at this level"
    assert "s3cret" not in caplog.text


@pytest.mark.req("SRV-06", "DEP-01")
def test_unusable_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "two words")
    with pytest.raises(ContractError) as caught:
        RolloutClient("http://a:1")
    assert caught.value.where == TOKEN_VARIABLE
    assert "two words" not in str(caught.value)


@pytest.mark.req("SRV-06", "DEP-01")
@pytest.mark.parametrize(
    ("variable", "found"),
    [(None, "the learner has none"), (TOKEN_FILE_VARIABLE, "refuses the token of")],
)
def test_missing_or_wrong_token_is_reported_with_what_to_set(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    found: str,
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "token"))
    server.routes["GET /info/"] = lambda _: problem("unauthorized", "no valid token", "header")
    with pytest.raises(ContractError) as caught:
        RolloutClient(server.base_url).info()
    assert server.authorizations == [None if variable is None else "Bearer s3cret"]
    assert caught.value.where == f"GET {server.base_url}/info/"
    assert found in caught.value.found
    assert (variable or TOKEN_VARIABLE) in str(caught.value)
    assert "s3cret" not in str(caught.value)


# --- Wrong answers: one size limit, one deadline, typed fields ---------------------------


CLOSE, FINISH = "POST /close_communicator/", "POST /finish_weight_update/"
STATUS = WeightStatus(state="READY", weights_version=3, server_epoch="e-0")
ROUTES: dict[str, Callable[[RolloutClient], object]] = {
    "GET /info/": RolloutClient.info,
    INFER: lambda client: client.infer(CALL),
    "POST /sleep/": RolloutClient.sleep,
    CLOSE: lambda client: client.close_communicator(GroupCall(attempt="a")),
    FINISH: lambda client: client.finish_weight_update(GroupCall(attempt="a")),
}
HONEST: dict[str, Any] = {
    "GET /info/": info().model_dump(),
    INFER: [envelope([5, 6], [1, 2], 7, "text").model_dump()],
    "POST /sleep/": STATUS.model_dump(),
    CLOSE: STATUS.model_dump(),
    FINISH: report(3, "e-0").model_dump(),
}

CHOICE = "0.response.choices.0"
FAULTS = [
    ("GET /info/", "weights_version", -1),
    ("POST /sleep/", "state", "BUSY"),
    (FINISH, "seconds", {"pause": 1.0}),
    (FINISH, "seconds.transfer", -1.0),
    (INFER, f"{CHOICE}.index", -1),
]


@pytest.mark.req("RES-25")
@pytest.mark.parametrize(
    ("route", "reply", "found"),
    [
        ("GET /info/", "", ""),
        ("GET /info/", "<title>502</title>", "<title>502"),
        ("GET /info/", " " * 200_000, "longer than 100000 bytes"),
        (INFER, " " * 200_000, "longer than 100000 bytes"),
        (INFER, "[" * 50_000, "[[["),
        (INFER, [], "0 envelopes for 1 requests"),
        *(
            (route, changed(field, value, HONEST[route]), re.sub(r"\.?(\d)", r"[\1]", field))
            for route, field, value in FAULTS
        ),
    ],
)
def test_answer_that_breaks_the_contract_names_the_server_and_the_fault(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, route: str, reply: Reply, found: str
) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 100_000)
    server.routes[route] = lambda _: reply
    with pytest.raises(ProblemError) as caught:
        ROUTES[route](RolloutClient(server.base_url))
    assert caught.value.problem.title == "Not an answer of a rollout server"
    assert caught.value.problem.where == route.replace(" ", f" {server.base_url}")
    assert found in caught.value.problem.detail


@pytest.mark.req("RES-25")
@pytest.mark.parametrize("asked", ["return_details", "logprobs"])
def test_an_answer_without_what_was_requested_names_it(server: ScriptedServer, asked: str) -> None:
    bare = envelope([5], [1])
    bare.response.prompt_token_ids = None
    server.routes[INFER] = lambda _: [bare]
    call = CALL.model_copy(update={"request_config": RequestConfig.model_validate({asked: True})})
    with pytest.raises(ProblemError) as caught:
        RolloutClient(server.base_url).infer(call)
    assert re.search(r"\[0\]\.response.*(ids|logprobs) are missing", str(caught.value))


@pytest.mark.req("RES-25", "SYNC-04", "CFG-06")
@pytest.mark.parametrize("route", ROUTES)
def test_call_without_an_answer_ends_at_its_deadline(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    probes = route in ("GET /info/", CLOSE)
    monkeypatch.setattr(client_module, "PHASE_MARGIN_S", 0.0)
    monkeypatch.setattr(client_module, "_PROBE_TIMEOUT_S", 0.2)
    ended = threading.Event()
    server.routes[route] = lambda _: ended.wait(_LIMIT_S) and HONEST[route]
    client = RolloutClient(server.base_url, _LIMIT_S if probes else 0.2, infer_timeout_s=0.2)
    with pytest.raises(ServerUnreachable, match=f"{server.base_url}.*timed out"):
        ROUTES[route](client)
    ended.set()


@pytest.mark.req("RES-26", "CFG-06")
def test_answer_may_take_longer_than_a_connection(server: ScriptedServer) -> None:
    never, client = threading.Event(), RolloutClient(server.base_url, timeout_s=0.3)
    for route in (INFER, FINISH):
        server.routes[route] = lambda _: never.wait(0.6) or HONEST[route]  # noqa: B023
        assert ROUTES[route](client)
