"""The whole loop on this machine: a toy world, a server, two runs, a score that rises.

make data and model -> start the server -> score -> warm-up (channel A)
    -> two channels against the server -> score -> stop the server

Each run has a YAML file of its own in the folder, which `learner launch` can run again.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from learner.config import load_config
from learner.config.json_schema import schema_text
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping
from learner.console import tell
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.evaluation.folder import REPORT, Scored, write_evaluation
from learner.evaluation.scores import Evaluation, Scores
from learner.model.toy import make_model
from learner.operate.server_process import ServerProcess, free_ports
from learner.preflight import check_inputs, generates, reach_servers
from learner.publish import publish_text, require_free
from learner.scoring import evaluation_facts, score_checkpoint
from learner.train import train
from learner.types import Sample

CONFIGS = Path(__file__).resolve().with_name("demo_configs")
SCHEMA = "schema.json"
TRAIN_SCENES = 4096
HELD_OUT_SCENES = 128
MAX_NUM_SEQS = 64
SERVER_START_S = 300.0
EVALUATION = "evaluation"


@dataclass(frozen=True)
class World:
    """Where the demo's data and model are."""

    data: Path
    model: Path


def run_demo(folder: Path, seed: int, console: Console) -> Scores:
    """Run everything under `folder`, which must not exist or be empty; returns the last score.

    Raises:
        ContractError: `folder` holds something, or the server could not start.
    """
    require_free(folder)
    disable_progress_bar()
    started = time.monotonic()
    world = World(folder / "data", folder / "model")
    _begin(
        1, f"Making {TRAIN_SCENES} scenes, {HELD_OUT_SCENES} held out, and a tiny model", console
    )
    make_data(world.data, TRAIN_SCENES, HELD_OUT_SCENES, seed)
    make_model(world.model, seed)
    publish_text(folder / SCHEMA, schema_text())
    log = folder / "server.log"
    with ServerProcess(_server_options(world), log) as server:
        _begin(2, f"Starting the rollout server (log: {log})", console)
        server.wait_until_healthy(SERVER_START_S)
        scores = _run_both(folder, world, server.base_url, seed, console)
    console.print(_table(scores))
    _point_out(folder, console)
    tell(console, f"Run folder: {folder} ({time.monotonic() - started:.0f} s)")
    return scores[-1][1]


def _run_both(
    folder: Path, world: World, base_url: str, seed: int, console: Console
) -> list[tuple[str, Scores]]:
    """Warm-up and two-channel run against a running server, scored around each."""
    warmup, two = folder / "warmup", folder / "two_channel"
    held_out = read_samples(ToyData.under(world.data).val_jsonl, allow_poly=False)
    config = _config("warmup", folder, world.model, world, base_url, seed)
    scores = [("before training", _score(config, held_out).scores)]
    _begin(3, f"Warm-up in channel A: {warmup}", console)
    _train(config, console)
    config = _config("two_channel", folder, _last_checkpoint(warmup), world, base_url, seed)
    scores.append(("after the warm-up", _score(config, held_out).scores))
    _begin(4, f"Two channels, corrected answers of the server: {two}", console)
    _train(config, console)
    _begin(5, "Scoring the held-out scenes", console)
    checkpoint = _last_checkpoint(two)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"model": checkpoint})}
    )
    evaluation = _score(config, held_out)
    _keep(folder / EVALUATION, evaluation, config, checkpoint)
    return [*scores, ("after both channels", evaluation.scores)]


def _keep(folder: Path, evaluation: Evaluation, config: Config, checkpoint: Path) -> None:
    """The answers and their scores, as `learner eval` writes them."""
    data = config.data.val_jsonl
    assert data is not None, "the demo has held-out scenes"
    scored = Scored.of(evaluation.answers, data, polygons=config.allow_poly)
    write_evaluation(
        folder, scored, {"checkpoint": str(checkpoint), **evaluation_facts(config, data)}
    )


def _server_options(world: World) -> list[str]:
    return [
        *("--model", str(world.model)),
        *("--device", "cpu"),
        *("--dtype", "float32"),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--allowed-media-dir", str(world.data)),
    ]


def _config(name: str, folder: Path, model: Path, world: World, base_url: str, seed: int) -> Config:
    """Write the YAML of one run, on top of the shipped one, and load it."""
    (group_port,) = free_ports(1)
    files = ToyData.under(world.data)
    server = {"servers": [{"base_url": base_url, "group_port": group_port}]}
    own = {
        "extends": os.path.relpath(CONFIGS / f"{name}.yaml", folder),
        "model": {"model": str(model)},
        "data": {"train_jsonl": str(files.train_jsonl), "val_jsonl": str(files.val_jsonl)},
        "training": {"output_dir": str(folder / name), "seed": seed},
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


def _last_checkpoint(run: Path) -> Path:
    found = get_last_checkpoint(str(run))
    assert found is not None, "the demo's configs save at the last step"
    return Path(found)


def _begin(part: int, what: str, console: Console) -> None:
    tell(console, Text.assemble((f"{part}/5", "bold"), f" {what}"))


def _point_out(folder: Path, console: Console) -> None:
    """What a person may look at next."""
    shown = {
        "The run as a page": folder / "two_channel" / REPORT,
        "Its answers to the held-out scenes": folder / EVALUATION / REPORT,
        "Its config, to run it again": folder / "two_channel.yaml",
    }
    for what, path in shown.items():
        tell(console, f"{what}: {path}")


def _table(scores: list[tuple[str, Scores]]) -> Table:
    table = Table(title=f"{HELD_OUT_SCENES} held-out scenes, answers of the server, IoU >= 0.5")
    for column in ("", "F1", "precision", "recall", "F1 of boxes alone"):
        table.add_column(column, justify="left" if not column else "right")
    for name, s in scores:
        values = (s.f1, s.precision, s.recall, s.box_f1)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table
