"""A channel-B step of the toy model, on the same objects in each answer format.

The model decodes as transformers' `generate` does, one forward for each token; a logits processor
has it write the annotation of each scene without its last object. Then the step parses and matches
the answers, appends the object that is missing, and runs a forward and a backward of each pack. The
scenes are crowded; the optimizer's update and a push are left out, for they are the same.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.loss_parts.measuring import OBJECTIVE
from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import make_data
from learner.models.load import load_model
from learner.models.packs import make_pack
from learner.models.prompts import EncodedPrompt, PromptEncoder
from learner.models.toy import make_model
from learner.objectives.pipeline import Pipeline
from learner.operate.demo import CONFIGS
from learner.stages.formats import answer_format
from learner.stages.packing.plan import plan_packs
from learner.stages.tokens import encode_answer
from learner.training.channels import ChannelB, Encoding
from learner.types import RolloutOutput

SCENES = 16


class _Told(LogitsProcessor):
    """Row i can only continue with `answers[i]`, and with the last id of it behind its end."""

    def __init__(self, width: int, answers: list[list[int]]) -> None:
        self._width = width
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._width
        forced = torch.full_like(scores, -torch.inf)
        for row, answer in enumerate(self._answers):
            forced[row, answer[min(place, len(answer) - 1)]] = 0.0
        return forced


class FormatStep:
    """One format on the scenes of `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        config = _config(folder, name)
        loaded = load_model(config)
        self._config, self._model = config, loaded.model
        self._samples = read_samples(config.data.train_jsonl, allow_poly=False)
        answers, order = answer_format(config), config.custom.object_field_order
        prompt = PromptEncoder(loaded.processor, config.template.prompt, None)
        self._prompts = [prompt(sample) for sample in self._samples]
        encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, order, answers)
        self._channel = ChannelB(encoding, config.rollout_matching.matching, allow_poly=False)
        self._pipeline = Pipeline(OBJECTIVE, loaded.vocab.ids)
        self._answers = [
            [
                *encode_answer(loaded.tokenizer, answers.write(sample.objects[:-1], order)),
                loaded.vocab.end_id,
            ]
            for sample in self._samples
        ]
        self.answer_tokens = sum(map(len, self._answers))
        self.objects = sum(len(sample.objects) for sample in self._samples)

    def measure(self) -> tuple[float, float]:
        """Seconds of the answers, and of everything after them."""
        began = time.perf_counter()
        rollouts = self._answer()
        answered = time.perf_counter()
        segments, _ = self._channel.segments(self._samples, rollouts)
        assert len(segments) == len(self._samples), "every answer is supervised"
        lengths = [len(segment) for segment in segments]
        fill = self._config.training.packing_min_fill_ratio
        self._model.train()
        for indices in plan_packs(lengths, self._config.global_max_length, fill):
            pack = make_pack([segments[i] for i in indices])
            selection = self._pipeline.select(pack.supervision, "B")
            reader = self._pipeline.reader(selection)
            stats = self._channel.forward_stats(self._model, pack, reader)
            self._pipeline(stats, selection, "B").total.backward()
        self._model.zero_grad()
        return answered - began, time.perf_counter() - answered

    def _answer(self) -> list[RolloutOutput]:
        self._model.eval()
        generate: Any = self._model.generate
        longest = max(map(len, self._answers))
        inputs = _batched(self._prompts)
        told = _Told(inputs["input_ids"].shape[1], self._answers)
        rows = generate(
            **inputs,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            logits_processor=LogitsProcessorList([told]),
        ).tolist()
        return [
            RolloutOutput(
                prompt.ids.tolist(), row[-longest:][: len(own) - 1], "", "stop", False, (1, 1), None
            )
            for prompt, own, row in zip(self._prompts, self._answers, rows, strict=True)
        ]


def _batched(prompts: list[EncodedPrompt]) -> dict[str, torch.Tensor]:
    """Prompts of one length: the scenes are of one size."""
    ids = torch.stack([prompt.ids for prompt in prompts])
    pixels = [prompt.pixel_values for prompt in prompts if prompt.pixel_values is not None]
    grids = [prompt.image_grid_thw for prompt in prompts if prompt.image_grid_thw is not None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.stack([prompt.mm_token_types for prompt in prompts]),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.cat(grids),
    }


def _config(folder: Path, name: str) -> Config:
    data = make_data(folder / name / "data", SCENES, 1, seed=0, world="crowded")
    make_model(folder / name / "model", seed=0)
    places = {
        "model": {"model": str(folder / name / "model")},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {"output_dir": str(folder / name / "run")},
        "custom": {"answer_format": name},
    }
    return parse_config(merge(load_mapping(CONFIGS / "crowded_distinct.yaml"), places))
