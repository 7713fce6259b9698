"""vLLM's AsyncLLM in a program of its own: no server between the caller and the engine.

    python -m benchmarks.peers.in_process CHECKPOINT

Reads a line of JSON per batch, `{"conversations": [...], "max_tokens": N}`, and answers with
`{"seconds", "prompt_tokens", "tokens"}`. The clock runs from the conversations to the ids and
the text of every answer.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.processes import end_with_benchmark
from benchmarks.workload import engine_settings


async def serve(checkpoint: Path, answers: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout_server.engines.vllm.engine import engine_args

    config = engine_args(engine_settings(checkpoint), 0).create_engine_config()
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    try:
        print("ready", file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(llm, json.loads(line))), file=answers, flush=True)
    finally:
        llm.shutdown()


async def answer(llm: Any, batch: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    done = await asyncio.gather(
        *(complete(llm, messages, batch["max_tokens"]) for messages in batch["conversations"])
    )
    seconds = time.perf_counter() - began
    prompt_tokens, tokens = (sum(counts) for counts in zip(*done, strict=True))
    return {"seconds": seconds, "prompt_tokens": prompt_tokens, "tokens": tokens}


async def complete(llm: Any, messages: list[Any], max_tokens: int) -> tuple[int, int]:
    """Render, generate, decode once: (prompt tokens, tokens)."""
    from vllm.renderers.params import ChatParams
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    _, inputs = await llm.renderer.render_chat_async([messages], params)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    (final,) = [output async for output in llm.generate(inputs[0], sampling, uuid.uuid4().hex)]
    token_ids = list(final.outputs[0].token_ids)
    llm.get_tokenizer().decode(token_ids, skip_special_tokens=False)
    return len(final.prompt_token_ids), len(token_ids)


def main() -> None:
    end_with_benchmark()
    checkpoint = Path(sys.argv[1])
    # What vLLM prints goes to the log with the rest; answers keep the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import uvloop  # what vLLM's own server and uvicorn run on

    uvloop.run(serve(checkpoint, answers))


if __name__ == "__main__":
    main()
