"""The ablation of the method on the toy world: what each part of it is worth.

    .venv/bin/python -m benchmarks.method --out FOLDER [--quick] [--report-only] [--image PNG]

From one checkpoint per seed, warmed up in channel A until it is half trained, every arm
(`method_parts/arms.py`) makes the same number of optimizer steps on the same samples. The
rollouts come from two servers, one with the repeat guard and one without.

What has ended is not run again: give the same folder to go on after an interruption, or
`--report-only` for the tables and the picture of what is there.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from benchmarks.method_parts.arms import (
    ARMS,
    BASE,
    FULL,
    QUICK,
    TITLES,
    Arm,
    Place,
    Plan,
    arm_config,
    warmup_config,
)
from benchmarks.method_parts.curves import curves_png
from benchmarks.method_parts.learner_run import run_arm
from benchmarks.method_parts.records import read_records, tables
from learner.config import dump_mapping, dump_resolved
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.rollout.server_process import ServerProcess, free_ports
from learner.runs.atomic_files import publish_directory, publish_text
from learner.training.start_checks import check_inputs
from learner.training.train import train
from shared_contracts.errors import ContractError, RunError

SERVER_START_S = 600.0
SCENES_SEED = 0


class Ablation:
    """Everything under `out`: scenes, models, warm-ups, arms. Only what is missing is made."""

    def __init__(self, out: Path, plan: Plan) -> None:
        self._out, self._plan = out, plan
        self._console = Console(width=100)

    def run(self) -> None:
        """Raises ContractError, RunError: as the learner does, or for another plan's folder."""
        self._claim()
        left = list(self._left())
        if not left:
            return
        self._make_worlds()
        with ExitStack() as stack:
            servers = self._start({arm.guard for _, arm in left}, stack)
            for seed, arm in left:
                self._warm_up(seed)
                self._run_arm(arm, seed, servers[arm.guard].base_url)

    def _claim(self) -> None:
        """Refuse a folder whose records are of another plan."""
        self._out.mkdir(parents=True, exist_ok=True)
        told, path = dump_mapping(asdict(self._plan)), self._out / "plan.yaml"
        if path.exists() and path.read_text(encoding="utf-8") != told:
            raise ContractError(
                "--out", f"{self._out} holds runs of another plan", "Name a new folder"
            )
        publish_text(path, told)

    def _left(self) -> Iterator[tuple[int, Arm]]:
        for seed in self._plan.seeds:
            yield from ((seed, arm) for arm in ARMS if not self._folder(arm.key, seed).exists())

    def _folder(self, name: str, seed: int) -> Path:
        return self._out / f"{name}_{seed}"

    def _make_worlds(self) -> None:
        if not (self._out / "data").exists():
            make_data(self._out / "data", self._plan.scenes, self._plan.held_out, SCENES_SEED)
        for seed in self._plan.seeds:
            if not self._folder("model", seed).exists():
                make_model(self._folder("model", seed), seed)

    def _start(self, guards: set[bool], stack: ExitStack) -> dict[bool, ServerProcess]:
        """A server for each, healthy."""
        servers = {
            guard: stack.enter_context(
                self._server(next(arm for arm in ARMS if arm.guard == guard))
            )
            for guard in guards
        }
        for server in servers.values():
            server.wait_until_healthy(SERVER_START_S)
        return servers

    def _server(self, arm: Arm) -> ServerProcess:
        """With what a run of the arm says of its server."""
        model = self._folder("model", self._plan.seeds[0])
        place = self._place(model, self._out / "any", "http://127.0.0.1:1")
        name = f"server_{'guard' if arm.guard else 'plain'}"
        run = self._out / f"{name}.yaml"
        publish_text(run, dump_resolved(arm_config(arm, self._plan, 0, place)))
        options = [
            *("--model", str(model)),
            *("--device", "cpu"),
            *("--dtype", "float32"),
            *("--allowed-media-dir", str(self._out / "data")),
            *("--run-config", str(run)),
        ]
        return ServerProcess(options, self._out / f"{name}.log")

    def _warm_up(self, seed: int) -> None:
        folder = self._folder("warmup", seed)
        if folder.exists():
            return
        self._console.print(f"[bold]seed {seed}, warm-up[/]")
        with publish_directory(folder) as part:
            place = self._place(self._folder("model", seed), part, "http://127.0.0.1:1")
            config = warmup_config(self._plan, seed, place)
            train(config, check_inputs(config), [], self._console)

    def _run_arm(self, arm: Arm, seed: int, base_url: str) -> None:
        self._console.print(f"[bold]seed {seed}, {arm.title}[/]")
        checkpoint = get_last_checkpoint(str(self._folder("warmup", seed)))
        assert checkpoint is not None, "a warm-up saves at its last step"
        with publish_directory(self._folder(arm.key, seed)) as part:
            place = self._place(Path(checkpoint), part, base_url)
            run_arm(arm, arm_config(arm, self._plan, seed, place), self._console).write(part)

    def _place(self, model: Path, output_dir: Path, base_url: str) -> Place:
        data = ToyData.under(self._out / "data")
        (group_port,) = free_ports(1)
        return Place(data, model, output_dir, base_url, group_port)


def report(out: Path, image: Path) -> None:
    """Print the tables of docs/benchmarks.md and draw the curves of what has ended."""
    records = read_records(out)
    if not records:
        raise ContractError("--out", f"{out} has no record yet", "Let an arm end first")
    commits = sorted({(record.commit or "unknown")[:12] for record in records})
    seconds = sum(record.seconds for record in records)
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(curves_png(records, TITLES))
    print(f"\n{len(records)} runs of {seconds:.0f} s, commit {', '.join(commits)}; {image}\n")
    print(tables(records, TITLES, BASE))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="everything goes there")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: a trial")
    parser.add_argument("--report-only", action="store_true", help="of what has ended; run nothing")
    parser.add_argument("--image", type=Path, help="of the curves (default: OUT/method.png)")
    options = parser.parse_args()
    # Either signal, also where the shell ignores Ctrl-C for us, ends what has been started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    disable_progress_bar()
    out = options.out.resolve()
    say = partial(report, out, options.image or out / "method.png")
    try:
        if not options.report_only:
            Ablation(out, QUICK if options.quick else FULL).run()
        say()
    except (ContractError, RunError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")


if __name__ == "__main__":
    main()
