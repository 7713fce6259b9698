"""What the engine and the learner make of the same answers: a log-probability for each token.

    python -m tests.contract.engine_logprobs RUN.yaml OUT.json

The answers are the ground truth of the first samples of the run. The engine is vLLM's `LLM` with
the image and the ids; the learner packs all of them and runs its own forward. Writes to OUT

    {"engine": [[of each token of an answer], ...], "learner": the same}
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from vllm import LLM, SamplingParams

from learner.config import load_mapping, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.models.load import load_model
from learner.models.packs import Segment, make_pack
from learner.operate.estimate.step import recipe_of
from learner.types import Sample
from tests.unit.packed_logits import packed_logits

ANSWERS = 3
CONTEXT = 640
GPU = torch.cuda.is_available()
# Beside the learner, and with the engine's process below it.
ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.2}
ON_CPU: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_batched_tokens": 4 * CONTEXT,
    "enable_chunked_prefill": False,
}


def by_engine(config: Config, samples: list[Sample], segments: list[Segment]) -> list[list[float]]:
    llm = LLM(
        str(config.model.model),
        dtype=config.model.torch_dtype,
        max_model_len=CONTEXT,
        enforce_eager=True,
        **(ON_GPU if GPU else ON_CPU),
    )
    prompts: list[Any] = [
        {
            "prompt_token_ids": unexpanded(segment),
            "multi_modal_data": {"image": Image.open(sample.images[0]).convert("RGB")},
        }
        for sample, segment in zip(samples, segments, strict=True)
    ]
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for answer, segment in zip(llm.generate(prompts, asked), segments, strict=True):
        told: Any = answer.prompt_logprobs
        ids = segment.target.token_ids
        found.append(
            [of[i].logprob for of, i in zip(told[-len(ids) :], ids, strict=True)],
        )
    return found


def unexpanded(segment: Segment) -> list[int]:
    """The ids with one placeholder for the image, which the engine expands."""
    ids: list[int] = segment.input_ids.tolist()
    images: list[int] = segment.prompt.mm_token_types.tolist()
    return [
        token
        for place, token in enumerate(ids)
        if not (0 < place < len(images) and images[place] and images[place - 1])
    ]


@torch.no_grad()
def by_learner(model: torch.nn.Module, segments: list[Segment]) -> list[list[float]]:
    device = next(model.parameters()).device
    pack = make_pack(segments).to(device)
    logits = packed_logits(model, pack)
    told = logits.float().log_softmax(-1)
    found, end = [], 0
    for segment in segments:
        end += len(segment)
        ids = torch.tensor(segment.target.token_ids, device=device)
        rows = told[end - len(ids) - 1 : end - 1]
        found.append(rows.gather(1, ids[:, None]).squeeze(1).tolist())
    return found


def main(path: Path, out: Path) -> None:
    config = parse_config(load_mapping(path))
    samples = read_samples(config.data.train_jsonl, allow_poly=False)[:ANSWERS]
    loaded = load_model(config)
    loaded.model.eval()
    segments = recipe_of(config, loaded).channel_a.segments(samples)
    found = {
        "learner": by_learner(loaded.model, segments),
        "engine": by_engine(config, samples, segments),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
