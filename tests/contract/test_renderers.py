"""Rendering by an engine whose renderer does not return, without vLLM's engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_server.engines.engine_protocol import EngineDead, PromptMessage
from shared_contracts.repeat_guard import RepeatTerminateConfig

MESSAGES = [PromptMessage("user", ["Detect every object."])]


@pytest.mark.req("FULL-08", "SRV-05")
def test_rendering_of_a_dead_replica_ends(tied: Path) -> None:
    from rollout_server.engines.vllm.engine import VllmEngine

    begun, tokenizer = asyncio.Event(), AutoTokenizer.from_pretrained(tied)

    async def stuck(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    front_end: Any = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer, render_chat_async=stuck),
        model_config=SimpleNamespace(dtype="float32", max_model_len=1024),
        get_tokenizer=lambda: tokenizer,
    )
    engine = VllmEngine(front_end, 0, RepeatTerminateConfig())

    async def render() -> None:
        rendering = asyncio.ensure_future(engine.render(MESSAGES, []))
        await begun.wait()
        engine.declare_dead()
        for each in (rendering, engine.render(MESSAGES, [])):
            with pytest.raises(EngineDead, match="replica 0 is dead"):
                await each

    asyncio.run(asyncio.wait_for(render(), 30))
