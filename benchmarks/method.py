"""Does channel B pay? Every part of the method against channel A alone, on the crowded world.

    .venv/bin/python -m benchmarks.method --out FOLDER [--plan small] [--seeds 0 1] [--arms clean]

One model learns to see (`learner toy pretrain-vision`), to find what it names (distinct scenes) and
crowded scenes, in channel A. From there each seed goes on while the learning rate falls to zero.
From its checkpoint every arm (`method_parts/arms.py`) makes the same number of optimizer steps on
the same samples, and is evaluated on scenes that nothing was tuned on. Each arm is held against
channel A alone of its seed, at equal steps and at equal time.

What has ended is not run again: give the same folder to go on after an interruption. Two commands
with other seeds may share a folder, if the first one has made the worlds and the first model.
`--report-only` prints the tables and draws the pictures of what is there.
"""

import argparse
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from benchmarks.method_parts.arms import (
    ARMS,
    BASE,
    PLANS,
    TITLES,
    Arm,
    Place,
    Plan,
    arm_config,
    base_config,
)
from benchmarks.method_parts.records import (
    Row,
    at_equal_steps,
    at_equal_time,
    read_runs,
    score_table,
    time_table,
)
from learner.config import dump_mapping, dump_resolved
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, WorldName, make_data
from learner.models.toy import make_model
from learner.models.toy_vision import pretrain_vision
from learner.rollout.server_process import ServerProcess, free_ports
from learner.runs.atomic_files import publish_directory, publish_text
from learner.runs.run_folder import RUN
from learner.training.input_checks import check_inputs, generates
from learner.training.server_checks import reach_servers
from learner.training.train import train
from shared_contracts.errors import ContractError, RunError

SERVER_START_S = 600.0
# Of the scenes: those that settings were chosen on, and those that decide.
TUNED_SEED, DECIDING_SEED = 0, 1
CONSTANT = "constant_with_warmup"
NOWHERE = "http://127.0.0.1:1"


class Experiment:
    """Everything under `out`: worlds, models, arms. Only what is missing is made."""

    def __init__(self, out: Path, plan: Plan, seeds: Sequence[int], arms: Sequence[Arm]) -> None:
        self._out, self._plan, self._seeds, self._arms = out, plan, seeds, arms
        self._console = Console(width=100)

    def run(self) -> None:
        """Raises ContractError, RunError: as the learner does, or for another plan's folder."""
        self._claim()
        left = list(self._left())
        if not left:
            return
        self._make_worlds()
        self._pretrain()
        self._learn_in_common()
        with self._server() as server:
            server.wait_until_healthy(SERVER_START_S)
            for seed, arm in left:
                self._converge(seed)
                self._run_arm(arm, seed, server.base_url)

    def _claim(self) -> None:
        """Refuse a folder whose runs are of another plan."""
        self._out.mkdir(parents=True, exist_ok=True)
        told, path = dump_mapping(asdict(self._plan)), self._out / "plan.yaml"
        if not path.exists():
            publish_text(path, told)
        elif path.read_text(encoding="utf-8") != told:
            found = f"{self._out} holds runs of another plan"
            raise ContractError("--out", found, "Name a new folder")

    def _left(self) -> Iterator[tuple[int, Arm]]:
        for seed in self._seeds:
            yield from ((seed, a) for a in self._arms if not self._folder(a.key, seed).exists())

    def _folder(self, name: str, seed: int) -> Path:
        return self._out / f"{name}_{seed}"

    def _world(self, name: str) -> ToyData:
        return ToyData.under(self._out / name)

    def _make_worlds(self) -> None:
        plan = self._plan
        worlds: Sequence[tuple[str, WorldName, int, int, float]] = (
            ("distinct", "distinct", TUNED_SEED, plan.scenes, 0.0),
            ("crowded", "crowded", TUNED_SEED, plan.scenes, 0.0),
            (self._trained, "crowded", TUNED_SEED, plan.scenes, plan.unlabelled),
            ("deciding", "crowded", DECIDING_SEED, 1, 0.0),
        )
        for name, world, seed, scenes, unlabelled in worlds:
            if not (self._out / name).exists():
                folder, held_out = self._out / name, plan.held_out
                make_data(folder, scenes, held_out, seed, world=world, unlabelled=unlabelled)

    @property
    def _trained(self) -> str:
        """World of the seeds' own training."""
        return "unlabelled" if self._plan.unlabelled else "crowded"

    def _pretrain(self) -> None:
        model, random = self._out / "model", self._out / "random_model"
        if model.exists():
            return
        if not random.exists():
            make_model(random, seed=0)
        steps = self._plan.pretraining_steps
        self._console.print("[bold]vision tower[/]")
        samples = read_samples(self._world("crowded").train_jsonl, allow_poly=False)
        pretrain_vision(
            random, samples, model, steps, 0, lambda step, lost: print(lost.line(step, steps))
        )

    def _learn_in_common(self) -> None:
        distinct, crowded, plan = self._out / "distinct_run", self._out / "crowded_run", self._plan
        config = partial(base_config, "crowded_distinct", plan.distinct_steps, 0, CONSTANT)
        self._train_once("distinct scenes", distinct, "distinct", self._out / "model", config)
        config = partial(base_config, "crowded_warmup", plan.crowded_steps, 0, CONSTANT)
        self._train_once("crowded scenes", crowded, "crowded", distinct, config)

    def _converge(self, seed: int) -> None:
        what = f"seed {seed}, learning rate falls to zero"
        folder, before = self._folder("base", seed), self._out / "crowded_run"
        config = partial(base_config, "crowded_warmup", self._plan.base_steps, seed, "cosine")
        self._train_once(what, folder, self._trained, before, config)

    def _train_once(
        self, what: str, folder: Path, world: str, before: Path, config: "partial[Config]"
    ) -> None:
        """A run without answers, unless it has ended.

        before: the run, or the model, that it starts from.
        """
        if folder.exists():
            return
        self._console.print(f"[bold]{what}[/]")
        model = _last_checkpoint(before) if (before / RUN).exists() else before
        with publish_directory(folder) as part:
            self._train(config(self._place(model, part, world, NOWHERE)))

    def _train(self, config: Config) -> None:
        clients = reach_servers(config) if generates(config) else []
        train(config, check_inputs(config), clients, self._console)

    def _server(self) -> ServerProcess:
        """Start a server with the settings of a run of channel B."""
        model, run = self._out / "model", self._out / f"server_{self._seeds[0]}.yaml"
        place = self._place(model, self._out / "any", "deciding", NOWHERE)
        publish_text(run, dump_resolved(arm_config(ARMS[-1], self._plan, 0, place)))
        options = [
            *("--model", str(model)),
            *("--device", "cpu"),
            *("--dtype", "float32"),
            *("--allowed-media-dir", str(self._out)),
            *("--run-config", str(run)),
        ]
        return ServerProcess(options, run.with_suffix(".log"))

    def _run_arm(self, arm: Arm, seed: int, base_url: str) -> None:
        self._console.print(f"[bold]seed {seed}, {arm.title}[/]")
        model = _last_checkpoint(self._folder("base", seed))
        with publish_directory(self._folder(arm.key, seed)) as part:
            place = self._place(model, part, "deciding", base_url)
            self._train(arm_config(arm, self._plan, seed, place))

    def _place(self, model: Path, output_dir: Path, world: str, base_url: str) -> Place:
        """world: of the held-out scenes; those that decide are not of the world of the training."""
        trained = self._trained if world == "deciding" else world
        (group_port,) = free_ports(1)
        return Place(
            self._world(trained).train_jsonl,
            self._world(world).val_jsonl,
            model,
            output_dir,
            base_url,
            group_port,
        )


def _last_checkpoint(run: Path) -> Path:
    found = get_last_checkpoint(str(run))
    assert found is not None, "the first parts of the experiment save at their last step"
    return Path(found)


def report(out: Path) -> None:
    """Print the tables of docs/evidence.md of the runs that have ended."""
    runs = read_runs(out, TITLES)
    alone = {run.seed: run for run in runs if run.arm == BASE.key}
    if not alone:
        raise ContractError("--out", f"{out} has no run of channel A alone", "Let one end first")
    beside = [run for run in runs if run.seed in alone]
    steps = min(run.evaluated[-1] for run in beside)
    equal: dict[str, list[Row]] = defaultdict(list)
    timed: dict[str, list[Row]] = defaultdict(list)
    for run in beside:
        equal[TITLES[run.arm]].append(at_equal_steps(run, alone[run.seed], steps))
        if run.arm != BASE.key:
            timed[TITLES[run.arm]].append(at_equal_time(run, alone[run.seed], steps))
    commits = sorted({(run.commit or "unknown")[:12] for run in runs})
    print(f"\n{len(runs)} runs, {steps} steps, commit {', '.join(commits)}\n")
    print(score_table(equal, BASE.title), "\n")
    print(time_table(timed), "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="everything goes there")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the arms (default: all)")
    parser.add_argument("--arms", nargs="+", choices=TITLES, help="(default: all)")
    parser.add_argument(
        "--plan",
        choices=PLANS,
        default="full",
        help="falling: the arms' learning rate falls to zero, and 1,024 scenes decide; "
        "unlabelled: annotations lack 3 of 10 objects; small: one seed and one arm in 20 "
        "minutes; trial: whether everything runs",
    )
    parser.add_argument("--report-only", action="store_true", help="of what has ended; run nothing")
    options = parser.parse_args()
    # Either signal, also where the shell ignores Ctrl-C for us, ends what has been started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    disable_progress_bar()
    out, plan = options.out.resolve(), PLANS[options.plan]
    seeds = options.seeds or plan.seeds
    arms = [arm for arm in ARMS if not options.arms or arm.key in options.arms]
    try:
        if not options.report_only:
            Experiment(out, plan, seeds, arms).run()
        report(out)
    except (ContractError, RunError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")


if __name__ == "__main__":
    main()
