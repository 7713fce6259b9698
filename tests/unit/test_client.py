"""The client of one rollout server: over real HTTP where time or connections count, else respx."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import respx

from learner.rollout.client import (
    OtherWeights,
    RolloutClient,
    ServerUnreachable,
    TooManyCalls,
    may_pass,
    needs_push,
)
from shared_contracts.errors import PROBLEM_TITLES, ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, WorldSize
from shared_contracts.weights import WeightStatus
from tests.unit.scripted_server import (
    HangUp,
    Reply,
    ScriptedServer,
    envelope,
    health,
    info,
    live,
    problem,
    response,
    scripted_server,
)

CALL = InferCall.model_validate(
    {
        "infer_requests": [
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": "Detect."}],
                    }
                ],
                "images": ["/data/a.png"],
                "uuid": "train.jsonl:1",
            }
        ],
        "request_config": {"max_tokens": 8, "temperature": 0.0, "seed": 7, "return_details": True},
    }
)


URL = "http://server.test"

# `respx_mock` answers at URL without a socket.
pytestmark = pytest.mark.respx(base_url=URL)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def authorizations(mocked: respx.MockRouter) -> list[str | None]:
    return [call.request.headers.get("Authorization") for call in mocked.calls]


def nobodys_url() -> str:
    """A loopback address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


BAD_GATEWAY = (
    "<!DOCTYPE html>\n<html><head>\n<title>502 Bad Gateway\n &amp; more</title>"
    "<style>b {color: red}</style></head><body><h1>502</h1><hr>nginx</body></html>"
)


FOREIGN = (200, "Not an answer of a rollout server")


@pytest.mark.req("WIRE-05", "WIRE-02")
@pytest.mark.parametrize(
    ("reply", "kind", "detail", "place"),
    [
        (problem("invalid-request", "no", "at"), PROBLEM_TITLES["invalid-request"], "no", " at"),
        (
            problem("weight-update-order", "no", "at"),
            PROBLEM_TITLES["weight-update-order"],
            "no",
            " at",
        ),
        ((502, BAD_GATEWAY), (502, "Bad Gateway"), "an HTML page: 502 Bad Gateway & more", ""),
        ([], FOREIGN, "0 envelopes for 1 requests", ""),
        ([envelope([5], [1])] * 2, FOREIGN, "2 envelopes for 1 requests", ""),
    ],
    ids=["problem", "another conflict", "page", "no answer", "two answers"],
)
def test_whatever_is_no_answer_is_a_problem_with_its_place(
    respx_mock: respx.MockRouter, reply: Reply, kind: tuple[int, str], detail: str, place: str
) -> None:
    """Only weights that differ are `OtherWeights`."""
    respx_mock.post("/infer/").mock(response(reply))
    with RolloutClient(URL) as client, pytest.raises(ProblemError) as caught:
        client.infer(CALL)
    found = caught.value.problem
    assert (found.status, found.title, found.detail) == (*kind, detail)
    assert found.where == f"POST {URL}/infer/{place}"
    assert may_pass(caught.value) is (found.status == 502)
    assert not isinstance(caught.value, OtherWeights)


@pytest.mark.req("WIRE-05")
def test_a_success_with_a_foreign_body_is_a_problem_too(respx_mock: respx.MockRouter) -> None:
    respx_mock.get("/get_world_size/").mock(response("<html>hello</html>"))
    with RolloutClient(URL) as client, pytest.raises(ProblemError) as caught:
        client.world_size()
    assert caught.value.problem.where == f"GET {URL}/get_world_size/"
    assert caught.value.problem.title == "Not an answer of a rollout server"
    assert caught.value.problem.detail == "an HTML page: hello"


@pytest.mark.req("SYNC-04")
def test_a_server_that_is_not_there_fails_in_time_and_says_what_to_do() -> None:
    url = nobodys_url()
    with RolloutClient(url, timeout_s=0.5) as client, pytest.raises(ContractError) as caught:
        client.wait_until_pushable()
    assert caught.value.where == f"GET {url}/health/"
    assert "Connection refused" in caught.value.found
    assert "rollout-server serve" in caught.value.do
    assert "servers[].base_url" in caught.value.do


def test_a_server_that_accepts_and_stays_silent_fails_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with (
            RolloutClient(url, timeout_s=0.5) as client,
            pytest.raises(ContractError, match="timed out"),
        ):
            client.wait_until_pushable()


def test_a_server_that_is_starting_is_waited_for(respx_mock: respx.MockRouter) -> None:
    starting = response(problem("not-ready", "the engines are starting", "replicas"))
    route = respx_mock.get("/health/")
    route.side_effect = [starting] * 3 + [response(health(version=4))]
    with RolloutClient(URL, timeout_s=20.0) as client:
        client.wait_until_pushable()
    assert route.call_count == 4


@pytest.mark.req("SYNC-05", "SYNC-07")
@pytest.mark.parametrize("kind", ["weights-poisoned", "push-needed"])
def test_a_server_that_only_a_push_can_heal_is_reached(
    kind: str, respx_mock: respx.MockRouter
) -> None:
    respx_mock.get("/health/").mock(response(problem(kind, "it has other weights", "weights")))
    with RolloutClient(URL, timeout_s=60.0) as client:
        client.wait_until_pushable()
    assert respx_mock.calls.call_count == 1


def test_a_server_that_never_gets_ready_is_named_with_its_own_reason(
    respx_mock: respx.MockRouter,
) -> None:
    starting = problem("not-ready", "the engines are starting", "replicas")
    respx_mock.get("/health/").mock(response(starting))
    with (
        RolloutClient(URL, timeout_s=0.3) as client,
        pytest.raises(ContractError, match="the engines are starting"),
    ):
        client.wait_until_pushable()


@pytest.mark.parametrize("reply", [(404, "not here"), "<html>a web site</html>"])
def test_a_server_of_another_kind_is_refused_at_once(
    respx_mock: respx.MockRouter, reply: object
) -> None:
    respx_mock.get("/health/").mock(response(reply))
    with (
        RolloutClient(URL, timeout_s=60.0) as client,
        pytest.raises(ContractError, match=r"servers\[\].base_url"),
    ):
        client.wait_until_pushable()
    assert respx_mock.calls.call_count == 1


def test_proxies_of_the_environment_are_ignored(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, nobodys_url())
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server.routes["POST /infer/"] = lambda _: [envelope([5], [1])]
    with RolloutClient(server.base_url, timeout_s=60.0) as client:
        assert client.health().status == "ok"
        assert len(client.infer(CALL)) == 1


@pytest.mark.req("CFG-06")
def test_a_positive_infer_timeout_bounds_the_call(server: ScriptedServer) -> None:
    ended = threading.Event()
    server.routes["POST /infer/"] = lambda _: ended.wait(5.0) and []
    client = RolloutClient(server.base_url, timeout_s=60.0, infer_timeout_s=0.2)
    with client, pytest.raises(ServerUnreachable, match=r"POST .*/infer/: timed out"):
        client.infer(CALL)
    ended.set()


# --- A server that is slow, and one that is gone ----------------------------------------


@dataclass
class Looks:
    """Replies of `/live/`, the last one again and again; `/infer/` answers after `enough`."""

    replies: list[Reply]
    enough: int
    seen: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def script(self, server: ScriptedServer) -> None:
        server.routes |= {"GET /live/": self.look, "POST /infer/": self.answer}

    def look(self, _: object) -> Reply:
        reply = self.replies[min(self.seen, len(self.replies) - 1)]
        self.seen += 1
        if self.seen == self.enough:
            self.done.set()
        return reply

    def answer(self, _: object) -> Reply:
        assert self.done.wait(20)
        return [envelope([5], [1])]


GONE = problem("not-ready", "no upstream", "gateway")


def watching(server: ScriptedServer, limit: float | None = None) -> RolloutClient:
    return RolloutClient(
        server.base_url, timeout_s=0.2, infer_timeout_s=limit, live_interval_s=0.01
    )


@pytest.mark.req("CFG-06")
@pytest.mark.parametrize("limit", [None, 0, -1])
def test_a_slow_server_is_waited_for_while_it_lives(
    server: ScriptedServer, limit: float | None
) -> None:
    looks = Looks([live("a-0"), live("a-1"), GONE, HangUp(), live("a-1"), GONE, live("a-2")], 40)
    looks.script(server)
    with watching(server, limit) as client:
        assert len(client.infer(CALL, server_epoch="a-0")) == 1


@pytest.mark.req("CFG-06")
@pytest.mark.parametrize("reply", [GONE, HangUp(), "<html>a web site</html>"])
def test_a_server_that_stops_living_is_given_up(server: ScriptedServer, reply: Reply) -> None:
    looks = Looks([live("a-0"), reply], enough=100)
    looks.script(server)
    with watching(server) as client, pytest.raises(ServerUnreachable) as caught:
        client.infer(CALL)
    looks.done.set()
    assert looks.seen == 4
    assert f"POST {server.base_url}/infer/: the server is gone" in str(caught.value)
    assert "GET /live/ failed 3 times in a row" in str(caught.value)


@pytest.mark.req("CFG-06", "SYNC-07")
@pytest.mark.parametrize(
    ("epoch", "epochs"), [("a-0", ["b-0"]), (None, ["a-0", "a-1", "b-0"]), ("a-0", ["a-3", "b-3"])]
)
def test_a_call_is_given_up_when_another_process_answers(
    server: ScriptedServer, epoch: str | None, epochs: list[str]
) -> None:
    looks = Looks([live(one) for one in epochs], enough=100)
    looks.script(server)
    with watching(server) as client, pytest.raises(ServerUnreachable, match="was restarted"):
        client.infer(CALL, epoch)
    looks.done.set()
    assert looks.seen == len(epochs)


@pytest.mark.req("CFG-06", "SRV-07")
def test_a_call_that_is_given_up_closes_its_connection() -> None:
    """Then the server ends what it generates for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []
        closed = threading.Event()

        def hold_the_first() -> None:
            held.append(listening.accept()[0])
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        def read_to_the_end() -> None:
            with held[0] as connection:
                while connection.recv(4096):
                    pass
            closed.set()

        threading.Thread(target=hold_the_first, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with (
            RolloutClient(url, live_interval_s=0.01) as client,
            pytest.raises(ServerUnreachable, match="is gone"),
        ):
            client.infer(CALL)
        threading.Thread(target=read_to_the_end, daemon=True).start()
        assert closed.wait(20)


@pytest.mark.req("DIST-05")
def test_an_answer_that_is_cut_off_is_a_server_out_of_reach(server: ScriptedServer) -> None:
    server.routes["POST /infer/"] = lambda _: HangUp(after=[envelope([5], [1])])
    with RolloutClient(server.base_url) as client, pytest.raises(ServerUnreachable):
        client.infer(CALL)


# --- What a refusal means ---------------------------------------------------------------


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7.0), ("Fri, 31 Dec 1999 23:59:59 GMT", None), (None, None)]
)
def test_a_busy_server_says_when_to_come_back(
    respx_mock: respx.MockRouter, said: str | None, seconds: float | None
) -> None:
    headers = {} if said is None else {"Retry-After": said}
    busy = (*problem("too-many-calls", "try again", "POST /infer/"), headers)
    respx_mock.post("/infer/").mock(response(busy))
    with RolloutClient(URL) as client, pytest.raises(TooManyCalls) as caught:
        client.infer(CALL)
    assert caught.value.retry_after_s == seconds


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize("kind", PROBLEM_TITLES)
def test_only_what_passes_by_itself_may_be_asked_again(kind: str) -> None:
    error = ProblemError(Problem.of(kind, "", ""))
    healed_by_a_push = kind in ("push-needed", "weights-poisoned")
    assert needs_push(error) is healed_by_a_push
    assert may_pass(error) is (
        error.problem.status in (429, 502, 503, 504) and not healed_by_a_push
    )
    assert may_pass(ServerUnreachable("no"))


# --- The wire ---------------------------------------------------------------------------


@pytest.mark.req("WIRE-01", "WIRE-02")
def test_a_call_travels_with_the_peers_field_names_and_without_nulls(
    respx_mock: respx.MockRouter,
) -> None:
    respx_mock.post("/infer/").mock(response([envelope([5, 6], [1, 2], seed=7, text="{}")]))
    with RolloutClient(URL) as client:
        (answer,) = client.infer(CALL)
    body = json.loads(respx_mock.calls.last.request.content)
    assert body["infer_requests"] == [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "Detect."}],
                }
            ],
            "images": ["/data/a.png"],
            "uuid": "train.jsonl:1",
        }
    ]
    assert InferCall.model_validate(body) == CALL
    assert answer.response.prompt_token_ids == [1, 2]
    assert answer.response.choices[0].token_ids == [5, 6]
    assert answer.coordexp.seed == 7


# --- The token --------------------------------------------------------------------------


@pytest.mark.req("SRV-06")
def test_every_call_carries_the_token_of_the_environment(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret\n")
    replies = {"/health/": health(), "/get_world_size/": WorldSize(world_size=1), "/info/": info()}
    for path, reply in replies.items():
        respx_mock.get(path).mock(response(reply))
    respx_mock.post("/infer/").mock(response([envelope([5], [1])]))
    with RolloutClient(URL) as client:
        client.wait_until_pushable()
        client.world_size()
        client.info()
        client.infer(CALL)
    assert authorizations(respx_mock) == ["Bearer s3cret"] * 4


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ROLLOUT_SERVER_TOKEN_FILE names; the test writes it."""
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    return tmp_path / "token"


@pytest.mark.req("SRV-06", "DEP-01")
def test_a_token_in_a_file_is_carried_too(respx_mock: respx.MockRouter, token_file: Path) -> None:
    token_file.write_text("s3cret\n")
    respx_mock.get("/info/").mock(response(info()))
    with RolloutClient(URL) as client:
        client.info()
    respx_mock.get("/info/").mock(response(problem("unauthorized", "no valid token", "header")))
    with RolloutClient(URL) as client, pytest.raises(ContractError) as caught:
        client.info()
    assert authorizations(respx_mock) == ["Bearer s3cret"] * 2
    assert f"refuses the token of {TOKEN_FILE_VARIABLE}" in caught.value.found


@pytest.mark.req("SRV-06", "DEP-01")
@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "cannot be read"), ("\n", "is empty"), ("two words", "white space"), ("b", "another")],
)
def test_a_token_file_that_cannot_be_used_is_refused_and_not_shown(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, found: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    if content is not None:
        token_file.write_text(content)
    with pytest.raises(ContractError, match=found) as caught:
        RolloutClient("http://127.0.0.1:9")
    assert caught.value.where == TOKEN_FILE_VARIABLE
    assert "s3cret" not in str(caught.value)
    assert "two words" not in str(caught.value)


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("empty", [None, "", " \n"])
def test_without_a_token_no_call_carries_one(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, empty: str | None
) -> None:
    if empty is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, empty)
    respx_mock.get("/info/").mock(response(info()))
    with RolloutClient(URL) as client:
        client.info()
    assert authorizations(respx_mock) == [None]


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize(
    ("token", "found"),
    [(None, "the learner has none"), ("s3cret", f"refuses the token of {TOKEN_VARIABLE}")],
)
def test_a_missing_or_wrong_token_is_told_with_what_to_set(
    respx_mock: respx.MockRouter, monkeypatch: pytest.MonkeyPatch, token: str | None, found: str
) -> None:
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    respx_mock.get("/info/").mock(response(problem("unauthorized", "no valid token", "header")))
    with RolloutClient(URL) as client, pytest.raises(ContractError) as caught:
        client.info()
    assert caught.value.where == f"GET {URL}/info/"
    assert found in caught.value.found
    assert f"{TOKEN_VARIABLE}" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("token", ["two words", "s3crét", "s3cret\x00"])
def test_a_token_no_header_can_carry_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr("os.environ", {TOKEN_VARIABLE: token})
    with pytest.raises(ContractError) as caught:
        RolloutClient("http://127.0.0.1:9")
    assert caught.value.where == TOKEN_VARIABLE
    assert token not in str(caught.value)


@pytest.mark.req("SRV-06", "SRV-08")
def test_the_token_is_in_no_log(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    caplog.set_level("DEBUG", "httpcore")  # which a server in this process would have quieted
    with caplog.at_level("DEBUG"), RolloutClient(server.base_url) as client:
        client.info()
    assert server.authorizations == ["Bearer s3cret"]
    assert caplog.records, "the HTTP library logs at this level"
    assert "s3cret" not in caplog.text


# --- What a server is -------------------------------------------------------------------


@pytest.mark.req("WIRE-06")
def test_a_server_tells_what_it_is(respx_mock: respx.MockRouter) -> None:
    guard = RepeatTerminateConfig(enabled=True, max_object_keys=3)
    respx_mock.get("/info/").mock(response(info(guard, max_num_seqs=7)))
    with RolloutClient(URL) as client:
        assert client.info() == info(guard, max_num_seqs=7)


@pytest.mark.req("WIRE-03")
def test_a_server_of_other_weights_ends_the_run_plainly(respx_mock: respx.MockRouter) -> None:
    refusal = "version 3 is held, 5 is expected"
    other = problem("other-weights", refusal, "expected_weights_version")
    respx_mock.post("/infer/").mock(response(other))
    with RolloutClient(URL) as client, pytest.raises(OtherWeights) as caught:
        client.infer(CALL)
    assert isinstance(caught.value, RunError)
    assert caught.value.problem.status == 409
    assert f"POST {URL}/infer/" in str(caught.value)
    assert refusal in str(caught.value)
    assert "If the server was not restarted" in str(caught.value)


@pytest.mark.req("SYNC-07")
def test_a_sign_of_life_that_takes_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow answer would hold the next one up until the learner counts as gone."""
    monkeypatch.setattr("learner.rollout.client.KEEP_EVERY_S", 0.2)
    released = threading.Event()

    def late(_: object) -> Reply:
        released.wait(5.0)
        return WeightStatus(state="READY", weights_version=1, server_epoch="epoch-1")

    with scripted_server() as server, RolloutClient(server.base_url) as client:
        server.routes["POST /keep_communicator/"] = late
        with pytest.raises(ServerUnreachable, match="timed out"):
            client.keep_communicator("attempt")
        released.set()
