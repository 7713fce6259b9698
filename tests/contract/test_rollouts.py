"""A call and its requests on scripted engines: all or nothing, order, load."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rollout_server.engines.engine_protocol import (
    Aborted,
    BadRequest,
    EngineDead,
    Load,
    Prompt,
    PromptMessage,
)
from rollout_server.serving.infer import (
    CHARACTERS_PER_TOKEN,
    MOST_PREPARED,
    RunningCall,
    charged,
    least_loaded,
)
from rollout_server.serving.media import MediaLoader
from rollout_server.serving.telemetry import CallRecord
from shared_contracts.errors import refusal
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope
from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.served_app import settings
from tests.contract.update_bench import Hang, asynchronous, fails, reached, refused

CONTEXT = 20


class EchoEngine(ScriptedEngine):
    """One token per character of a prompt. `!` cannot be rendered.

    go: prompts with "slow" wait for it, one prompt at a time, as in a renderer of vLLM.
    """

    max_model_len = CONTEXT

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.weights_version = 3
        self.rendered: list[str] = []
        self.go = asyncio.Event()
        self._thread = asyncio.Lock()

    async def render(self, messages: list[PromptMessage], images: list[Image.Image]) -> Prompt:
        async with self._thread:
            prompt = await super().render(messages, images)
            if "slow" in prompt.engine_input:
                await self.go.wait()
            await asyncio.sleep(0)
            self.rendered.append(prompt.engine_input)
            if "!" in prompt.engine_input:
                raise BadRequest("messages", "the template cannot take '!'")
            return prompt

    def check_sampling(self, config: RequestConfig) -> None:
        if config.temperature == 2.0:
            raise refusal("invalid-request", "too hot", "request_config")


def answer(call: InferCall, *engines: EchoEngine) -> Coroutine[Any, Any, list[RolloutEnvelope]]:
    async def serving() -> Sequence[EchoEngine]:
        return [engine for engine in engines if engine.alive]

    record, media = CallRecord("/infer/"), MediaLoader(settings())
    return RunningCall(serving, "model", media, lambda: "epoch", call, record).answer()


def call(*texts: str, **config: Any) -> InferCall:
    requests = [request(text) for text in texts]
    return InferCall.model_validate({"infer_requests": requests, "request_config": config})


def request(content: Any, *images: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "images": list(images)}


@pytest.mark.req("WIRE-05")
@asynchronous
async def test_bad_requests_and_bad_sampling_generate_nothing() -> None:
    engine = EchoEngine()
    own = [{"type": "text", "text": "x"}, {"type": "image", "image": "own"}]
    contents = ["fine", "broken!", "a" * CONTEXT, "<image>", own]
    requests = [request(content) for content in contents]
    requests += [request("no mark", "a.png"), request([{"type": "image", "image": "own"}], "a.png")]
    bad = InferCall.model_validate({"infer_requests": requests})
    problem = await refused(answer(bad, engine), "invalid-request")
    errors = problem.errors or []
    assert [error["index"] for error in errors] == [1, 2, 3, 4, 5, 6]
    assert errors[3]["where"] == "infer_requests[4].messages[0].content[1].image"
    await refused(answer(call("fine", temperature=2.0), engine), "invalid-request", "too hot")
    assert engine.turns == []


def pushed_during(work: str) -> EchoEngine:
    """Return an engine that gets other weights while it does this."""
    engine = EchoEngine()

    async def push() -> None:
        engine.weights_version = 4

    engine.script[work] = push
    return engine


@pytest.mark.req("WIRE-03")
@asynchronous
async def test_expected_weights_answer_and_others_are_refused() -> None:
    """Before rendering, before generation and after generation."""

    def expecting(version: int | None) -> InferCall:
        return call("a").model_copy(update={"expected_weights_version": version})

    (envelope,) = await answer(expecting(None), pushed_during("generate"))
    assert envelope.coordexp.weights_version == (3, 4)
    assert len(await answer(expecting(3), EchoEngine())) == 1
    for engine, version, found, rendered, generated in (
        (EchoEngine(), 2, 3, 0, 0),
        (pushed_during("render"), 3, 4, 1, 0),
        (pushed_during("generate"), 3, 4, 1, 1),
    ):
        expected = f"version {version} is expected, and the server's is {found}"
        problem = await refused(answer(expecting(version), engine), "other-weights", expected)
        assert problem.status == 409
        assert (len(engine.rendered), len(engine.turns)) == (rendered, generated)


@pytest.mark.req("SRV-06")
@asynchronous
async def test_text_above_every_context_is_not_rendered() -> None:
    engine, long = EchoEngine(), call("a" * (CHARACTERS_PER_TOKEN * CONTEXT + 1))
    problem = await refused(answer(long, engine), "invalid-request", "characters are more than")
    assert (problem.status, engine.rendered) == (422, [])


@pytest.mark.req("SRV-06", "WIRE-05")
@pytest.mark.parametrize("failure", [MemoryError(), TimeoutError()])
@asynchronous
async def test_exhausted_server_answers_503(failure: Exception) -> None:
    """vLLM ends all renderings when one of them takes too long."""
    engine = EchoEngine()
    engine.script["render"] = fails(failure)
    assert (await refused(answer(call("fine"), engine), "overloaded")).status == 503


@pytest.mark.req("SRV-05")
@pytest.mark.parametrize("end", [EngineDead("replica 0 died"), Aborted("replica 0: error")])
@asynchronous
async def test_call_is_refused_and_cancelled_when_an_engine_ends_a_sequence(end: Exception) -> None:
    hold, dead, slow = asyncio.Event(), EchoEngine(0), EchoEngine(1)
    hang = slow.script["generate"] = Hang()

    async def die() -> None:
        await hold.wait()
        raise end

    dead.script["generate"] = die

    answering = asyncio.ensure_future(answer(call("a", "b"), dead, slow))
    await reached(lambda: bool(dead.turns and slow.turns))
    hold.set()
    assert (await refused(answering, "not-ready")).where == "replicas[0]"
    await reached(lambda: hang.cancelled)


@pytest.mark.req("SRV-02")
@asynchronous
async def test_requests_of_two_calls_alternate_at_each_engine() -> None:
    hold, engines = Hang(), [EchoEngine(0), EchoEngine(1)]
    for engine in engines:
        engine.script["generate"] = hold
    engines[1].load.turn = 100

    async def handed(call: InferCall, of_all: int) -> asyncio.Future[list[RolloutEnvelope]]:
        answering = asyncio.ensure_future(answer(call, *engines))
        await reached(lambda: sum(len(engine.turns) for engine in engines) == of_all)
        return answering

    large = await handed(call(*["aa"] * 6), of_all=6)
    small = await handed(call(*["b"] * 4, n=2), of_all=10)
    assert [engine.turns for engine in engines] == [[1, 2, 3, 1, 3], [101, 102, 103, 101, 103]]
    assert [engine.load for engine in engines] == [Load(138, 7), Load(138, 7, turn=100)]
    hold.end.set()
    assert len(await large + await small) == 10
    assert [engine.load.turn for engine in engines] == [3, 103]
    hold.end.clear()
    next_one = await handed(call("b", "b", n=2), of_all=12)
    assert [engine.turns[-1] for engine in engines] == [4, 104]
    hold.end.set()
    await next_one


@pytest.mark.req("SRV-02")
@asynchronous
async def test_small_call_is_rendered_before_most_of_a_large_one() -> None:
    engine = EchoEngine()
    large = asyncio.ensure_future(answer(call(*["a"] * 1000), engine))
    await reached(lambda: len(engine.rendered) == 300)  # without a limit all would wait now
    small = await answer(call("b"), engine)
    assert len(await large + small) == 1001
    assert engine.rendered.index("b") < 300 + 2 * MOST_PREPARED


# --- rendering by all replicas' renderers, while the first sequences run


@pytest.mark.req("FULL-08")
@asynchronous
async def test_all_replicas_render_the_requests_of_a_call() -> None:
    engines = [EchoEngine(i) for i in range(3)]
    answering = asyncio.ensure_future(answer(call(*["slow"] * 6), *engines))
    await reached(lambda: [engine.load.rendering for engine in engines] == [2, 2, 2])
    engines[0].alive = False  # and then generates nothing
    for engine in engines:
        engine.go.set()
    assert len(await answering) == 6
    assert [len(engine.rendered) for engine in engines] == [2, 2, 2]
    assert [bool(engine.turns) for engine in engines] == [False, True, True]
    assert [replace(engine.load, turn=0) for engine in engines] == [Load()] * 3


@pytest.mark.req("FULL-08", "WIRE-05")
@asynchronous
async def test_bad_request_found_late_ends_the_generation_of_its_call() -> None:
    """The other requests are rendered, which finds every bad one, and not generated."""
    engine = EchoEngine()
    hang = engine.script["generate"] = Hang()
    answering = asyncio.ensure_future(answer(call("a", "slow!", "fine", "b!"), engine))
    await reached(lambda: bool(engine.turns))
    engine.go.set()
    problem = await refused(answering, "invalid-request")
    assert [error["index"] for error in problem.errors or []] == [1, 3]
    assert (len(engine.turns), hang.cancelled) == (1, True)
    assert engine.rendered == ["a", "slow!", "fine", "b!"]
    assert engine.load == Load()


@pytest.mark.req("FULL-08", "SRV-05")
@asynchronous
async def test_a_lost_renderer_refuses_the_call() -> None:
    dead = EchoEngine()
    dead.script["render"] = fails(EngineDead("replica 0 is dead"))
    answering = answer(call(*["a"] * 100), dead, EchoEngine(1))
    assert (await refused(answering, "not-ready", "replica 0 is dead")).where == "replicas[0]"
    assert (dead.load.rendering, dead.load.tokens) == (0, 0)


# --- loads and turns


@pytest.mark.req("SRV-01")
@given(st.integers(1, 5), st.lists(st.integers(1, 500), min_size=1))
def test_least_loaded_engine_is_next(replicas: int, costs: list[int]) -> None:
    engines = [EchoEngine(index) for index in range(replicas)]
    with ExitStack() as running:
        for cost in costs:
            running.enter_context(charged(least_loaded(engines), cost, 1, 0))
        tokens = [engine.load.tokens for engine in engines]
        assert max(tokens) - min(tokens) <= max(costs)
    assert [engine.load for engine in engines] == [Load()] * replicas
