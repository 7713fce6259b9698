"""The guard in plain vLLM, without our server: `LLM` loads the processor by its name.

    python -m tests.contract.plain_vllm CHECKPOINT OUT

One engine without and one with asynchronous scheduling; prompts are read in chunks and the
KV cache is too small for all sequences, so some are preempted and resumed. Writes to OUT

    {"sync": RUN, "async": RUN}
    RUN       {"preemptions": number, "sequences": [token ids, ...]}
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.sampling_params import SamplingParams

from rollout_server.settings.repeat_config import PROCESSOR

MAX_TOKENS = 200


def start(checkpoint: str, async_scheduling: bool) -> LLM:
    return LLM(
        checkpoint,
        logits_processors=[PROCESSOR],
        async_scheduling=async_scheduling,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=8 * 2**20,
        block_size=32,
        disable_log_stats=False,
    )


def run(llm: LLM) -> dict[str, Any]:
    prompts: list[Any] = [
        {"prompt_token_ids": [(7 * prompt + i) % 250 for i in range(100)]} for prompt in range(24)
    ]
    params = SamplingParams(n=2, temperature=0.3, max_tokens=MAX_TOKENS)
    answers = llm.generate(prompts, params, use_tqdm=False)
    counted: list[Any] = llm.get_metrics()
    return {
        "preemptions": sum(m.value for m in counted if m.name == "vllm:num_preemptions"),
        "sequences": [list(each.token_ids) for answer in answers for each in answer.outputs],
    }


if __name__ == "__main__":
    checkpoint, out = sys.argv[1:]
    modes = {"sync": False, "async": True}
    runs = {name: run(start(checkpoint, scheduling)) for name, scheduling in modes.items()}
    Path(out).write_text(json.dumps(runs))
