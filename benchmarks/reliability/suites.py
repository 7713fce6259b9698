"""Which faults the tests inject, and how many cases of each CI runs.

    .venv/bin/python -m benchmarks.reliability.suites

Counts what pytest collects, and prints the table of docs/reliability.md. A row whose tests are
gone, or have other names, is an error.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """tests: `FILE` or `FILE::PART OF A NAME`, below `tests/`."""

    what: str
    where: str
    must: str
    tests: Sequence[str]


REAL = "a real server"

FAULTS: dict[str, list[Fault]] = {
    "The server": [
        Fault(
            "an engine is killed, during a call or between calls",
            f"{REAL}, two replicas; scripted engines",
            "its calls get a 503 that names it; the other engine continues; the engine is built "
            "again and gets the current weights before it answers",
            [
                "contract/test_replicas.py::killed",
                "contract/test_replica_watch.py::dead",
                "contract/test_replica_watch.py::cannot_be_built",
                "contract/test_replica_watch.py::current_weights",
                "contract/test_rollouts.py::engine_dies",
                "contract/test_pool.py",
            ],
        ),
        Fault(
            "an engine hangs",
            f"{REAL} (SIGSTOP); scripted engines",
            "noticed by missing heartbeats, killed, built again",
            [
                "contract/test_replicas.py::hung",
                "contract/test_replica_watch.py::hung",
                "contract/test_replica_watch.py::given_up",
            ],
        ),
        Fault(
            "the server process is suspended, alone or with its engines",
            f"{REAL}, two replicas (SIGSTOP); scripted engines",
            "no replica is lost, the running calls are answered",
            [
                "contract/test_replicas.py::stopped_and_continued",
                "contract/test_replica_watch.py::stood_still",
                "contract/test_silent_learners.py::while_nobody_looks",
            ],
        ),
        Fault(
            "a client hangs up, or calls again",
            REAL,
            "its sequences are aborted; a call with the same id is generated once",
            [
                "contract/test_infer.py::goes_away",
                "contract/test_rollouts.py::cancelled",
                "contract/test_idempotency.py",
                "contract/test_calls.py::retr",
                "contract/test_calls.py::an_id",
            ],
        ),
        Fault(
            "the server is stopped or killed, also while it starts",
            REAL,
            "running calls are answered, no process is left",
            [
                "contract/test_replicas.py::outlives",
                "contract/test_settings.py::sigterm",
                "contract/test_fresh_engine.py::killed",
            ],
        ),
        Fault(
            "the server cannot start: port, memory, GPU, model, engine, settings",
            "the command",
            "exit code 2 or 1, the message says what to do, nothing is left behind",
            ["contract/test_settings.py", "contract/test_preflight.py"],
        ),
        Fault(
            "the repeat guard does not work in the engine",
            f"{REAL} whose engine gets other settings; scripted engines",
            "the server never answers a call",
            [
                "contract/test_repeat_terminate.py::fails_fast",
                "contract/test_repeat_terminate.py::sentinel",
                "contract/test_replica_watch.py::not_proven",
            ],
        ),
        Fault(
            "generated calls, valid and invalid",
            REAL,
            "only answers that the document declares, no 5xx; afterwards the server is ready as "
            "before",
            [
                "contract/test_openapi.py::no_call_breaks",
                "contract/test_infer.py::odd_input",
                "contract/test_limits.py::odd",
                "contract/test_weight_bodies.py",
            ],
        ),
    ],
    "Access": [
        Fault(
            "no token, a wrong token, a token in a wrong place",
            "the app over HTTP; the command",
            "401 before the body is read; without a token the server does not start on an address "
            "other than loopback",
            ["contract/test_auth.py", "contract/test_preflight.py::open_door"],
        ),
        Fault(
            "silent connections, incomplete calls, endless calls, too many connections",
            "the app on a socket",
            "refused or closed in time; other calls are answered; enough file descriptors are left "
            "for the engines",
            ["contract/test_connections.py"],
        ),
        Fault(
            "bodies too large, endless, too many, too deep, full of faults",
            "the app over HTTP",
            "400, 413, 422, 429 or 503; bounded memory; other calls have their turns",
            ["contract/test_limits.py", "contract/test_bodies.py"],
        ),
        Fault(
            "pages of other sites",
            "the app; a browser",
            "refused before anything happens",
            ["contract/test_browsers.py"],
        ),
        Fault(
            "image paths outside of the allowed folders",
            "files and links on disk",
            "refused; the answer does not reveal what is there",
            [
                "contract/test_media.py::path",
                "contract/test_media.py::link",
                "contract/test_media.py::regular_file",
            ],
        ),
        Fault(
            "image URLs that lead into the private network (SSRF)",
            "web servers on loopback, names that change",
            "refused for every private address, also behind a redirect",
            ["contract/test_media_urls.py"],
        ),
        Fault(
            "images that unpack to a huge size, are cut short, or are no images",
            "the loader",
            "refused before they are decoded, or they wait for memory",
            [
                "contract/test_image_budget.py",
                "contract/test_media.py::bounded",
                "contract/test_media.py::cut_short",
                "contract/test_media.py::multiple",
                "contract/test_media.py::no_image",
                "contract/test_media.py::decoder",
            ],
        ),
        Fault(
            "pickles, foreign files by `ipc`",
            "the source, and processes that share memory",
            "no code of this project reads a pickle; only open files of the peer are mapped",
            ["contract/test_preflight.py::pickle", "contract/test_ipc_transfer.py::map"],
        ),
    ],
    "Pushes": [
        Fault(
            "the transfer breaks, hangs or is refused half way",
            f"{REAL}; workers over gloo",
            "an error with side, phase and parameter; POISONED until a full push succeeds",
            [
                "contract/test_weight_push.py::transfer",
                "contract/test_broken_transfer.py",
                "contract/test_gloo_engine.py::named",
                "contract/test_ipc_transfer.py::does_not_come",
                "unit/test_push_faults.py::breaks",
                "unit/test_push_faults.py::hung",
                "unit/test_push_faults.py::finish",
            ],
        ),
        Fault(
            "the learner dies or sends no heartbeats, in every phase",
            f"{REAL} and a learner that is killed or stopped; scripted engines",
            "the push is broken in time; the next learner can push",
            [
                "contract/test_learner_killed.py",
                "contract/test_silent_learners.py",
                "contract/test_weight_push.py::silent",
                "contract/test_weight_push.py::never_joins",
                "contract/test_weight_push.py::left_open",
            ],
        ),
        Fault(
            "a server or replica dies in a phase",
            "real servers and a real run; scripted ones",
            "the next answers come from the weights of the push",
            [
                "integration/test_faults.py::killed_in_a_push",
                "contract/test_broken_updates.py",
                "unit/test_push_faults.py::dies",
            ],
        ),
        Fault(
            "weights arrive different from what was sent",
            REAL,
            "every wrong parameter is named; POISONED until a full push succeeds",
            [
                "contract/test_verified_push.py",
                "contract/test_held_weights.py",
                "contract/test_verification.py",
                "contract/test_weight_push.py::not_held",
                "contract/test_update_checks.py::not_those",
            ],
        ),
        Fault(
            "a manifest, a base or an adapter that does not fit",
            f"{REAL}; models by themselves",
            "refused, nothing has changed; full weights are pushed instead of an adapter",
            [
                "contract/test_weight_push.py::manifest",
                "contract/test_weight_push.py::shape",
                "contract/test_update_checks.py::fit",
                "contract/test_update_checks.py::base",
                "contract/test_load_plan.py::fault",
                "contract/test_adapter.py::refused",
                "contract/test_adapter.py::fall_back",
            ],
        ),
        Fault(
            "a server whose answers are false, endless, slow or huge",
            "a client, its probes and its pushes",
            "an error that names the server, within limits of bytes, seconds and text",
            [
                "unit/test_hostile_server.py",
                "unit/test_push.py::believed",
                "unit/test_push.py::asked_to_compare",
                "unit/test_push.py::name_nothing",
                "unit/test_push.py::said_to_lack",
            ],
        ),
        Fault(
            "a group that cannot be formed, or breaks",
            f"{REAL}; scripted ones",
            "an error at once or at a deadline; weights and state do not change",
            [
                "contract/test_weight_push.py::port",
                "contract/test_weight_push.py::address",
                "contract/test_weight_push.py::world_size",
                "contract/test_weight_groups.py",
                "unit/test_push_faults.py::group",
                "unit/test_push_faults.py::rendezvous",
                "unit/test_push_faults.py::reached",
                "unit/test_push_faults.py::joins",
                "unit/test_push_groups.py",
            ],
        ),
        Fault(
            "a rank is missing, fails or hangs while a group over NCCL forms; a broadcast aborts",
            "a faked communicator; the rest is real",
            "no rank calls NCCL before all are ready; the engines serve on, and the next group "
            "gets all weights",
            [
                "rehearsal/test_nccl.py::does_not_come",
                "rehearsal/test_nccl.py::gave_up",
                "rehearsal/test_nccl.py::hangs",
                "rehearsal/test_nccl.py::fails",
                "rehearsal/test_nccl.py::silent",
                "rehearsal/test_nccl.py::aborts",
            ],
        ),
        Fault(
            "a server loses its weights (it was restarted)",
            "real servers and processes; simulated ones",
            "it gets the same weights before the next request, and gives the same answers",
            [
                "contract/test_backend_recovery.py",
                "contract/test_two_ranks.py",
                "unit/test_recovery.py",
            ],
        ),
        Fault(
            "the network is cut",
            "two network namespaces, a real run",
            "both sides notice; the run recovers",
            ["integration/test_network_cut.py", "integration/test_two_hosts.py"],
        ),
    ],
    "Runs": [
        Fault(
            "SIGKILL within a step, within a checkpoint, at random",
            "a real run, one process",
            "after resuming, bit for bit the run that was not killed; every sample is logged once",
            ["integration/test_kills_and_resumes.py::kill"],
        ),
        Fault(
            "SIGKILL of a rank, rank 0 in a push, a server, all ranks",
            "a real run, two processes and two servers",
            "the remaining processes end with an error or continue; in the end every step and "
            "sample is logged once",
            ["integration/test_kills.py"],
        ),
        Fault(
            "a server is killed while it answers, or for good",
            "a real run; simulated servers",
            "the same answers after a retry; or the run ends and says what it waited for",
            [
                "integration/test_faults.py::answers_after_all",
                "integration/test_faults.py::for_good",
                "integration/test_async.py::killed",
                "unit/test_rollouts_whatever_fails.py",
                "unit/test_retries.py",
            ],
        ),
        Fault(
            "the disk is full",
            "a file system of 2 MB; `/dev/full`",
            "one line, exit code 1, the last complete checkpoint is kept",
            ["integration/test_full_disk.py", "unit/test_atomic_files.py::full_disk"],
        ),
        Fault(
            "one of several processes raises an error, sends no heartbeats, hangs or is killed",
            "processes, and threads over a store",
            "all processes end with its error, in time",
            ["unit/test_peers.py", "integration/test_processes.py::error_of_one"],
        ),
        Fault(
            "a launch, a demo or a server of the learner's own is interrupted or killed",
            "real commands",
            "no process is left",
            [
                "integration/test_launch.py",
                "unit/test_launch_processes.py",
                "integration/test_demo.py::interrupted",
            ],
        ),
        Fault(
            "a resumed run is another run",
            "run folders",
            "refused, with every difference",
            ["unit/test_resume.py"],
        ),
        Fault(
            "a run is watched through its kill",
            "a real run",
            "the view says so, and goes on with the second start",
            ["integration/test_watch.py"],
        ),
    ],
}


def collected() -> list[str]:
    """`FILE::TEST` of each case, below `tests/`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [
        line.removeprefix("tests/") for line in done.stdout.splitlines() if line.startswith("tests")
    ]


def matches(test: str, case: str) -> bool:
    file, _, part = test.partition("::")
    found, _, name = case.partition("::")
    return found == file and part in name.partition("[")[0]


def main() -> None:
    cases, injected = collected(), set[str]()
    print("| what | injected into | cases | what must happen | tests |\n|---|---|---|---|---|")
    for section, faults in FAULTS.items():
        print(f"| **{section}** | | | | |")
        for fault in faults:
            idle = [test for test in fault.tests if not any(matches(test, c) for c in cases)]
            if idle:
                sys.exit(f"no such tests: {idle}")
            found = [case for case in cases if any(matches(test, case) for test in fault.tests)]
            injected.update(found)
            files = dict.fromkeys(test.partition("::")[0] for test in fault.tests)
            told = ", ".join(f"`tests/{file}`" for file in files)
            print(f"| {fault.what} | {fault.where} | {len(found)} | {fault.must} | {told} |")
    kinds = sum(map(len, FAULTS.values()))
    print(f"\n{len(injected):,} of {len(cases):,} cases, of {kinds} kinds")


if __name__ == "__main__":
    main()
