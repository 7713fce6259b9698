"""Runs of `learner train` in processes of their own: config, torchrun, logged answers."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.config import dump_mapping
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.models.prompts import PromptEncoder
from learner.runs.rollout_log import StepAnswer
from learner.stages.formats.coord_json import parse_rollout
from tests.unit.small_run import small_mapping

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def write_config(model: Path, data: ToyData, folder: Path, /, **sections: Any) -> Path:
    """The YAML `run.yaml` in a folder, of a small run whose run folder is `run` beside it."""
    file = folder / "run.yaml"
    file.write_text(dump_mapping(small_mapping(model, data, folder / "run", **sections)))
    return file


def torchrun(*program: str, environment: Mapping[str, str], timeout_s: float = 280.0) -> str:
    """Run a program in two processes, which must succeed; return their stderr.

    environment: of the processes, over this one's.
    """
    done = subprocess.run(
        [*TORCHRUN, *program],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-20000:]
    return done.stderr


def logged_answers(folder: Path) -> list[StepAnswer]:
    """All answers of a run, in order. folder: of the run."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [StepAnswer.model_validate_json(line) for line in lines]


def check_alignment(config: Config, answers: list[StepAnswer]) -> None:
    """Prompts have the ids that the learner encodes; each target begins as its answer was read."""
    loaded = load_model(config)
    encode = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    for answer in answers:
        assert answer.prompt_token_ids == encode(answer.sample).ids.tolist()
        parsed = parse_rollout(answer.response_token_ids, loaded.tokenizer, allow_poly=False)
        assert answer.target is not None
        kept = answer.target.token_ids(answer.response_token_ids)[: answer.target.prefix_len]
        assert kept == parsed.prefix_token_ids
