"""A call and its requests, with scripted engines: all or nothing, order, load."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server.call_record import CallRecord
from rollout_server.chat import ChatMessage
from rollout_server.engine_types import Completion, EngineDead, Prompt, PromptRefused
from rollout_server.infer import MOST_PREPARED, Rollouts
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
    ends_with: the weights at the end of an answer, when they are others.
    """

    busy_s: float = 0.0
    error: Exception | None = None
    index: int = 0
    load: Load = field(default_factory=Load)
    weights_version: int = 3
    ends_with: int | None = None
    max_model_len: int = CONTEXT
    generated: list[tuple[int, int | None, int]] = field(default_factory=list)
    rendering: int = 0
    most_rendering: int = 0
    cancelled: int = 0

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        self.rendering += 1
        self.most_rendering = max(self.most_rendering, self.rendering)
        await asyncio.sleep(0)
        self.rendering -= 1
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
        versions = self.weights_version, self.ends_with or self.weights_version
        return [Completion(0, "x" * max_tokens, ids, "length", False, versions)]


def rollouts(*engines: EchoEngine) -> Rollouts:
    media = MediaLoader(ServerSettings(model=Path("/m"), device="cpu"))

    async def serving() -> Sequence[EchoEngine]:
        return engines

    return Rollouts(serving, "model", media, lambda: "epoch")


def answer(
    call: InferCall, *engines: EchoEngine, record: CallRecord | None = None
) -> Coroutine[Any, Any, list[RolloutEnvelope]]:
    return rollouts(*engines).answer(call, record or CallRecord("/infer/"))


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
        run(answer(bad, engine))
    assert error.value.problem.errors is not None
    assert [e["index"] for e in error.value.problem.errors] == [1, 2, 3]
    assert engine.generated == []


@pytest.mark.req("WIRE-05")
def test_nothing_is_generated_with_parameters_the_engine_refuses() -> None:
    engine = EchoEngine()
    with pytest.raises(ProblemError, match="too hot"):
        run(answer(call("fine", temperature=9.0), engine))
    assert engine.generated == []


@pytest.mark.req("SRV-01", "SEED-01")
def test_seeds_follow_the_request_list_whatever_replica_answers() -> None:
    engines = [EchoEngine(), EchoEngine()]
    envelopes = run(answer(call("aaaa", "b", "c", "d", seed=100), *engines))
    assert [e.coordexp.seed for e in envelopes] == [100, 101, 102, 103]
    assert [e.response.usage.prompt_tokens for e in envelopes] == [4, 1, 1, 1]
    assert len(engines[0].generated) == len(engines[1].generated) == 2


@pytest.mark.req("WIRE-01")
def test_an_answer_may_fill_the_context_and_no_more() -> None:
    engine = EchoEngine()
    run(answer(call("aaaa"), engine))
    run(answer(call("aaaa", max_tokens=5), engine))
    run(answer(call("aaaa", max_tokens=500), engine))
    assert [max_tokens for _, _, max_tokens in engine.generated] == [16, 5, 16]


@pytest.mark.req("WIRE-03")
def test_the_stamp_names_both_versions() -> None:
    (envelope,) = run(answer(call("a"), EchoEngine(ends_with=4)))
    assert envelope.coordexp.weights_version == (3, 4)


def expecting(version: int | None) -> InferCall:
    return call("a").model_copy(update={"expected_weights_version": version})


@pytest.mark.req("WIRE-03")
@pytest.mark.parametrize("version", [None, 3])
def test_the_expected_weights_answer(version: int | None) -> None:
    assert len(run(answer(expecting(version), EchoEngine()))) == 1


@pytest.mark.req("WIRE-03")
def test_a_call_that_expects_other_weights_is_refused_before_anything_is_rendered() -> None:
    engine, record = EchoEngine(), CallRecord("/infer/")
    with pytest.raises(ProblemError, match="version 2 is expected, and the server's is 3"):
        run(answer(expecting(2), engine, record=record))
    assert (engine.generated, record.prompt_tokens) == ([], 0)


class PushedEngine(EchoEngine):
    """An update comes while a prompt is rendered."""

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        self.weights_version += 1
        return await super().render(messages, images)


@pytest.mark.req("WIRE-03")
def test_weights_that_come_before_generation_are_noticed() -> None:
    engine = PushedEngine()
    with pytest.raises(ProblemError) as error:
        run(answer(expecting(3), engine))
    assert (error.value.problem.status, error.value.problem.kind) == (409, "other-weights")
    assert engine.generated == []


@pytest.mark.req("WIRE-03")
def test_an_answer_that_ends_with_other_weights_than_expected_is_not_given() -> None:
    engine = EchoEngine(ends_with=4)
    with pytest.raises(ProblemError, match="version 3 is expected, and the server's is 4"):
        run(answer(expecting(3), engine))
    assert len(engine.generated) == 1


def test_the_record_of_a_call_says_what_it_amounts_to() -> None:
    record = CallRecord("/infer/")
    run(answer(call("aaaa", "bb", max_tokens=5), EchoEngine(ends_with=4), record=record))
    assert (record.prompt_tokens, record.generated_tokens, record.images) == (6, 10, 0)
    assert record.weights_version == (3, 4)
    assert set(record.seconds) == {"wait", "prepare", "generate"}


@pytest.mark.req("SRV-05")
def test_when_an_engine_dies_the_call_is_refused_and_the_rest_of_it_cancelled() -> None:
    dead = EchoEngine(error=EngineDead("replica 0 died"))
    slow = EchoEngine(busy_s=5.0)
    with pytest.raises(ProblemError) as error:
        run(answer(call("a", "b"), dead, slow))
    assert (error.value.problem.status, error.value.problem.where) == (503, "replicas[0]")
    assert slow.cancelled == 1


@pytest.mark.req("SRV-07")
def test_a_cancelled_call_cancels_its_sequences() -> None:
    engine = EchoEngine(busy_s=5.0)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(answer(call("a", "b"), engine), 0.2))
    assert engine.cancelled == 2


@pytest.mark.req("WIRE-04", "SRV-06")
def test_a_call_of_many_images_holds_few_of_them_decoded() -> None:
    engine = EchoEngine()
    run(answer(call(*["a"] * 100), engine))
    assert 1 < engine.most_rendering <= MOST_PREPARED
