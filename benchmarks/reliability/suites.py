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
            "an engine is killed, in a call or between calls",
            f"{REAL}, two replicas; scripted engines",
            "its calls get a 503 that names it, the other serves on, it is built again and serves "
            "with the current weights only",
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
            "noticed by its silence, killed, built again",
            [
                "contract/test_replicas.py::hung",
                "contract/test_replica_watch.py::hung",
                "contract/test_replica_watch.py::given_up",
            ],
        ),
        Fault(
            "a client hangs up, or calls again",
            REAL,
            "its sequences are aborted; a call with the same id is generated once",
            [
                "contract/test_infer.py::goes_away",
                "contract/test_rollouts.py::cancelled",
                "contract/test_answers.py",
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
            "it cannot start: port, memory, GPU, model, engine, settings",
            "the command",
            "exit code 2 or 1, what to do, nothing left behind",
            ["contract/test_settings.py", "contract/test_preflight.py"],
        ),
        Fault(
            "the repeat guard does not work in the engine",
            f"{REAL} whose engine is told otherwise; scripted engines",
            "it never serves",
            [
                "contract/test_repeat_terminate.py::fails_fast",
                "contract/test_repeat_terminate.py::sentinel",
                "contract/test_replica_watch.py::not_proven",
            ],
        ),
        Fault(
            "calls that nobody would write",
            REAL,
            "declared answers alone, no 5xx; afterwards as ready as before",
            [
                "contract/test_openapi.py::no_call_breaks",
                "contract/test_infer.py::odd_input",
                "contract/test_limits.py::odd",
                "contract/test_weight_bodies.py",
            ],
        ),
    ],
    "Who may do what": [
        Fault(
            "no token, another, one in a wrong place",
            "the app over HTTP; the command",
            "401 before the body is read; no start on an open address without one",
            ["contract/test_auth.py", "contract/test_preflight.py::open_door"],
        ),
        Fault(
            "bodies too large, endless, too many, too deep",
            "the app over HTTP",
            "413, 422 or 429; bounded memory",
            ["contract/test_limits.py"],
        ),
        Fault(
            "image paths that lead elsewhere",
            "files and links on disk",
            "refused, and nothing told of what is there",
            [
                "contract/test_media.py::path",
                "contract/test_media.py::link",
                "contract/test_media.py::regular_file",
            ],
        ),
        Fault(
            "image URLs that lead inside (SSRF)",
            "web servers on loopback, names that change",
            "refused for every private address, also behind a redirect",
            ["contract/test_media_urls.py"],
        ),
        Fault(
            "images that unpack to more, are cut short, are none",
            "the loader",
            "refused before they are decoded",
            [
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
            "nothing of ours reads one; only open files of the peer are mapped",
            ["contract/test_preflight.py::pickle", "contract/test_ipc_transfer.py::map"],
        ),
    ],
    "Pushes": [
        Fault(
            "the transfer breaks, hangs or is refused half way",
            f"{REAL}; workers over gloo",
            "an error with side, phase and parameter; POISONED until a full push, which heals",
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
            "the learner dies or falls silent, in every phase",
            f"{REAL} and a learner that is killed",
            "given up in time; the next learner pushes",
            [
                "contract/test_learner_killed.py",
                "contract/test_weight_push.py::silent",
                "contract/test_weight_push.py::never_joins",
                "contract/test_weight_push.py::left_open",
            ],
        ),
        Fault(
            "a server or replica dies in a phase",
            "real servers and a real run; scripted ones",
            "the next answers are of the weights of the push",
            [
                "integration/test_faults.py::killed_in_a_push",
                "contract/test_broken_updates.py",
                "unit/test_push_faults.py::dies",
            ],
        ),
        Fault(
            "weights arrive otherwise than they were sent",
            REAL,
            "every parameter at fault is named, POISONED, and a full push heals",
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
            "refused, nothing changed; full weights instead of an adapter",
            [
                "contract/test_weight_push.py::manifest",
                "contract/test_weight_push.py::shape",
                "contract/test_update_checks.py::fit",
                "contract/test_update_checks.py::base",
                "contract/test_placement.py::fault",
                "contract/test_adapter.py::refused",
                "contract/test_adapter.py::fall_back",
            ],
        ),
        Fault(
            "a group that cannot be formed, or breaks",
            f"{REAL}; scripted ones",
            "told at once or by a deadline; weights and state stay",
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
            "a server forgets its weights (was started anew)",
            "real servers and processes; simulated ones",
            "it gets the same weights before it is asked again; the same answers",
            [
                "contract/test_backend_recovery.py",
                "contract/test_two_ranks.py",
                "unit/test_recovery.py",
            ],
        ),
        Fault(
            "the network is cut",
            "two network namespaces, a real run",
            "both sides notice; all is made good",
            ["integration/test_network_cut.py", "integration/test_two_hosts.py"],
        ),
    ],
    "Runs": [
        Fault(
            "SIGKILL within a step, within a checkpoint, at random",
            "a real run, one process",
            "resumed, it is the run that was not killed, bit for bit; every sample logged once",
            ["integration/test_kills_and_resumes.py::kill"],
        ),
        Fault(
            "SIGKILL of a rank, rank 0 in a push, a server, all ranks",
            "a real run, two processes and two servers",
            "who is left ends with an error or goes on; in the end every step and sample once",
            ["integration/test_kills.py"],
        ),
        Fault(
            "a server is killed while it answers, or for good",
            "a real run; simulated servers",
            "answered after all, the same answers; or the run ends with what it waited for",
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
            "one line, exit code 1, the last whole checkpoint stays",
            ["integration/test_full_disk.py", "unit/test_publish.py::full_disk"],
        ),
        Fault(
            "a process of several raises, is silent, hangs, is killed",
            "processes, and threads over a store",
            "all end with its error, in time",
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
    cases = collected()
    print("| what | injected into | cases | what must happen | tests |\n|---|---|---|---|---|")
    for section, faults in FAULTS.items():
        print(f"| **{section}** | | | | |")
        for fault in faults:
            idle = [test for test in fault.tests if not any(matches(test, c) for c in cases)]
            if idle:
                sys.exit(f"no such tests: {idle}")
            count = sum(any(matches(test, case) for test in fault.tests) for case in cases)
            files = dict.fromkeys(test.partition("::")[0] for test in fault.tests)
            told = ", ".join(f"`tests/{file}`" for file in files)
            print(f"| {fault.what} | {fault.where} | {count} | {fault.must} | {told} |")
    print(f"\n{len(cases):,} cases in all")


if __name__ == "__main__":
    main()
