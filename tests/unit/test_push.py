"""What a push sends over a real gloo group, and what is verified of it."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.weights import BaseWeights, MergedWeights, OneSource
from shared_contracts.digests import sample
from shared_contracts.errors import Problem
from shared_contracts.weights import AdapterMeta, DtypeName, ParameterMeta
from tests.unit.push_worker import (
    BUCKET_BYTES,
    Falling,
    Weights,
    Worker,
    assert_arrived,
    pusher_to,
    sent_by,
)
from tests.unit.scripted_server import HangUp, Reply, ScriptedServer, problem, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


MASK = 2**64 - 1


def mixed(position: int) -> int:
    """The multiplier of a position, in plain integers modulo 2**64."""
    x = position * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def digest_by_hand(weight: Tensor, columns: list[int] | None) -> str:
    """The digest of a bfloat16 tensor, element by element."""
    rows = weight.shape[0] if weight.ndim else 1
    bits = weight.contiguous().view(torch.int16).reshape(rows, -1) if weight.numel() else None
    total = 0
    for r in range(rows if bits is not None else 0):
        assert bits is not None
        width = bits.shape[1]
        for c in range(width) if columns is None else columns:
            element = int(bits[r, c])
            if element & 0x7F80:
                total += element * mixed(r * width + c)
    return f"{total & MASK:016x}"


@pytest.mark.req("SYNC-03", "SYNC-10")
@pytest.mark.parametrize("bucket_bytes", [1, 100, BUCKET_BYTES, 2**20])
def test_every_tensor_arrives_bit_for_bit_in_buckets_of_any_size(
    server: ScriptedServer, bucket_bytes: int
) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model, bucket_bytes=bucket_bytes) as pusher:
        report = pusher.push(version=1)
    assert_arrived(worker, model)
    assert report.status.weights_version == 1
    assert report.bytes == sum(t.nbytes for t in sent_by(model).values())
    assert {"pause", "transfer", "load", "verify", "caches", "send", "total"} <= set(report.seconds)
    assert report.seconds["total"] > 0


@pytest.mark.req("SYNC-10")
def test_a_push_logs_its_phases_its_bytes_and_its_rate(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    Worker(server)
    with caplog.at_level(logging.INFO, "learner.rollout.sync.push"), pusher_to(server) as pusher:
        report = pusher.push(version=1)
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (f"{report.bytes} bytes", "GB/s", "pause 0.100 s", "verify 0.100 s", "caches"):
        assert part in line


def calls_of_pushes(server: ScriptedServer) -> list[str]:
    """Without the signs of life that are given beside them."""
    return [route for route, _ in server.calls if route != "POST /keep_communicator/"]


@pytest.mark.req("SYNC-03", "SYNC-05")
def test_a_push_is_four_calls_however_many_parameters(server: ScriptedServer) -> None:
    Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
        first = calls_of_pushes(server)
        pusher.push(version=2)
    assert first == [
        "GET /get_world_size/",
        "POST /init_communicator/",
        "POST /start_weight_update/",
        "POST /update_weights/",
        "POST /finish_weight_update/",
    ]
    again = calls_of_pushes(server)[len(first) :]
    assert again == [*first[2:], "POST /close_communicator/"]
    for route in first[2:]:
        assert [body["version"] for body in server.bodies(route)] == [1, 2]


@pytest.mark.req("SYNC-05")
def test_the_manifest_goes_first_in_the_type_of_the_engines(server: ScriptedServer) -> None:
    Worker(server)
    model = Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
    (manifest,) = server.bodies("POST /start_weight_update/")
    assert manifest["adapter"] is None
    assert manifest["parameters"] == [
        {"name": name, "dtype": "bfloat16", "shape": list(p.shape)}
        for name, p in model.named_parameters()
    ]


@pytest.mark.req("SYNC-06")
def test_digests_are_of_what_verification_asks_for(server: ScriptedServer) -> None:
    Worker(server)
    model = Weights()
    with pusher_to(server, model=model, verify="off") as pusher:
        assert pusher.push(version=1).verified == 0
    with pusher_to(server, model=model, verify="sample") as pusher:
        pusher.push(version=2)
    with pusher_to(server, model=model, verify="full") as pusher:
        pusher.push(version=3)
    off, some, full = (body["digests"] for body in server.bodies("POST /finish_weight_update/"))
    assert off == []
    chosen = sample(MergedWeights(model).metadata("bfloat16"), version=2)
    assert {digest["name"]: digest["columns"] for digest in some} == chosen
    assert {digest["name"]: digest["columns"] for digest in full} == dict.fromkeys(sent_by(model))
    for digest in [*some, *full]:
        weight, columns = sent_by(model)[digest["name"]], digest["columns"]
        assert digest["digest"] == digest_by_hand(weight, columns), digest["name"]


@pytest.mark.req("SYNC-03")
def test_the_newest_values_travel_not_those_of_the_first_push(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
        with torch.no_grad():
            model.wide.add_(1.0)
        pusher.push(version=2)
    assert_arrived(worker, model)


@pytest.mark.req("SYNC-06")
def test_parameters_that_differ_at_the_server_are_named(server: ScriptedServer) -> None:
    worker = Worker(server)
    refused = Problem.of(
        "weights-differ",
        "server: replica 0 does not hold wide as it was sent",
        "finish: verify",
        [{"where": "wide", "replica": 0, "detail": "..."}, {"where": "odd", "replica": 0}],
    )
    server.routes["POST /finish_weight_update/"] = lambda _: (refused.status, refused)
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError, match=r"at wide, odd: .*does not hold") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")
        assert caught.value.parameters == ("wide", "odd")
        server.routes["POST /finish_weight_update/"] = worker.finish
        pusher.push(version=1)
    assert worker.groups_formed == 2


@pytest.mark.req("SYNC-06", "RES-25")
def test_a_refusal_whose_faults_name_nothing_is_a_broken_push_too(server: ScriptedServer) -> None:
    Worker(server)
    faults: list[dict[str, Any]] = [{}, {"where": 5}, {"where": "odd\x1b[2J"}]
    refused = Problem.of("weights-differ", "it says so", "finish: verify", faults)
    server.routes["POST /finish_weight_update/"] = lambda _: (refused.status, refused)
    with pusher_to(server) as pusher, pytest.raises(WeightSyncError, match="it says") as caught:
        pusher.push(version=1)
    assert caught.value.parameters == ()
    assert r"did not have to compare: 5, odd\x1b[2J" in str(caught.value)


@pytest.mark.req("RES-25", "SYNC-06")
@pytest.mark.parametrize("route", ["POST /start_weight_update/", "POST /finish_weight_update/"])
def test_parameters_that_a_server_was_not_asked_to_compare_are_told_apart(
    server: ScriptedServer, route: str
) -> None:
    ghosts = [f"ghost{number}.{'y' * 5000}" for number in range(200)]
    faults = [{"where": name} for name in ["wide", *ghosts, "wide"]]
    status, said = problem("weights-differ", "it says so", "verify")
    refused = said.model_copy(update={"errors": faults})
    Worker(server)
    server.routes[route] = lambda _: (status, refused)
    with pusher_to(server, verify="full") as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.push(version=1)
    compared = route == "POST /finish_weight_update/"
    assert caught.value.parameters == (("wide",) if compared else ())
    told = str(caught.value)
    assert (
        "it names parameters that it did not have to compare: " + ("" if compared else "wide, ")
        in told
    )
    assert "ghost0" in told
    assert len(told) < 2000


@pytest.mark.req("RES-25", "SYNC-06")
def test_what_a_manifest_is_said_to_lack_is_bounded(server: ScriptedServer) -> None:
    faults = [{"where": f"ghost{number}.{'y' * 5000}"} for number in range(200)]
    status, said = problem("manifest-mismatch", "it says so", "parameters")
    refused = said.model_copy(update={"errors": faults})
    Worker(server)
    server.routes["POST /start_weight_update/"] = lambda _: (status, refused)
    with pusher_to(server) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.push(version=1)
    assert len(str(caught.value)) < 2000
    assert "and 195 more" in str(caught.value)
    assert len(caught.value.parameters) == 32
    assert max(map(len, caught.value.parameters)) < 250


@pytest.mark.req("SYNC-06")
def test_a_server_that_compares_less_than_it_was_told_to_is_not_believed(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    server.routes["POST /finish_weight_update/"] = lambda body: worker.finish(
        body | {"digests": body["digests"][1:]}
    )
    with pusher_to(server, verify="full") as pusher:
        with pytest.raises(WeightSyncError, match="compared 5 of 6 parameters") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")


class OverBase(BaseWeights):
    """What passes for an adapter, and the model it is over."""

    adapter = AdapterMeta(r=1, lora_alpha=1, target_modules=["wide"])

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.model = Weights()
        self.base = BaseWeights(self.model)


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_the_base_of_an_adapter_is_told_once_in_each_group(server: ScriptedServer) -> None:
    worker, source = Worker(server), OverBase()
    with pusher_to(server, choice=OneSource(source)) as pusher:
        pusher.push(version=1)
        pusher.push(version=2)
        pusher.abandon()
        worker.drop_group()
        pusher.push(version=3)
        server.routes["POST /start_weight_update/"] = lambda _: problem("adapter-refused", "!", "a")
        with pytest.raises(WeightSyncError):
            pusher.push(version=4)
        server.routes["POST /start_weight_update/"] = worker.start
        pusher.push(version=4)
        pusher.push(version=5)
    bodies = server.bodies("POST /start_weight_update/")
    told = [body["version"] for body in bodies if body["base"] is not None]
    assert told == [1, 3, 4]
    first, again = bodies[0]["base"], bodies[2]["base"]
    assert first["parameters"] == again["parameters"]
    assert [p["name"] for p in first["parameters"]] == list(sent_by(source.model))
    chosen = sample(source.base.metadata("bfloat16"), version=1)
    assert {digest["name"]: digest["columns"] for digest in first["digests"]} == chosen
    for digest in first["digests"]:
        weight = sent_by(source.model)[digest["name"]]
        assert digest["digest"] == digest_by_hand(weight, digest["columns"]), digest["name"]


@pytest.mark.req("SYNC-06")
def test_no_base_is_told_where_nothing_is_verified_and_beside_full_weights(
    server: ScriptedServer,
) -> None:
    Worker(server)
    with pusher_to(server, verify="off", choice=OneSource(OverBase())) as pusher:
        pusher.push(version=1)
    with pusher_to(server, verify="full") as pusher:
        pusher.push(version=2)
    assert [b["base"] for b in server.bodies("POST /start_weight_update/")] == [None, None]


@pytest.mark.req("SYNC-01")
def test_a_push_that_failed_is_made_with_what_is_chosen_then(server: ScriptedServer) -> None:
    worker = Worker(server)
    model = Weights()

    class Unwilling(MergedWeights):
        def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
            raise LookupError("layers differ in rank")

    choice = Falling(Unwilling(model), MergedWeights(model))
    with pusher_to(server, choice=choice) as pusher:
        assert pusher.push(version=1).status.weights_version == 1
        assert [type(error) for error in choice.errors] == [LookupError]
        assert_arrived(worker, model)
        server.routes["POST /start_weight_update/"] = lambda _: problem("internal", "!", "start")
        with pytest.raises(WeightSyncError):
            pusher.push(version=2)
    assert [type(error) for error in choice.errors] == [LookupError, WeightSyncError]


LOST = {
    "reach": ("GET /get_world_size/", problem("not-ready", "starting", "replicas")),
    "rendezvous": ("POST /init_communicator/", problem("group-port-taken", "!", "port")),
    "no group": ("POST /start_weight_update/", problem("weight-update-order", "no group", "x")),
    "gone": ("POST /start_weight_update/", HangUp()),
}
FAILED = {
    "refused": ("POST /start_weight_update/", problem("adapter-refused", "DoRA", "adapter")),
    "broken": ("POST /start_weight_update/", problem("internal", "!", "start")),
    "gone in the transfer": ("POST /update_weights/", HangUp()),
    "order in the transfer": ("POST /update_weights/", problem("weight-update-order", "!", "x")),
    "gone in the end": ("POST /finish_weight_update/", HangUp()),
}


@pytest.mark.req("SYNC-01", "SYNC-07")
@pytest.mark.parametrize(
    ("route", "reply", "failures"),
    [(*lost, 0) for lost in LOST.values()] + [(*failed, 1) for failed in FAILED.values()],
    ids=[*LOST, *FAILED],
)
def test_a_server_that_is_lost_before_the_transfer_says_nothing_about_what_is_pushed(
    server: ScriptedServer, route: str, reply: Reply, failures: int
) -> None:
    Worker(server)
    choice = Falling(MergedWeights(Weights()), MergedWeights(Weights()))
    works = server.routes[route]
    replies = [reply]
    server.routes[route] = lambda body: replies.pop() if replies else works(body)
    with pusher_to(server, choice=choice) as pusher:
        if failures:
            pusher.push(version=1)
        else:
            with pytest.raises(WeightSyncError):
                pusher.push(version=1)
            pusher.push(version=1)
    assert len(choice.errors) == failures
