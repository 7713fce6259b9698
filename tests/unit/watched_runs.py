"""Run folders as a learner writes them, line by line, for who watches them."""

import json
from pathlib import Path
from typing import Any

from learner.config import dump_resolved, load_mapping, merge, parse_config
from learner.runs.atomic_files import append_line
from learner.runs.run_folder import identity_of_this_process

CONFIG = Path(__file__).parents[2] / "configs" / "demo" / "two_channel.yaml"
SERVER = "http://127.0.0.1:8000"


class WrittenRun:
    """A run of two channels with one server; `step` is the one it has come to."""

    def __init__(self, folder: Path, **training: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        given = {
            "model": {"model": str(folder)},
            "data": {"train_jsonl": str(folder), "val_jsonl": str(folder)},
            "training": {
                "output_dir": str(folder),
                "run_name": "shapes",
                "max_steps": 200,
                "save_steps": 20,
                **training,
            },
        }
        config = parse_config(merge(load_mapping(CONFIG), given))
        (folder / "resolved_config.yaml").write_text(dump_resolved(config))
        self.facts(process=identity_of_this_process())
        self.step = 0

    def facts(self, **facts: Any) -> None:
        (self.folder / "run.json").write_text(json.dumps({"started_at_step": 0, **facts}))

    def metrics(self, **line: Any) -> None:
        append_line(self.folder / "metrics.jsonl", json.dumps({"step": self.step, **line}))

    def steps(self, count: int, **also: Any) -> None:
        for _ in range(count):
            self.step += 1
            b = self.step % 2 == 0
            self.metrics(**(step_numbers(self.step, b) | also))
            if b:
                self.calls()

    def calls(self, rank: int = 0, **also: Any) -> None:
        """A line of rollouts of the step that is logged."""
        seconds = {"total": 0.25, "send": 0.1}
        push = {"server": SERVER, "version": self.step, "again": False, "seconds": seconds}
        call = {"server": SERVER, "count": 8, "attempt": 1, "outcome": "answered"}
        line = {
            "step": self.step,
            "servers": [{"base_url": SERVER, "group_port": 1}],
            "sync_fallback": None,
            "pushes": [push],
            "lost": [],
            "calls": [call],
            **also,
        }
        name = f"rollout_calls.rank{rank}.jsonl" if rank else "rollout_calls.jsonl"
        append_line(self.folder / name, json.dumps(line))


def step_numbers(step: int, b: bool) -> dict[str, Any]:
    numbers = {
        "loss": 10.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "epoch": step / 100,
        "step/channel_b": float(b),
        "time/target_s": 0.1,
        "time/learn_s": 0.4,
        "time/step_s": 2.0 if b else 1.0,
    }
    if not b:
        return numbers | {"loss/A1_text/struct_ce": 0.5}
    return numbers | {
        "loss/B_coord/bbox_ciou": 0.25,
        "time/rollout_s": 1.25,
        "time/push_s": 0.25,
        "rollout/per_second": 40.0 + step,
        "rollout/gen_new_tokens_mean": 30.0,
        "rollout/repeat_terminate_triggered_sequences": 0.0,
        "stage2_ab/channel_b/match_rate": 0.75,
        "stage2_ab/channel_b/strict_drop/missing_desc": 2.0,
        "stage2_ab/channel_b/strict_drop/wrong_arity": 0.0,
        "sync/weights_version": float(step),
        "sync/total_s": 0.25,
    }
