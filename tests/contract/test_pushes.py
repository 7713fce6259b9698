"""The server's part of a push over scripted engines: phases, owners, refusals, failures."""

import asyncio
import json
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.distributed import TCPStore

from learner.rollout.server_process import free_ports
from rollout_server.engines.engine_protocol import EngineDead, WeightPhaseFailed
from rollout_server.weights.pushes import POLL_S, WORKER_MARGIN_S, open_tcp_store
from shared_contracts.weights import (
    ADAPTER_KEY,
    MOST,
    MOST_VERSION_STEP,
    AdapterMeta,
    GroupCall,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
)
from tests.contract.update_bench import (
    PARAMETER,
    TIMEOUT_S,
    Bench,
    Clock,
    Hang,
    asynchronous,
    fails,
    out_of_order,
    refused,
)

BROKEN = WeightPhaseFailed("no")
JOINED = ["leave_group", "join_group"]
PHASES = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
# Ends of a phase, and the problem or error of its call.
ENDS = [
    (BROKEN, "weight-transfer-failed"),
    (EngineDead("gone"), "not-ready"),
    (KeyError("a bug"), KeyError),
    ("too late", "weight-transfer-timeout"),
    ("cancelled", asyncio.CancelledError),
]


async def broken(bench: Bench, phase: str, end: Any, raised: Any, version: int = 1) -> None:
    """Push, and end `phase` while it hangs in engine 0."""
    hang = bench.engines[0].script[phase] = Hang()

    async def end_engine() -> None:
        await hang.begun.wait()
        raise end

    bench.engines[1].script[phase] = end_engine if isinstance(end, Exception) else Hang()
    pushing = asyncio.create_task(bench.push(version))
    await hang.begun.wait()
    if end == "too late":
        Clock.skip()
    elif end == "lost":
        bench.engines[1].declare_dead()
        bench.pushes.replica_lost("replica 1 is lost")
    elif end == "cancelled":
        pushing.cancel()
    if isinstance(raised, str):
        await refused(pushing, raised)
    else:
        with pytest.raises(raised):
            await pushing
    assert hang.cancelled
    for engine in bench.engines:
        engine.script.clear()


# --- phases and versions


@pytest.mark.req("SYNC-03", "SYNC-05", "SYNC-10")
@asynchronous
async def test_no_phase_begins_before_the_last_one_is_over_on_every_engine() -> None:
    """A call that comes waits for the end of the push."""
    bench = await Bench.formed()
    first, second = bench.engines
    hangs = {phase: Hang() for phase in PHASES}
    second.script |= hangs
    pushing = asyncio.create_task(bench.push(7))
    await hangs["pause"].begun.wait()
    call = asyncio.create_task(bench.pushes.settled.wait())
    for number, hang in enumerate(hangs.values(), start=1):
        await hang.begun.wait()
        assert first.calls == second.calls == [*JOINED, *PHASES[:number]]
        assert (bench.held, call.done()) == (("UPDATING", 0), False)
        hang.end.set()
    report = await pushing
    await call
    assert bench.held == ("READY", 7)
    assert [engine.weights_version for engine in bench.engines] == [7, 7]
    assert set(report.seconds) == {"pause", "transfer", "finish"}
    assert (report.bytes, report.status.weights_version) == (8, 7)
    bench.pushes._seconds["pause"] = 1e9  # of this push
    assert (await bench.push(8)).seconds["pause"] < 1e9


@pytest.mark.req("SYNC-05")
@asynchronous
async def test_a_version_or_a_manifest_that_is_refused_changes_nothing() -> None:
    bench = await Bench.formed()
    await bench.push(3)
    last = 3 + MOST_VERSION_STEP
    for version in (0, 3, last + 1, MOST):
        found = f"version {version} is not in 4 to {last}; the server has 3"
        await out_of_order(bench.start(version), found)
    other = PARAMETER.model_copy(update={"shape": [3]})
    body = StartWeightUpdate(attempt="first", version=4, parameters=[other])
    await refused(bench.pushes.start_weight_update(body), "manifest-mismatch", "a.weight is sent")
    assert bench.held == ("READY", 3)
    assert all(engine.calls == [*JOINED, *PHASES] for engine in bench.engines)
    await bench.push(last)


@pytest.mark.req("SYNC-05", "SYNC-07", "SRV-05")
@asynchronous
async def test_a_version_comes_again_after_a_lost_replica_or_a_broken_push() -> None:
    """Over a new group: the other workers are in one with a worker that is gone."""
    bench = await Bench.formed()
    await bench.push(3)
    bench.engines[1].declare_dead()
    bench.pushes.replica_lost("replica 1 is lost")
    bench.engines.build_again()
    assert bench.held == ("READY", 3)
    await out_of_order(bench.start(3), "/init_communicator/ comes first")
    await bench.init()
    await bench.push(3)
    assert [engine.weights_version for engine in bench.engines] == [3, 3]
    await broken(bench, "update_weights", *ENDS[0], version=4)
    bench.engines.build_again()
    await bench.init()
    await bench.push(3)
    assert bench.held == ("READY", 3)


@pytest.mark.req("SYNC-05")
@asynchronous
async def test_a_phase_out_of_order_is_refused() -> None:
    bench = Bench()
    for call in (bench.start(1), bench.update(), bench.finish()):
        await out_of_order(call, "no learner owns the server")
    await bench.init()
    for call in (bench.update(), bench.finish()):
        await out_of_order(call, r"follows \w+; the last phase is no push \(READY\)")
    await bench.start(1)
    await out_of_order(bench.start(2), "start follows no push; the last phase is start")
    await out_of_order(bench.finish(), "finish follows transfer; the last phase is start")
    for phase in (bench.update, bench.finish):
        Clock.skip(0.6 * TIMEOUT_S)  # each phase has the whole time
        await asyncio.sleep(1e-6)  # runs what is due
        await phase()
    assert bench.held == ("READY", 1)


# --- the group


@pytest.mark.req("SYNC-03", "ROLL-03")
@pytest.mark.parametrize("senders", [1, 2])
@asynchronous
async def test_workers_are_numbered_in_the_order_of_the_engines(senders: int) -> None:
    bench = Bench(workers=4, longest_s=5.0, transport="nccl")
    ready = await bench.init(comes=senders, senders=senders, world_size=senders + 4)
    assert (ready.world_size, ready.weights_version, ready.dtype) == (senders + 4, 0, "float32")
    ((first, of_first),), ((second, of_second),) = (engine.joined for engine in bench.engines)
    assert first == second == bench.pushes.owner
    assert (of_first, of_second) == (0, 2)
    assert (first.timeout_s, ready.transport) == (5.0, "gloo"), "the server's limit"


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    ("fields", "kind", "where"),
    [
        ({"world_size": 4}, "invalid-request", "world_size"),
        ({"senders": 4, "world_size": 6}, "invalid-request", "world_size"),
        ({"transport": "ipc"}, "invalid-request", "transport"),
        ({"host": "192.0.2.1"}, "invalid-request", "host"),
        ({"host": "\0"}, "invalid-request", "host"),
        ({}, "group-port-taken", "port"),
    ],
)
@asynchronous
async def test_a_wrong_group_is_refused(fields: dict[str, Any], kind: str, where: str) -> None:
    bench = Bench(open_store=open_tcp_store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = await refused(bench.init(**{"port": port} | fields), kind)
    assert (problem.where, bench.held) == (where, ("READY", 0))


@pytest.mark.req("SYNC-04", "SRV-02", "FULL-07")
@pytest.mark.parametrize("senders", [1, 2])
@asynchronous
async def test_no_engine_joins_before_every_sender_is_there(senders: int) -> None:
    bench = Bench()
    fields: dict[str, Any] = {"senders": senders, "world_size": senders + 2}
    coming = bench.init(comes=senders - 1, timeout_s=0.1, **fields)
    missing = r"learner \(rank 0\): missing for 0.1 s"
    problem = await refused(coming, "weight-transfer-timeout", missing)
    assert problem.where.startswith("rendezvous at 127.0.0.1:")
    assert bench.engines[0].joined == bench.engines[1].joined == []
    await bench.init(comes=senders, **fields)
    await bench.push(1)


@pytest.mark.req("SYNC-04", "FULL-07")
@asynchronous
async def test_the_store_closes_before_the_workers_leave_a_group_that_did_not_form() -> None:
    """A worker that waits for other ranks in the store can leave then."""
    (port,) = free_ports(1)

    def open_store(init: InitCommunicator) -> TCPStore:
        store = open_tcp_store(init)
        store.set("group/0/ready/0", "")
        return store

    async def leave() -> None:
        with suppress(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
                await asyncio.sleep(0)

    bench = Bench(open_store=open_store)
    waits = bench.engines[0].script["join_group"] = Hang()
    bench.engines[1].script |= {"join_group": fails(BROKEN), "leave_group": leave}
    await refused(bench.init(port=port), "weight-transfer-failed", "no")
    assert waits.cancelled
    assert bench.held == ("READY", 0)
    for engine in bench.engines:
        assert (engine.calls, engine.given_up) == ([*JOINED, "leave_group"], False)


@pytest.mark.req("SYNC-04", "SRV-05")
@asynchronous
async def test_an_engine_whose_worker_cannot_leave_its_group_is_given_up() -> None:
    bench = await Bench.formed()
    hang = bench.engines[0].script["leave_group"] = Hang()
    closing = asyncio.create_task(bench.close("first"))
    await hang.begun.wait()
    Clock.skip(WORKER_MARGIN_S)
    await closing
    assert [engine.given_up for engine in bench.engines] == [True, False]
    for error in (BROKEN, EngineDead("gone")):
        bench = await Bench.formed()
        bench.engines[0].script["leave_group"] = fails(error)
        await bench.close("first")
        assert [engine.given_up for engine in bench.engines] == [True, False]


# --- owners


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_the_newest_learner_owns_the_server() -> None:
    bench = await Bench.formed()
    await bench.init("second")
    pushes, older = bench.pushes, GroupCall(attempt="first")
    body = StartWeightUpdate(attempt="first", version=1, parameters=[PARAMETER])
    calls = [pushes.update_weights, pushes.finish_weight_update, pushes.close_communicator]
    hang = bench.engines[0].script["update_weights"] = Hang()
    pushing = asyncio.create_task(bench.push(1))
    await hang.begun.wait()
    for call in (
        pushes.start_weight_update(body),
        *(phase(older) for phase in calls),
        pushes.load_adapter(1, "first", b""),
    ):
        await refused(call, "taken-over", "the second learner has taken this server over")
    hang.end.set()
    await pushing
    await bench.close("second")
    assert pushes.owner is None
    assert all(engine.calls[-1] == "leave_group" for engine in bench.engines)
    await out_of_order(bench.start(2), "no learner owns the server")


@pytest.mark.req("SYNC-04", "SYNC-07")
@asynchronous
async def test_a_learner_that_returns_does_not_take_over_from_a_newer_one() -> None:
    bench = await Bench.formed()
    await bench.init("again", replaces="first")
    await bench.init("once more", replaces="first")  # the answer of the former call was lost
    await bench.init("new")
    for former in ("first", "again"):
        await refused(bench.init("back", replaces=former), "taken-over", "the new learner")
    bench.attempt = "new"
    await bench.push(1)
    await bench.close("new")
    await bench.init("back", replaces="again")


@pytest.mark.req("SYNC-04", "SYNC-05")
@pytest.mark.parametrize("by", ["init", "close"])
@pytest.mark.parametrize(
    ("phase", "state"),
    [("join_group", "READY"), ("pause", "READY"), ("update_weights", "PUSH_NEEDED")],
)
@asynchronous
async def test_a_new_owner_or_a_close_ends_a_phase(phase: str, state: str, by: str) -> None:
    bench = Bench()
    hang = bench.engines[0].script[phase] = Hang()

    async def push() -> None:
        await bench.init()
        await bench.push(1)

    pushing = asyncio.create_task(push())
    await hang.begun.wait()
    bench.engines[0].script.clear()
    taking: asyncio.Task[object] = asyncio.create_task(
        bench.init("second") if by == "init" else bench.close("first")
    )
    await refused(pushing, "taken-over" if by == "init" else "weight-transfer-timeout")
    assert bench.held == (state, 0)
    bench.engines.build_again()
    await taking
    await bench.init()
    await bench.push(1)


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_a_phase_that_waits_while_a_newer_learner_comes_is_refused() -> None:
    bench = await Bench.formed()
    hang = bench.engines[1].script["sleep"] = Hang()
    sleeping = asyncio.create_task(bench.pushes.sleep())
    await hang.begun.wait()
    waiting = asyncio.create_task(bench.start(1))
    await asyncio.sleep(0)
    taking = asyncio.create_task(bench.init("second"))
    await asyncio.sleep(0)
    hang.end.set()
    await refused(waiting, "taken-over", "the second learner")
    await asyncio.gather(sleeping, taking)
    assert bench.held == ("READY", 0)
    assert all("pause" not in engine.calls for engine in bench.engines)


@pytest.mark.req("SYNC-04", "SYNC-05")
@pytest.mark.parametrize("by", ["init", "close", "loss", "silence"])
@asynchronous
async def test_a_push_that_is_half_done_is_given_up(by: str) -> None:
    """Between two phases: by a new owner, a close, the loss of a replica, and after a time."""
    bench = await Bench.formed()
    await bench.start(1)
    await bench.update()
    taking: asyncio.Task[object] = asyncio.create_task(asyncio.sleep(0))
    if by == "init":
        taking = asyncio.create_task(bench.init("second"))
    elif by == "close":
        taking = asyncio.create_task(bench.close("first"))
    elif by == "loss":
        bench.pushes.replica_lost("replica 1 is lost")
    else:
        Clock.skip(TIMEOUT_S)
    await bench.pushes.settled.wait()
    assert bench.held == ("PUSH_NEEDED", 0)
    assert all(engine.given_up for engine in bench.engines)
    asyncio.get_running_loop().call_later(POLL_S, bench.engines.build_again)
    await taking
    Clock.skip(TIMEOUT_S)
    await asyncio.sleep(1e-6)
    assert not any(engine.given_up for engine in bench.engines)
    await bench.init("third")
    await bench.push(1)


# --- phases that break


@pytest.mark.req("SYNC-04", "SYNC-05")
@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize(("end", "raised"), ENDS)
@asynchronous
async def test_a_phase_that_breaks_ends_all_engines_until_a_full_push(
    phase: str, end: Any, raised: Any, tmp_path: Path
) -> None:
    bench = await Bench.formed(adapters=tmp_path)
    await broken(bench, phase, end, raised)
    assert bench.held == ("PUSH_NEEDED", 0)
    assert all(engine.given_up for engine in bench.engines)
    await bench.pushes.settled.wait()
    bench.engines.build_again()
    await out_of_order(bench.start(1), "/init_communicator/ comes first")
    await bench.init()
    await refused(bench.pushes.load_adapter(1, "first", adapter()), "push-needed")
    for call in (bench.finish, bench.pushes.sleep, bench.pushes.wake_up):
        await out_of_order(call(), "PUSH_NEEDED")
    await broken(bench, "pause", end, raised)
    assert bench.held == ("PUSH_NEEDED", 0)
    await bench.push(1)
    assert bench.held == ("READY", 1)


@pytest.mark.req("SYNC-04", "SYNC-05")
@pytest.mark.parametrize(("end", "raised"), [*ENDS, ("lost", "not-ready")])
@asynchronous
async def test_a_drain_that_breaks_resumes_with_nothing_changed(end: Any, raised: Any) -> None:
    bench = await Bench.formed()
    await broken(bench, "pause", end, raised)
    assert bench.held == ("READY", 0)
    calls = [engine.calls for engine in bench.engines.alive()]
    assert calls == [[*JOINED, "pause", "resume"]] * (1 if end == "lost" else 2)
    assert [engine.given_up for engine in bench.engines] == [False, end == "lost"]
    if end == "lost":
        bench.engines.build_again()
        await bench.init()
    await bench.push(1)


@pytest.mark.req("SYNC-04")
@asynchronous
async def test_a_new_owner_waits_for_the_end_of_a_drain_that_is_taken_back() -> None:
    bench = await Bench.formed()
    drain, resume = Hang(), Hang()
    bench.engines[0].script |= {"pause": drain, "resume": resume}
    starting = asyncio.create_task(bench.start(1))
    await drain.begun.wait()
    Clock.skip()
    await resume.begun.wait()
    taking = asyncio.create_task(bench.init("second"))
    await asyncio.sleep(0)
    resume.end.set()
    await refused(starting, "taken-over")
    await taking
    bench.engines[0].script.clear()
    await bench.push(1)


# --- engines that sleep


@pytest.mark.req("ROLL-03", "SYNC-04")
@asynchronous
async def test_engines_sleep_until_they_are_woken_or_pushed_to() -> None:
    bench = await Bench.formed()
    for wake in (bench.pushes.wake_up, partial(bench.push, 1)):
        await bench.pushes.sleep()
        assert all(engine.asleep for engine in bench.engines)
        await wake()
        assert not any(engine.asleep for engine in bench.engines)
    bench.engines[1].script["sleep"] = fails(EngineDead("its memory is lost"))
    await refused(bench.pushes.sleep(), "not-ready", "its memory is lost")
    hang = bench.engines[1].script["sleep"] = Hang()
    sleeping = asyncio.create_task(bench.pushes.sleep())
    await hang.begun.wait()
    taking = asyncio.create_task(bench.init("second"))
    await asyncio.sleep(0)
    Clock.skip(TIMEOUT_S + WORKER_MARGIN_S)
    await refused(taking, "weight-transfer-timeout", "was not over within 1000 s")
    assert not sleeping.done()
    Clock.skip()
    assert (await refused(sleeping, "weight-transfer-timeout")).where == "/sleep/"
    await bench.init("third")
    await bench.start(2)
    await out_of_order(bench.pushes.sleep(), "UPDATING")


# --- adapters


HALF_A, HALF_B = (f"base_model.model.a.lora_{half}.weight" for half in "AB")
HALVES = {HALF_A: torch.zeros(4, 1), HALF_B: torch.zeros(2, 4)}


def adapter(tensors: dict[str, torch.Tensor] = HALVES, **metadata: str) -> bytes:
    meta = AdapterMeta(r=4, lora_alpha=8, target_modules=["a"])
    return save(tensors, metadata=metadata or {ADAPTER_KEY: meta.model_dump_json()})


NO_ADAPTERS = [
    *(b"", b"\xff" * 20, b"\4\0\0\0\0\0\0\0null", (10**5).to_bytes(8, "little") + b"[" * 10**5),
    *(adapter(other="{}"), adapter(adapter="{}")),
]
UNFIT = [
    ({HALF_A: HALVES[HALF_A]}, r"lora_B.weight is missing, not \[2, 4\]"),
    (HALVES | {HALF_A: torch.zeros(4, 2)}, r"lora_A.weight is \[4, 2\], not \[4, 1\]"),
    (HALVES | {"c.lora_A.weight": torch.zeros(4, 1)}, "c.lora_A.weight is .* not a name of this"),
]


async def load(bench: Bench, version: int, content: bytes = adapter()) -> SyncReport:
    return await bench.pushes.load_adapter(version, bench.attempt, content)


@pytest.mark.req("SYNC-01")
@asynchronous
async def test_an_adapter_needs_no_group_and_no_pause_and_is_kept_in_use(tmp_path: Path) -> None:
    bench = await Bench.formed(adapters=tmp_path)
    await bench.init(comes=0, world_size=1)
    report = await load(bench, 8)
    alone = ["leave_group", "load_adapter", "use_adapter"]
    assert all(engine.calls == JOINED + alone for engine in bench.engines)
    await out_of_order(bench.start(9), "/init_communicator/ comes first")
    assert bench.held == ("READY", 8)
    assert (report.bytes, list(report.seconds)) == (len(adapter()), ["transfer"])
    in_use = bench.engines[1].adapter  # as a sequence that runs
    assert in_use is not None
    folder = in_use.folder
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    for version in (9, 10, 11):
        await load(bench, version)
    newest = bench.engines[1].adapter
    assert newest is not None
    assert set(tmp_path.iterdir()) == {folder, newest.folder}
    del in_use
    assert list(tmp_path.iterdir()) == [newest.folder]
    await out_of_order(load(bench, 11), "is not in 12 to")
    await bench.init()
    await bench.push(12)
    for engine in [*bench.engines]:
        await refused(load(bench, 13), "adapter-refused", "full weights were pushed")
        engine.declare_dead()
        bench.engines.build_again()  # with the checkpoint's weights
    await load(bench, 13)
    await refused(load(await Bench.formed(), 1), "adapter-refused", "--enable-lora")


@pytest.mark.req("SYNC-01", "SYNC-05", "WIRE-05")
@pytest.mark.parametrize(
    ("content", "where", "found"),
    [
        *((content, "body", "is no safetensors") for content in NO_ADAPTERS),
        *((adapter(tensors), "adapter", found) for tensors, found in UNFIT),
        (adapter(), "adapter", "server: no"),
    ],
)
@asynchronous
async def test_an_adapter_that_is_refused_changes_nothing(
    content: bytes, where: str, found: str, tmp_path: Path
) -> None:
    """The server refuses it, or a worker that refuses all."""
    bench = await Bench.formed(adapters=tmp_path)
    bench.engines[1].script["load_adapter"] = fails(BROKEN)
    assert (await refused(load(bench, 1, content), "adapter-refused", found)).where == where
    assert not any("use_adapter" in engine.calls for engine in bench.engines)
    assert bench.held == ("READY", 0)
    bench.engines[1].script.clear()
    await load(bench, 1)
