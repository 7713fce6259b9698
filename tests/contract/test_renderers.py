"""vLLM's renderers of two replicas in one process, without engines."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from rollout_server.engines.engine_protocol import EngineDead, Prompt, PromptMessage
from rollout_server.settings.options import ServerSettings
from shared_contracts.repeat_guard import RepeatTerminateConfig

pytestmark = pytest.mark.req("FULL-08")

SIZES = [(64, 64), (200, 120), (96, 320), (500, 400)]


@dataclass
class FrontEnd:
    """The part of `AsyncLLM` that rendering uses."""

    renderer: Any
    model_config: ClassVar[Any] = SimpleNamespace(dtype="float32", max_model_len=1024)

    def get_tokenizer(self) -> Any:
        return self.renderer.get_tokenizer()


@pytest.fixture(scope="module")
def renderers(tied: Path) -> Iterator[list[Any]]:
    from vllm.renderers.registry import renderer_from_config

    from rollout_server.engines.vllm.arguments import engine_args

    settings = ServerSettings(model=tied, device="cpu", replicas=2, max_model_len=1024)
    made = [
        renderer_from_config(engine_args(settings, index).create_engine_config())
        for index in range(2)
    ]
    yield made
    for renderer in made:
        renderer.shutdown()


def engines(renderers: Sequence[Any]) -> list[Any]:
    from rollout_server.engines.vllm.engine import VllmEngine

    front_ends: list[Any] = [FrontEnd(renderer) for renderer in renderers]
    return [
        VllmEngine(each, index, RepeatTerminateConfig()) for index, each in enumerate(front_ends)
    ]


def conversation(number: int) -> tuple[list[PromptMessage], list[Image.Image]]:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    messages = [PromptMessage("user", [None, f"Detect every object {number}."])]
    return messages, [Image.fromarray(pixels)]


def pixels_of(prompt: Prompt) -> torch.Tensor:
    (item,) = prompt.engine_input["mm_kwargs"]["image"]
    pixels = item["pixel_values"].data
    assert isinstance(pixels, torch.Tensor)
    return pixels


def test_concurrent_renderers_give_the_prompts_of_one(renderers: list[Any]) -> None:
    """Their processors and tokenizers are objects of one process."""
    both, conversations = engines(renderers), [conversation(number) for number in range(8)]

    async def render() -> tuple[list[Prompt], list[Prompt]]:
        alone = [await both[0].render(*each) for each in conversations]
        together = await asyncio.gather(
            *(both[i % 2].render(*each) for i, each in enumerate(conversations))
        )
        return alone, together

    alone, together = asyncio.run(render())
    assert [prompt.token_ids for prompt in together] == [prompt.token_ids for prompt in alone]
    assert len({len(prompt.token_ids) for prompt in alone}) > 1
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(pixels_of(one), pixels_of(other))


@dataclass
class StuckRenderer:
    """A renderer that does not return."""

    tokenizer: Any
    begun: bool = False

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def render_chat_async(self, *_: Any) -> None:
        self.begun = True
        await asyncio.Event().wait()


def test_rendering_of_a_dead_replica_ends(renderers: list[Any]) -> None:
    stuck = StuckRenderer(renderers[0].get_tokenizer())
    (engine,) = engines([stuck])

    async def render() -> None:
        begun = asyncio.ensure_future(engine.render(*conversation(3)))
        while not stuck.begun:
            await asyncio.sleep(0)
        engine.declare_dead()
        with pytest.raises(EngineDead, match="replica 0 is dead"):
            await begun
        with pytest.raises(EngineDead, match="replica 0 is dead"):
            await engine.render(*conversation(3))

    asyncio.run(asyncio.wait_for(render(), 30))
