"""The whole loop on this machine: a toy world, a server, two runs, a score that rises.

make data and model -> start the server -> score -> warm-up (channel A) -> score
    -> two channels against the server -> score -> stop the server

With `--control`, channel A alone goes on from the warm-up as well, for as many steps of the same
samples, and is scored by the same server. Each run has a YAML file of its own in the folder, which
`learner launch` can run again.
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from learner.analysis.evaluation.folder import Scored, write_evaluation
from learner.analysis.evaluation.scores import Evaluation, Scores
from learner.analysis.report.run_page import renew
from learner.analysis.report.run_view import REPORT
from learner.config import load_config
from learner.config.json_schema import schema_text
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.models.toy import make_model
from learner.operate.eval_plan import evaluation_folder
from learner.rollout.server_process import ServerProcess, free_ports
from learner.runs.atomic_files import publish_text, require_free
from learner.runs.console import tell
from learner.runs.run_folder import EVALUATIONS
from learner.training.run_log import evaluation_facts, score_checkpoint
from learner.training.start_checks import check_inputs, generates, reach_servers
from learner.training.train import train
from learner.types import Sample

CONFIGS = Path(__file__).resolve().with_name("demo_configs")
SCHEMA = "schema.json"
TRAIN_SCENES = 4096
HELD_OUT_SCENES = 128
MAX_NUM_SEQS = 64
SERVER_START_S = 300.0
WARMUP, TWO_CHANNEL, CHANNEL_A = "warmup", "two_channel", "channel_a"
# A row of the table.
Row = tuple[str, Scores]


@dataclass(frozen=True)
class Demo:
    """folder: of everything. base_url: of the server; empty until it runs.

    parts: how many the demo has, with the control or without.
    """

    folder: Path
    seed: int
    console: Console
    control: bool
    base_url: str = ""

    @property
    def data(self) -> ToyData:
        return ToyData.under(self.folder / "data")

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def begin(self, part: int, what: str) -> None:
        """Name a part of all."""
        number = f"{part}/{6 if self.control else 5}"
        tell(self.console, Text.assemble((number, "bold"), f" {what}"))


def run_demo(folder: Path, seed: int, console: Console, *, control: bool = False) -> None:
    """Run everything under `folder`, which must not exist or be empty, and print the scores.

    control: also go on in channel A alone, for as many steps as in both channels.

    Raises:
        ContractError: `folder` holds something, or the server could not start.
    """
    require_free(folder)
    disable_progress_bar()
    started = time.monotonic()
    demo = Demo(folder, seed, console, control)
    demo.begin(1, f"Making {TRAIN_SCENES} scenes, {HELD_OUT_SCENES} held out, and a tiny model")
    make_data(folder / "data", TRAIN_SCENES, HELD_OUT_SCENES, seed)
    make_model(demo.model, seed)
    publish_text(folder / SCHEMA, schema_text())
    log = folder / "server.log"
    with ServerProcess(_server_options(demo), log) as server:
        demo.begin(2, f"Starting the rollout server (log: {log})")
        server.wait_until_healthy(SERVER_START_S)
        rows = _run_all(replace(demo, base_url=server.base_url))
    console.print(_table(rows))
    _point_out(demo)
    tell(console, f"Run folder: {folder} ({time.monotonic() - started:.0f} s)")


def _run_all(demo: Demo) -> list[Row]:
    """Each run against a running server, scored around each."""
    held_out = read_samples(demo.data.val_jsonl, allow_poly=False)
    config = _config(demo, WARMUP, demo.model)
    rows = [("before training", _score(config, held_out).scores)]
    demo.begin(3, f"Warm-up in channel A: {demo.folder / WARMUP}")
    _train(config, demo.console)
    rows.append(("after the warm-up", _evaluate(demo, config, held_out)))
    warm = _last_checkpoint(config)
    config = _config(demo, TWO_CHANNEL, warm)
    demo.begin(4, f"Two channels, corrected answers of the server: {demo.folder / TWO_CHANNEL}")
    _train(config, demo.console)
    demo.begin(5, "Scoring the held-out scenes")
    rows.append(("after both channels", _evaluate(demo, config, held_out)))
    if demo.control:
        config = _config(demo, CHANNEL_A, warm)
        demo.begin(6, f"Channel A alone, as many steps: {demo.folder / CHANNEL_A}")
        _train(config, demo.console)
        rows.append(("after channel A alone", _evaluate(demo, config, held_out)))
    return rows


def _evaluate(demo: Demo, config: Config, held_out: list[Sample]) -> Scores:
    """Score the last checkpoint of a run, keep the answers in its folder as `learner eval` does,
    and show them on its page.
    """
    run, checkpoint = Path(config.training.output_dir), _last_checkpoint(config)
    last = config.model_copy(
        update={"model": config.model.model_copy(update={"model": checkpoint})}
    )
    evaluation = _score(last, held_out)
    data = demo.data.val_jsonl
    scored = Scored.of(evaluation.answers, data, polygons=config.allow_poly)
    facts = {"checkpoint": str(checkpoint), **evaluation_facts(last, data)}
    write_evaluation(evaluation_folder(run, checkpoint, data), scored, facts)
    renew(run, demo.console)
    return evaluation.scores


def _server_options(demo: Demo) -> list[str]:
    return [
        *("--model", str(demo.model)),
        *("--device", "cpu"),
        *("--dtype", "float32"),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--allowed-media-dir", str(demo.folder / "data")),
    ]


def _config(demo: Demo, name: str, model: Path) -> Config:
    """Write the YAML of one run, on top of the shipped one, and load it."""
    (group_port,) = free_ports(1)
    folder = demo.folder
    server = {"servers": [{"base_url": demo.base_url, "group_port": group_port}]}
    own = {
        "extends": os.path.relpath(CONFIGS / f"{name}.yaml", folder),
        "model": {"model": str(model)},
        "data": {"train_jsonl": str(demo.data.train_jsonl), "val_jsonl": str(demo.data.val_jsonl)},
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


def _score(config: Config, held_out: list[Sample]) -> Evaluation:
    return score_checkpoint(config, held_out, reach_servers(config))


def _last_checkpoint(config: Config) -> Path:
    found = get_last_checkpoint(str(config.training.output_dir))
    assert found is not None, "the demo's configs save at the last step"
    return Path(found)


def _point_out(demo: Demo) -> None:
    """What a person may look at next."""
    run = demo.folder / TWO_CHANNEL
    (evaluation,) = (run / EVALUATIONS).iterdir()
    shown = {
        "The run as a page": run / REPORT,
        "Its answers to the held-out scenes": evaluation / REPORT,
        "Its config, to run it again": demo.folder / f"{TWO_CHANNEL}.yaml",
    }
    for what, path in shown.items():
        tell(demo.console, f"{what}: {path}")


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"{HELD_OUT_SCENES} held-out scenes, answers of the server, IoU >= 0.5")
    for column in ("", "F1", "precision", "recall", "F1 of boxes alone"):
        table.add_column(column, justify="left" if not column else "right")
    for name, s in rows:
        values = (s.f1, s.precision, s.recall, s.box_f1)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table
