"""A run folder as a run would leave it, made of numbers and answers that a test chooses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from learner.config import dump_resolved
from learner.data.toy import ToyData
from learner.runs.rollout_log import (
    LoggedMatch,
    LoggedObject,
    LoggedParse,
    LoggedPrediction,
    StepAnswer,
)
from learner.runs.run_folder import RunFolder
from tests.unit.small_run import small_config

Box = tuple[int, int, int, int]
B = "stage2_ab/channel_b"


def step_line(step: int, channel: str = "B", **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl. `_` in the names of `more` stands for `/` where it is doubled."""
    line: dict[str, Any] = {
        "step": step,
        "loss": 6.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-4,
        "epoch": step / 100,
        "step/channel_b": float(channel == "B"),
        "time/target_s": 0.1,
        "time/pack_s": 0.01,
        "time/learn_s": 0.5,
        f"loss/{'B_coord' if channel == 'B' else 'A2_coord'}/bbox_ciou": 0.4 / step,
    }
    if channel == "B":
        line |= {
            "time/push_s": 0.2,
            "time/rollout_s": 0.6,
            "time/wait_s": 0.4,
            "time/step_s": 1.2,
            f"{B}/N_valid_pred": 40.0,
            f"{B}/N_drop_invalid": 0.0,
            f"{B}/strict_drop/bbox_invalid": 0.0,
            f"{B}/strict_drop/key_invalid": 0.0,
            f"{B}/matched": 30.0,
            f"{B}/false_positives": 10.0,
            f"{B}/fn_appended": 5.0,
            f"{B}/match_rate": 0.5 + 0.4 * (1 - 1 / step),
            "rollout/gen_new_tokens_mean": 38.0,
            "rollout/gen_new_tokens_p99": 45.0,
            "rollout/parse_truncated_rate": 0.0,
            "rollout/repeat_terminate_triggered_sequences": 0.0,
        }
    else:
        line |= {"time/wait_s": 0.11, "time/step_s": 0.7}
    return line | {key.replace("__", "/"): value for key, value in more.items()}


def answer(
    sample: str = "train.jsonl:1",
    step: int = 2,
    *,
    truths: Sequence[tuple[str, Box]] = (("cat", (100, 100, 400, 400)),),
    predicted: Sequence[tuple[str, Box]] = (("cat", (110, 100, 400, 400)),),
    pairs: Sequence[tuple[int, int]] = ((0, 0),),
    dropped: Sequence[tuple[str, str]] = (),
    image: Path = Path("/nowhere/image.png"),
    text: str = '{"object_1": {}}',
    **more: Any,
) -> StepAnswer:
    matched, found = {p for p, _ in pairs}, {g for _, g in pairs}
    known: dict[str, Any] = {
        "sample_id": f"/data/{sample}",
        "images": [image],
        "width": 64,
        "height": 64,
        "ground_truth": [
            LoggedObject(desc=desc, kind="bbox_2d", coords=list(box)) for desc, box in truths
        ],
        "seed": 7,
        "weights_version": (step, step),
        "finish_reason": "stop",
        "repeat_terminated": False,
        "supervised": True,
        "parse": LoggedParse(
            truncated=more.pop("truncated", False),
            invalid=more.pop("invalid", False),
            fault=more.pop("fault", None),
            objects=[
                LoggedPrediction(desc=desc, kind="bbox_2d", coords=list(box), key=f"object_{place}")
                for place, (desc, box) in enumerate(predicted, start=1)
            ],
            dropped=list(dropped),
        ),
        "match": LoggedMatch(
            pairs=list(pairs),
            false_positives=[p for p in range(len(predicted)) if p not in matched],
            false_negatives=[g for g in range(len(truths)) if g not in found],
            gated=0,
        ),
        "text": text,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3] * 38,
        "step": step,
        "rank": 0,
        "chunk": 0,
    }
    return StepAnswer(**{**known, **more})


@dataclass
class MadeRun:
    """Parts of a run folder. answers: in any order; each has its step and rank."""

    path: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[StepAnswer] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    def write(self) -> RunFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        two_channels = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
        data = ToyData.under(Path("/data"))
        config = small_config(Path("/model"), data, self.path, **(two_channels | self.sections))
        (self.path / "resolved_config.yaml").write_text(dump_resolved(config))
        known = {"versions": {"torch": "2.0"}, "commit": "0123456789abcdef", "servers": []}
        (self.path / "run.json").write_text(json.dumps({**known, **self.facts}))
        self._lines("metrics.jsonl", self.metrics)
        self._lines("rollout_calls.jsonl", self.calls)
        for each in self.answers:
            rank = f".rank{each.rank}" if each.rank else ""
            file = self.path / "rollouts" / f"step_{each.step:06d}{rank}.jsonl"
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8") as log:
                log.write(each.model_dump_json() + "\n")
        return RunFolder.open(self.path)

    def _lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        if lines:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.path / name).write_text(text, encoding="utf-8")


def draw_image(file: Path, size: tuple[int, int], box: Box, colour: str = "red") -> Path:
    image = Image.new("RGB", size)
    at = [c / 999 * (size[place % 2] - 1) for place, c in enumerate(box)]
    ImageDraw.Draw(image).rectangle(at, fill=colour)
    image.save(file)
    return file
