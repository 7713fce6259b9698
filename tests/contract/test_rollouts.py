"""A call and its requests, with scripted engines: all or nothing, order, load."""

import asyncio
import base64
import io
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from PIL import Image

from rollout_server.engines.engine_protocol import (
    ChatMessage,
    Completion,
    EngineDead,
    Load,
    Prompt,
    PromptRefused,
)
from rollout_server.serving.infer import Rollouts
from rollout_server.serving.media import MediaLoader
from rollout_server.serving.prompts import CHARACTERS_PER_TOKEN, MOST_PREPARED, Prompts
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ProblemError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope

CONTEXT = 20

T = TypeVar("T")


@dataclass
class EchoEngine:
    """One token per character of a prompt; answers with as many tokens as it may.

    hold: answers wait until it is set; error: raised instead of one.
    ends_with: the weights at the end of an answer, when they are others.
    """

    hold: asyncio.Event | None = None
    error: Exception | None = None
    index: int = 0
    load: Load = field(default_factory=Load)
    weights_version: int = 3
    ends_with: int | None = None
    max_model_len: int = CONTEXT
    generated: list[tuple[int, int | None, int]] = field(default_factory=list)
    rendered: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rendering: int = 0
    most_rendering: int = 0
    cancelled: int = 0

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        self.rendering += 1
        self.most_rendering = max(self.most_rendering, self.rendering)
        await asyncio.sleep(0)
        self.rendering -= 1
        text = "".join(part or "#" for message in messages for part in message.parts)
        self.rendered.append(text)
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
        turn: int,
    ) -> list[Completion]:
        self.generated.append((len(prompt.token_ids), seed, max_tokens))
        self.turns.append(turn)
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        ids = prompt.token_ids[:1] * max_tokens
        versions = self.weights_version, self.ends_with or self.weights_version
        return [Completion(0, "x" * max_tokens, ids, "length", False, versions)]


def prompts() -> Prompts:
    return Prompts(MediaLoader(ServerSettings(model=Path("/m"), device="cpu")))


def rollouts(*engines: EchoEngine) -> Rollouts:
    async def serving() -> Sequence[EchoEngine]:
        return engines

    return Rollouts(serving, "model", prompts(), lambda: "epoch")


def answer(
    call: InferCall, *engines: EchoEngine, record: CallRecord | None = None
) -> Coroutine[Any, Any, list[RolloutEnvelope]]:
    return rollouts(*engines).answer(call, record or CallRecord("/infer/"))


def call(*texts: str, **config: Any) -> InferCall:
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return InferCall.model_validate({"infer_requests": requests, "request_config": config})


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


async def reached(condition: Callable[[], bool]) -> None:
    """Return once it holds; the deadline is that of `run`."""
    while not condition():
        await asyncio.sleep(0)


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
    hold = asyncio.Event()
    engines = [EchoEngine(hold=hold), EchoEngine(hold=hold, index=1)]

    async def work() -> list[RolloutEnvelope]:
        answering = asyncio.ensure_future(answer(call("aaaa", "b", "c", "d", seed=100), *engines))
        await reached(lambda: sum(len(engine.generated) for engine in engines) == 4)
        hold.set()
        return await answering

    envelopes = run(work())
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


@pytest.mark.req("SRV-06")
def test_text_that_no_context_holds_is_refused_before_anything_is_rendered() -> None:
    engine = EchoEngine()
    with pytest.raises(ProblemError) as error:
        run(answer(call("a" * (CHARACTERS_PER_TOKEN * CONTEXT + 1)), engine))
    assert (error.value.problem.status, engine.most_rendering) == (422, 0)
    assert "characters are more than" in error.value.problem.detail


@dataclass
class ExhaustedEngine(EchoEngine):
    exhausted: Exception = field(default_factory=MemoryError)

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        raise self.exhausted


@pytest.mark.req("SRV-06", "WIRE-05")
@pytest.mark.parametrize("exhausted", [MemoryError(), TimeoutError()])
def test_what_the_server_runs_out_of_is_no_fault_of_the_request(exhausted: Exception) -> None:
    """vLLM ends the rendering of everyone when one of them takes too long."""
    with pytest.raises(ProblemError) as error:
        run(answer(call("fine"), ExhaustedEngine(exhausted=exhausted)))
    assert (error.value.problem.status, error.value.problem.kind) == (503, "overloaded")


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
    hold = asyncio.Event()
    dead = EchoEngine(hold=hold, error=EngineDead("replica 0 died"))
    slow = EchoEngine(hold=asyncio.Event(), index=1)

    async def work() -> None:
        answering = asyncio.ensure_future(answer(call("a", "b"), dead, slow))
        await reached(lambda: bool(dead.generated and slow.generated))
        hold.set()
        await answering

    with pytest.raises(ProblemError) as error:
        run(work())
    assert (error.value.problem.status, error.value.problem.where) == (503, "replicas[0]")
    assert slow.cancelled == 1


@pytest.mark.req("SRV-07")
def test_a_cancelled_call_cancels_its_sequences() -> None:
    engine = EchoEngine(hold=asyncio.Event())

    async def work() -> None:
        answering = asyncio.ensure_future(answer(call("a", "b"), engine))
        await reached(lambda: len(engine.generated) == 2)
        answering.cancel()
        await reached(lambda: engine.cancelled == 2)
        assert engine.load == Load()

    run(work())


@pytest.mark.req("WIRE-04", "SRV-06")
def test_a_call_of_many_images_holds_few_of_them_decoded() -> None:
    engine = EchoEngine()
    run(answer(call(*["a"] * 100), engine))
    assert 1 < engine.most_rendering <= MOST_PREPARED


@pytest.mark.req("SRV-02")
def test_the_requests_of_calls_alternate_at_each_engine() -> None:
    """By their turns; those of one engine are those of its own requests."""
    hold = asyncio.Event()
    engines = [EchoEngine(index=0, hold=hold), EchoEngine(index=1, hold=hold)]
    engines[1].load.turn = 100
    both = rollouts(*engines)

    async def handed(call: InferCall, of_all: int) -> asyncio.Future[list[RolloutEnvelope]]:
        answering = asyncio.ensure_future(both.answer(call, CallRecord("/infer/")))
        await reached(lambda: sum(len(engine.turns) for engine in engines) == of_all)
        return answering

    async def work() -> None:
        large = await handed(call(*["aa"] * 6), of_all=6)
        small = await handed(call("b", "b", n=2), of_all=8)
        assert [engine.turns for engine in engines] == [[1, 2, 3, 1], [101, 102, 103, 101]]
        hold.set()
        assert len(await large + await small) == 8
        assert [engine.load.turn for engine in engines] == [3, 103]
        hold.clear()
        next_one = await handed(call("b", "b", n=2), of_all=10)
        assert [engine.turns[-1] for engine in engines] == [4, 104]
        hold.set()
        await next_one

    run(work())


@pytest.mark.req("SRV-02")
def test_a_call_of_one_is_rendered_before_most_of_a_large_one() -> None:
    engine = EchoEngine()
    both = rollouts(engine)

    async def work() -> list[RolloutEnvelope]:
        large = asyncio.ensure_future(both.answer(call(*["a"] * 1000), CallRecord("/infer/")))
        while not engine.rendered:
            await asyncio.sleep(0)
        small = await both.answer(call("b"), CallRecord("/infer/"))
        return await large + small

    assert len(run(work())) == 1001
    assert engine.rendered.index("b") < 2 * MOST_PREPARED


# --- rendering by all replicas' renderers, while the first sequences run


@dataclass
class HeldEngine(EchoEngine):
    """One prompt at a time, as a renderer of vLLM; those with "slow" wait until `go` is set.

    held: prompts that wait.
    """

    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: list[str] = field(default_factory=list)
    thread: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        async with self.thread:
            text = "".join(part or "" for message in messages for part in message.parts)
            if "slow" in text:
                self.held.append(text)
                await self.go.wait()
            return await super().render(messages, images)


@pytest.mark.req("FULL-08")
def test_the_requests_of_a_call_are_rendered_by_all_replicas() -> None:
    engines = [HeldEngine(index=i) for i in range(3)]

    async def work() -> list[RolloutEnvelope]:
        answering = asyncio.ensure_future(answer(call(*["slow"] * 6), *engines))
        await reached(lambda: [engine.load.rendering for engine in engines] == [2, 2, 2])
        for engine in engines:
            engine.go.set()
        return await answering

    assert len(run(work())) == 6
    assert [len(engine.rendered) for engine in engines] == [2, 2, 2]
    assert [engine.load for engine in engines] == [Load(turn=2)] * 3


def image_call(*sizes: tuple[int, int], **config: Any) -> InferCall:
    requests = []
    for size in sizes:
        file = io.BytesIO()
        Image.new("RGB", size).save(file, "PNG")
        image = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        message = {"role": "user", "content": "<image>slow"}
        requests.append({"messages": [message], "images": [image]})
    return InferCall.model_validate({"infer_requests": requests, "request_config": config})


@pytest.mark.req("FULL-08")
def test_renderers_share_the_pixels_and_not_the_requests() -> None:
    """While one renders a large image, the other renders all small ones."""
    engines = [HeldEngine(index=0), HeldEngine(index=1)]

    async def work() -> list[RolloutEnvelope]:
        large = asyncio.ensure_future(answer(image_call((100, 100)), *engines))
        await reached(lambda: bool(engines[0].held))
        small = asyncio.ensure_future(answer(image_call(*[(10, 10)] * 4), *engines))
        await reached(lambda: bool(engines[1].held))
        engines[1].go.set()
        await small
        engines[0].go.set()
        return await large

    assert len(run(work())) == 1
    assert [len(engine.rendered) for engine in engines] == [1, 4]


@pytest.mark.req("FULL-08")
def test_the_first_sequences_run_while_later_requests_are_rendered() -> None:
    engine, record = HeldEngine(), CallRecord("/infer/")

    async def work() -> list[RolloutEnvelope]:
        answering = asyncio.ensure_future(answer(call("a", "slow"), engine, record=record))
        await reached(lambda: bool(engine.generated and engine.held))
        assert record.prompt_tokens == 1
        engine.go.set()
        return await answering

    envelopes = run(work())
    assert [e.response.usage.prompt_tokens for e in envelopes] == [1, 4]


@pytest.mark.req("FULL-08", "WIRE-05")
def test_a_request_that_turns_out_bad_ends_what_its_call_generates() -> None:
    """And the others are rendered, which finds every bad one, but not generated."""
    engine = HeldEngine(hold=asyncio.Event())

    async def work() -> None:
        bad = call("a", "slow!", "fine", "b!")
        answering = asyncio.ensure_future(answer(bad, engine))
        await reached(lambda: bool(engine.generated))
        engine.go.set()
        with pytest.raises(ProblemError) as error:
            await answering
        assert error.value.problem.errors is not None
        assert [e["index"] for e in error.value.problem.errors] == [1, 3]

    run(work())
    assert (len(engine.generated), engine.cancelled) == (1, 1)
    assert engine.rendered == ["a", "slow!", "fine", "b!"]
    assert engine.load == Load()


@pytest.mark.req("FULL-08", "WIRE-05")
def test_what_is_cheap_to_find_is_found_before_anything_is_generated() -> None:
    """However much is rendered and generated before the bad request's turn."""
    engine = EchoEngine(max_model_len=100)
    missing = {"messages": [{"role": "user", "content": "<image>"}], "images": ["/no/such.png"]}
    fine = [{"messages": [{"role": "user", "content": "a"}]}] * (2 * MOST_PREPARED)
    with pytest.raises(ProblemError) as error:
        run(answer(InferCall.model_validate({"infer_requests": [*fine, missing]}), engine))
    assert error.value.problem.where == f"infer_requests[{len(fine)}].images[0]"
    assert engine.generated == []
    assert len(engine.rendered) == len(fine)


class LostEngine(EchoEngine):
    """It dies while it renders."""

    async def render(self, messages: list[ChatMessage], images: list[Image.Image]) -> Prompt:
        await super().render(messages, images)
        raise EngineDead("replica 0 is dead")


@pytest.mark.req("FULL-08", "SRV-05")
def test_another_replica_renders_for_one_that_is_lost() -> None:
    lost, left = LostEngine(index=0), EchoEngine(index=1)

    async def serving_first() -> Sequence[EchoEngine]:
        return [left] if lost.rendered else [lost, left]

    work = Rollouts(serving_first, "model", prompts(), lambda: "epoch")
    envelopes = run(work.answer(call("a", "b", "c"), CallRecord("/infer/")))
    assert len(envelopes) == 3
    assert sorted(left.rendered) == ["a", "b", "c"]
    assert lost.generated == []


@pytest.mark.req("FULL-08", "SRV-05")
def test_a_call_whose_renderers_are_all_lost_is_refused() -> None:
    with pytest.raises(ProblemError) as error:
        run(answer(call(*["a"] * 100), LostEngine(index=0), LostEngine(index=1)))
    assert (error.value.problem.status, error.value.problem.kind) == (503, "not-ready")
