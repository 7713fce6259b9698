"""A call and its requests, with scripted engines: all or nothing, order, load."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server.chat import ChatMessage
from rollout_server.engine_types import Completion, EngineDead, Prompt, PromptRefused
from rollout_server.infer import Rollouts
from rollout_server.media import MediaLoader
from rollout_server.routing import Load
from rollout_server.settings import ServerSettings
from shared_contracts.errors import ProblemError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope

CONTEXT = 20


@dataclass
class EchoEngine:
    """One token per character of a prompt; answers with as many tokens as it may.

    busy_s: how long an answer takes; error: raised instead of one.
    """

    busy_s: float = 0.0
    error: Exception | None = None
    index: int = 0
    load: Load = field(default_factory=Load)
    max_model_len: int = CONTEXT
    generated: list[tuple[int, int | None, int]] = field(default_factory=list)
    cancelled: int = 0

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        text = "".join(part or "#" for message in messages for part in message.parts)
        if "!" in text:
            raise PromptRefused("the template cannot take '!'")
        return Prompt(None, [ord(letter) for letter in text])

    def check_sampling(self, config: RequestConfig) -> None:
        if config.temperature == 9.0:
            raise PromptRefused("too hot")

    async def generate(
        self,
        prompt: Prompt,
        config: RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
    ) -> list[Completion]:
        self.generated.append((len(prompt.token_ids), seed, max_tokens))
        try:
            await asyncio.sleep(self.busy_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        ids = prompt.token_ids[:1] * max_tokens
        return [Completion(0, "x" * max_tokens, ids, "length", False, (3, 4))]


def rollouts(*engines: EchoEngine) -> Rollouts:
    media = MediaLoader(ServerSettings(model=Path("/m"), device="cpu"))

    async def serving() -> Sequence[EchoEngine]:
        return engines

    return Rollouts(serving, "model", media, lambda: "epoch")


def call(*texts: str, **config: Any) -> InferCall:
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return InferCall.model_validate({"infer_requests": requests, "request_config": config})


def run(work: Coroutine[Any, Any, list[RolloutEnvelope]]) -> list[RolloutEnvelope]:
    return asyncio.run(asyncio.wait_for(work, 10))


@pytest.mark.req("WIRE-05")
def test_nothing_is_generated_when_one_request_is_bad() -> None:
    engine = EchoEngine()
    bad = call("fine", "broken!", "a" * CONTEXT, "<image>")
    with pytest.raises(ProblemError) as error:
        run(rollouts(engine).answer(bad))
    assert error.value.problem.errors is not None
    assert [e["index"] for e in error.value.problem.errors] == [1, 2, 3]
    assert engine.generated == []


@pytest.mark.req("WIRE-05")
def test_nothing_is_generated_with_parameters_the_engine_refuses() -> None:
    engine = EchoEngine()
    with pytest.raises(ProblemError, match="too hot"):
        run(rollouts(engine).answer(call("fine", temperature=9.0)))
    assert engine.generated == []


@pytest.mark.req("SRV-01", "SEED-01")
def test_seeds_follow_the_request_list_whatever_replica_answers() -> None:
    engines = [EchoEngine(), EchoEngine()]
    envelopes = run(rollouts(*engines).answer(call("aaaa", "b", "c", "d", seed=100)))
    assert [e.coordexp.seed for e in envelopes] == [100, 101, 102, 103]
    assert [e.response.usage.prompt_tokens for e in envelopes] == [4, 1, 1, 1]
    assert len(engines[0].generated) == len(engines[1].generated) == 2


@pytest.mark.req("WIRE-01")
def test_an_answer_may_fill_the_context_and_no_more() -> None:
    engine = EchoEngine()
    run(rollouts(engine).answer(call("aaaa")))
    run(rollouts(engine).answer(call("aaaa", max_tokens=5)))
    run(rollouts(engine).answer(call("aaaa", max_tokens=500)))
    assert [max_tokens for _, _, max_tokens in engine.generated] == [16, 5, 16]


@pytest.mark.req("WIRE-03")
def test_the_stamp_names_both_versions() -> None:
    (envelope,) = run(rollouts(EchoEngine()).answer(call("a")))
    assert envelope.coordexp.weights_version == (3, 4)


@pytest.mark.req("SRV-05")
def test_when_an_engine_dies_the_call_is_refused_and_the_rest_of_it_cancelled() -> None:
    dead = EchoEngine(error=EngineDead("replica 0 died"))
    slow = EchoEngine(busy_s=5.0)
    with pytest.raises(ProblemError) as error:
        run(rollouts(dead, slow).answer(call("a", "b")))
    assert (error.value.problem.status, error.value.problem.where) == (503, "replicas[0]")
    assert slow.cancelled == 1


@pytest.mark.req("SRV-07")
def test_a_cancelled_call_cancels_its_sequences() -> None:
    engine = EchoEngine(busy_s=5.0)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(rollouts(engine).answer(call("a", "b")), 0.2))
    assert engine.cancelled == 2
