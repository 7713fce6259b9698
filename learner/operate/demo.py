"""`learner demo`: data, model, server, training and scores of a toy world on this machine.

make data and model -> start the server, and train the warm-up (channel A) meanwhile
    -> score both models -> two channels against the server -> score -> stop the server

`--control` adds a run of channel A alone: from the same warm-up, with the same number of steps and
the same samples. Each run has a YAML file in the folder, which `learner launch` can run again.

`--world crowded` first pretrains the vision tower, then trains on scenes with distinct
descriptions; its two channels have a clean prefix.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.scores import Scores
from learner.analysis.report.run_page import renew
from learner.analysis.report.run_view import REPORT
from learner.config import load_config
from learner.config.load import schema_text
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.show import Table, print_tables
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.models.toy_vision import pretrain_vision
from learner.operate.eval_plan import plan_evaluation
from learner.operate.eval_run import run_evaluation
from learner.rollout.server_process import LOOPBACK, ServerProcess, free_ports
from learner.runs.atomic_files import publish_text
from learner.runs.console import tell
from learner.runs.run_folder import EVALUATIONS
from learner.training.input_checks import check_inputs, generates
from learner.training.server_checks import reach_servers
from learner.training.train import train

CONFIGS = Path(__file__).resolve().with_name("demo_configs")
SCHEMA = "schema.json"
TRAIN_SCENES = 4096
HELD_OUT_SCENES = 128
MAX_NUM_SEQS = 64
SERVER_START_S = 300.0
DISTINCT, WARMUP, TWO_CHANNEL, CHANNEL_A = "distinct", "warmup", "two_channel", "channel_a"
PRETRAINING_STEPS = 2400  # of the vision tower, for crowded scenes
DemoWorld = Literal["plain", "crowded"]
Row = tuple[str, Scores]
COLUMNS: dict[str, Callable[[Scores], str]] = {
    "F1": lambda s: f"{s.ratio('f1'):.3f}",
    "precision": lambda s: f"{s.ratio('precision'):.3f}",
    "recall": lambda s: f"{s.ratio('recall'):.3f}",
    "F1@mIoU": lambda s: f"{s.ratio('f1_miou'):.3f}",
    "duplicates an answer": lambda s: f"{s.duplicates / s.answers:.2f}",
}


@dataclass
class Demo:
    """base_url: of the server, which may not run yet. begun: number of parts begun."""

    folder: Path
    seed: int
    console: Console
    control: bool
    world: DemoWorld
    base_url: str
    begun: int = 0

    @property
    def data(self) -> ToyData:
        return ToyData.under(self.folder / "data")

    @property
    def distinct(self) -> Path:
        return self.folder / "data_distinct"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def begin(self, part: str) -> None:
        self.begun += 1
        number = f"{self.begun}/{5 + self.control + 2 * (self.world == 'crowded')}"
        tell(self.console, Text.assemble((number, "bold"), f" {part}"))


def run_demo(
    folder: Path,
    seed: int,
    console: Console,
    *,
    control: bool = False,
    world: DemoWorld = "plain",
) -> None:
    """Run all parts under `folder`, and print the scores.

    control: also train channel A alone, for the same number of steps.

    Raises ContractError if the server cannot start.
    """
    disable_progress_bar()
    started = time.monotonic()
    (port,) = free_ports(1)
    demo = Demo(folder, seed, console, control, world, f"http://{LOOPBACK}:{port}")
    demo.begin(f"Making {TRAIN_SCENES} scenes, {HELD_OUT_SCENES} held out, and a tiny model")
    make_data(folder / "data", TRAIN_SCENES, HELD_OUT_SCENES, seed, world=world)
    if world == "plain":
        make_model(demo.model, seed)
    else:
        make_data(demo.distinct, TRAIN_SCENES, HELD_OUT_SCENES, seed, world="distinct")
        make_model(folder / "random_model", seed)
        demo.begin(f"Pretraining the vision tower, {PRETRAINING_STEPS} steps: {demo.model}")
        pretrain_vision(
            folder / "random_model",
            read_samples(demo.data.train_jsonl, allow_poly=False),
            demo.model,
            PRETRAINING_STEPS,
            seed,
            lambda step, losses: tell(console, losses.line(step, PRETRAINING_STEPS)),
        )
    publish_text(folder / SCHEMA, schema_text())
    config = _config(demo, WARMUP, demo.model)
    log = folder / "server.log"
    with ServerProcess(_server_options(demo), log, port) as server:
        demo.begin(f"Starting the rollout server (log: {log})")
        rows = _run_all(demo, server, config)
    print_tables([_table(rows)])
    _print_end(demo)
    tell(console, f"Run folder: {folder} ({time.monotonic() - started:.0f} s)")


def _run_all(demo: Demo, server: ServerProcess, first: Config) -> list[Row]:
    config = first
    if demo.world == "crowded":
        server.wait_until_healthy(SERVER_START_S)  # before an hour of training
        distinct = _config(demo, DISTINCT, demo.model, ToyData.under(demo.distinct))
        demo.begin(f"Scenes of distinct shapes, in channel A: {demo.folder / DISTINCT}")
        _train(distinct, demo.console)
        config = _config(demo, WARMUP, _last_checkpoint(distinct))
    demo.begin(f"Warm-up in channel A: {demo.folder / WARMUP}")
    _train(config, demo.console)
    server.wait_until_healthy(SERVER_START_S)
    rows = [("before training", _score(demo, first))]
    warm = _last_checkpoint(config)
    rows.append(("after the warm-up", _score(demo, config, warm)))
    config = _config(demo, TWO_CHANNEL, warm)
    demo.begin(f"Two channels, corrected answers of the server: {demo.folder / TWO_CHANNEL}")
    _train(config, demo.console)
    demo.begin("Scoring the held-out scenes")
    rows.append(("after both channels", _score(demo, config, _last_checkpoint(config))))
    if demo.control:
        config = _config(demo, CHANNEL_A, warm)
        demo.begin(f"Channel A alone, as many steps: {demo.folder / CHANNEL_A}")
        _train(config, demo.console)
        rows.append(("after channel A alone", _score(demo, config, _last_checkpoint(config))))
    return rows


def _score(demo: Demo, config: Config, checkpoint: Path | None = None) -> Scores:
    plan = plan_evaluation(config, checkpoint)
    scored = run_evaluation(plan, reach_servers(plan.config), demo.console)
    renew(Path(config.training.output_dir), demo.console)
    return scored.scores


def _server_options(demo: Demo) -> list[str]:
    return [
        *("--model", str(demo.model)),
        *("--device", "cpu"),
        *("--dtype", "float32"),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--allowed-media-dir", str(demo.folder / "data")),
        *("--run-config", str(demo.folder / f"{WARMUP}.yaml")),
    ]


def _config(demo: Demo, name: str, model: Path, data: ToyData | None = None) -> Config:
    """Write the YAML of a run, which extends the shipped one, and load it."""
    (group_port,) = free_ports(1)
    folder, data = demo.folder, data or demo.data
    server = {"servers": [{"base_url": demo.base_url, "group_port": group_port}]}
    shipped = name if demo.world == "plain" else f"{demo.world}_{name}"
    own = {
        "extends": os.path.relpath(CONFIGS / f"{shipped}.yaml", folder),
        "model": {"model": str(model)},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {"output_dir": str(folder / name), "seed": demo.seed},
        "rollout_matching": {"vllm": {"server": server}},
    }
    path = folder / f"{name}.yaml"
    publish_text(path, f"# yaml-language-server: $schema={SCHEMA}\n{dump_mapping(own)}")
    return load_config(path)


def _train(config: Config, console: Console) -> None:
    inputs = check_inputs(config)
    clients = reach_servers(config) if generates(config) else []
    train(config, inputs, clients, console)


def _last_checkpoint(config: Config) -> Path:
    checkpoint = get_last_checkpoint(str(config.training.output_dir))
    assert checkpoint is not None, "the demo's configs save at the last step"
    return Path(checkpoint)


def _print_end(demo: Demo) -> None:
    run = demo.folder / TWO_CHANNEL
    (evaluation,) = (run / EVALUATIONS).iterdir()
    tell(demo.console, f"Shown above: scores on {HELD_OUT_SCENES} scenes that were not trained on")
    tell(demo.console, f"Look at {run / REPORT} (the run) and {evaluation / REPORT} (its answers)")
    tell(demo.console, "Next: docs/first-run.md, or your own data by `learner init`")


def _table(rows: list[Row]) -> Table:
    cells = [[name, *(column(scores) for column in COLUMNS.values())] for name, scores in rows]
    title = f"{HELD_OUT_SCENES} held-out scenes, answers of the server, IoU >= 0.5"
    return Table(title, ("", *(f"#{name}" for name in COLUMNS)), cells)
