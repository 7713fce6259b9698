"""Conversations to prompts: load the images, and render with a replica's renderer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image

from rollout_server.engines.engine_protocol import (
    Engine,
    EngineDead,
    Prompt,
    PromptMessage,
)
from rollout_server.runtime.refusals import BadRequest, refusal
from rollout_server.serving.media import ImageSource, MediaLoader
from rollout_server.serving.telemetry import CallRecord

# Largest number of requests of a call that are prepared at a time, so that others are, too.
MOST_PREPARED = 32
# Upper bound over all languages: longer text cannot fit into the context.
CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Conversation:
    """sources: one image for each None in the messages' parts, in order."""

    messages: list[PromptMessage]
    sources: list[ImageSource]


class Renderers:
    """Renders the prompts of one call with the renderers of all engines; lost ones are removed."""

    def __init__(self, engines: Sequence[Engine], media: MediaLoader) -> None:
        self._engines = list(engines)
        self._media = media
        self._max_model_len = engines[0].max_model_len
        self._places = asyncio.Semaphore(MOST_PREPARED)

    async def check(self, conversation: Conversation) -> None:
        """Raise BadRequest for text that cannot fit, and as `MediaLoader.check`."""
        parts = [part for message in conversation.messages for part in message.parts]
        length = sum(len(part or "") for part in parts)
        most = CHARACTERS_PER_TOKEN * self._max_model_len
        if length > most:
            raise BadRequest(
                "messages",
                f"{length} characters are more than {most}, which is {CHARACTERS_PER_TOKEN} for "
                f"each token of a context of {self._max_model_len} (max_model_len)",
            )
        await self._media.check(conversation.sources)

    async def render(self, conversation: Conversation, record: CallRecord) -> Prompt:
        """Load the images and render; `record` counts both.

        Raises BadRequest, and the `overloaded` and `not-ready` problems.
        """
        record.images += len(conversation.sources)
        try:
            async with self._places, self._media.load(conversation.sources) as images:
                prompt = await self._render(conversation.messages, images)
        except (MemoryError, TimeoutError) as error:
            found = "memory" if isinstance(error, MemoryError) else "time"
            detail = f"it ran out of {found} while it prepared a request; try again"
            raise refusal("overloaded", detail, "messages") from error
        length = len(prompt.token_ids)
        if length + 1 > self._max_model_len:
            raise BadRequest(
                "messages",
                f"the prompt has {length} tokens, which leaves no room for an answer in a "
                f"context of {self._max_model_len} (max_model_len)",
            )
        record.prompt_tokens += length
        return prompt

    async def _render(self, messages: list[PromptMessage], images: list[Image]) -> Prompt:
        """Render with the least loaded renderer; try another one if it is lost."""
        work = 1 + sum(image.width * image.height for image in images)
        while self._engines:
            engine = min(self._engines, key=lambda engine: engine.load.rendering)
            engine.load.rendering += work
            try:
                return await engine.render(messages, images)
            except EngineDead:
                self._engines = [left for left in self._engines if left is not engine]
            finally:
                engine.load.rendering -= work
        raise refusal("not-ready", "the replicas that rendered for it are lost", "replicas")
