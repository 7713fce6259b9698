"""A small run of `stage2_group_relative`: its config, and a backend with scripted answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from learner.config import merge
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.prompts import EncodedPrompt
from learner.rollout.backend import RolloutBackend
from learner.stages.tokens import Tokenizer
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from shared_contracts.infer import RequestConfig
from tests.unit.answers import encode
from tests.unit.small_run import rollout, small_config, written

SIZE = 2
POLICY_GRADIENT: dict[str, Any] = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {"clip_low": 0.2, "clip_high": 0.3, "kl_weight": 0.0},
}
TOKEN_CE: dict[str, Any] = {
    "name": "token_ce",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A", "B"],
    "config": {
        "desc_ce_weight": 1.0,
        "rollout_fn_desc_weight": 1.0,
        "rollout_matched_prefix_struct_weight": 1.0,
        "self_context_struct_ce_weight": 0.0,
    },
}
REWARD = {
    "f1_weight": 1.0,
    "duplicate_weight": 0.5,
    "duplicate_iou": 0.9,
    "oversized_weight": 0.25,
    "oversized_share": 0.9,
    "invalid_weight": 2.0,
}
SERVERS = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]}
GROUPED: dict[str, Any] = {
    "custom": {"trainer_variant": "stage2_group_relative"},
    "stage2_ab": {"schedule": {"b_ratio": 1.0}, "pipeline": {"objective": [POLICY_GRADIENT]}},
    "group_relative": {"group_size": SIZE, "advantage": "mean", "reward": REWARD},
    "rollout_matching": {
        "rollout_backend": "vllm",
        "vllm": {"mode": "server", "server": SERVERS},
        "decode_mode": "sampling",
        "decoding": {"temperature": 1.0},
        "logprobs": True,
        "max_new_tokens": 64,
    },
}


def group_config(model: Path, data: ToyData, out: Path, **sections: Any) -> Config:
    return small_config(model, data, out, **merge(GROUPED, sections))


GHOST = GroundTruthObject("ghost", Shape("bbox_2d", (900, 900, 950, 999)))


class Answering(RolloutBackend):
    """The first answer to a sample is right, the second one has a ghost before its first object.

    Their log-probabilities are random, near those of the untrained toy model.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tokenizer: Tokenizer,
        prompt: Callable[[Sample], EncodedPrompt],
    ) -> None:
        super().__init__()
        self._samples = {sample.sample_id: sample for sample in samples}
        self._tokenizer = tokenizer
        self._prompt = prompt
        self.seeds: list[int] = []

    def rollout(self, requests: Any, request_config: RequestConfig) -> list[RolloutOutput]:
        assert request_config.seed is not None
        seeds = range(request_config.seed, request_config.seed + len(requests))
        self.seeds += seeds
        pairs = zip(requests, seeds, strict=True)
        return [self._answer(self._samples[str(request.uuid)], seed) for request, seed in pairs]

    def push_weights(self, version: int) -> None: ...

    def close(self) -> None: ...

    def _answer(self, sample: Sample, seed: int) -> RolloutOutput:
        second = (seed - 1) % SIZE
        objects = (GHOST, *sample.objects[:1]) if second else sample.objects
        ids = encode(self._tokenizer, written(*objects))
        draw = np.random.default_rng([len(ids), int(sample.sample_id.rsplit(":")[-1]), second])
        output = rollout(self._prompt(sample).ids.tolist(), ids)
        near_uniform = np.log(1342) + 0.3 * draw.standard_normal(len(ids))  # as the toy model is
        return replace(output, seed=seed, logprobs=(-near_uniform).tolist())
