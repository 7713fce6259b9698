"""`POST /infer/`: from the requests of a call to their envelopes, in order (WIRE-02).

each request: read -> load its images -> render                a fault in any request
              -> choose a replica -> generate -> envelope      refuses the whole call:
                                                               its sequences are aborted,
                                                               and all requests are rendered
                                                               to report every fault

Each replica's renderer has a thread, and the requests of a call are rendered by all of them. The
first sequences start while later requests are rendered.

A message has image parts, or text with `<image>` marks. `images[]` fills the marks and the parts
without an image, in order.

An engine decodes `max_num_seqs` sequences at once. Of its waiting requests, that with the lowest
turn is next (vLLM's `priority` scheduling).
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from PIL.Image import Image

from rollout_server.engines.engine_protocol import (
    Aborted,
    BadRequest,
    Completion,
    Engine,
    EngineDead,
    Prompt,
    PromptMessage,
)
from rollout_server.runtime.concurrency import all_or_cancel, cancel_when
from rollout_server.serving.media import ImageSource, MediaLoader
from rollout_server.serving.telemetry import CallRecord
from shared_contracts import infer as wire
from shared_contracts.errors import Problem, ProblemError, refusal
from shared_contracts.infer import Message, RolloutInferRequest, TextPart

# Largest number of requests of a call that are prepared at a time, so that others are, too.
MOST_PREPARED = 32
# Upper bound over all languages: longer text cannot fit into the context.
CHARACTERS_PER_TOKEN = 16

# --- conversations (WIRE-01)

IMAGE_MARK = "<image>"


def read_conversation(
    request: RolloutInferRequest,
) -> tuple[list[PromptMessage], list[ImageSource]]:
    """Return the messages of a request, and one image for each None in their parts, in order.

    Raises BadRequest unless the number of images equals the number of places.
    """
    pieces = [_pieces(message, index) for index, message in enumerate(request.messages)]
    messages = [
        PromptMessage(message.role, [piece if isinstance(piece, str) else None for piece in own])
        for message, own in zip(request.messages, pieces, strict=True)
    ]
    own = [piece for each in pieces for piece in each if not isinstance(piece, str)]
    listed = [ImageSource(f"images[{i}]", image) for i, image in enumerate(request.images)]
    open_places = own.count(None)
    if open_places != len(listed):
        raise BadRequest(
            "images",
            f"{len(listed)} given, but the messages have room for {open_places}: one per "
            f"{IMAGE_MARK} mark or image part without an image of its own",
        )
    fill = iter(listed)
    return messages, [source or next(fill) for source in own]


def _pieces(message: Message, index: int) -> list[str | ImageSource | None]:
    """Return the non-empty texts and the images of a message; None: a place for `images[]`."""
    if isinstance(message.content, str):
        first, *others = message.content.split(IMAGE_MARK)
        marked = [first, *(piece for other in others for piece in (None, other))]
        return [piece for piece in marked if piece != ""] or [""]
    pieces: list[str | ImageSource | None] = []
    for number, part in enumerate(message.content):
        if isinstance(part, TextPart):
            pieces.append(part.text)
        elif part.image is None:
            pieces.append(None)
        else:
            pieces.append(ImageSource(f"messages[{index}].content[{number}].image", part.image))
    return pieces


# --- routing (SRV-01)


def least_loaded(engines: Sequence[Engine]) -> Engine:
    """Return the engine with the fewest outstanding tokens."""
    return min(engines, key=lambda engine: engine.load.tokens)


class Turns:
    """The turns of one call, so that its requests alternate with those of other calls.

    Per engine: the first request gets turn `last_answered + 1`; each later one adds the sequences
    of the one before it. Of equal turns, the older call is first.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights; the turn of
    the last answer is the virtual time.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def take(self, engine: Engine, sequences: int) -> int:
        """Return the turn of the next request, with `sequences` sequences, at an engine."""
        turn = max(self._next.get(engine.index, 0), engine.load.turn + 1)
        self._next[engine.index] = turn + sequences
        return turn


@contextmanager
def charged(engine: Engine, tokens: int, sequences: int, turn: int) -> Iterator[None]:
    """Count a request as outstanding during the block; update the answered turn if it succeeds.

    Raises the problem of `ended_early` for EngineDead and Aborted.
    """
    load = engine.load
    load.tokens += tokens
    load.sequences += sequences
    try:
        yield
        load.turn = max(load.turn, turn)
    except (EngineDead, Aborted) as error:
        raise ended_early(engine, error) from error
    finally:
        load.tokens -= tokens
        load.sequences -= sequences


def ended_early(engine: Engine, error: EngineDead | Aborted) -> ProblemError:
    """Return the problem of a sequence that its engine ended: `push-needed` by `sleep`."""
    by_sleep = isinstance(error, Aborted) and engine.asleep
    kind = "push-needed" if by_sleep else "not-ready"
    return refusal(kind, str(error), f"replicas[{engine.index}]")


class _Withdrawn(Exception):
    """A generation was cancelled because its call is refused."""


@dataclass
class RunningCall:
    """One call on the engines of all replicas. A bad request ends all generation.

    serving: waits for the end of a push, and returns the engines with the current weights; raises
        a problem if there are none.
    model: the model name in answers.
    """

    serving: Callable[[], Awaitable[Sequence[Engine]]]
    model: str
    media: MediaLoader
    server_epoch: Callable[[], str]
    call: wire.InferCall
    record: CallRecord

    def __post_init__(self) -> None:
        self._config = self.call.request_config or wire.RequestConfig()
        self._engines: Sequence[Engine] = ()
        self._places = asyncio.Semaphore(MOST_PREPARED)
        self._turns = Turns()
        self._faults: dict[int, BadRequest] = {}  # by the index of the request
        self._faulty = asyncio.Event()

    async def answer(self) -> list[wire.RolloutEnvelope]:
        """Return one envelope per request, in order; count them in the record.

        Raises the `invalid-request` problem with every bad request, `not-ready` for a lost engine,
        and `other-weights` if the weights are not the expected ones before or after a generation.
        Cancelling the call aborts its sequences.
        """
        with self.record.phase("wait"):
            self._engines = await self.serving()
        engine, requests = self._engines[0], self.call.infer_requests
        require_weights(self.call, engine.weights_version)
        with self.record.phase("prepare"):
            engine.check_sampling(self._config)
        answers = await all_or_cancel(map(self._answer_one, range(len(requests)), requests))
        if self._faults:
            raise refuse_requests(self._faults)
        envelopes = [envelope for envelope in answers if envelope is not None]
        for envelope in envelopes:
            require_weights(self.call, *envelope.coordexp.weights_version)
        self.record.add_answers(envelopes)
        return envelopes

    async def _answer_one(
        self, index: int, request: RolloutInferRequest
    ) -> wire.RolloutEnvelope | None:
        """Return the envelope of a request; None if the call is refused."""
        try:
            with self.record.phase("prepare"):
                prompt = await self._prepare(request)
            if self._faults:
                return None
            with self.record.phase("generate"), suppress(_Withdrawn):
                generation = self._roll_out(index, prompt)
                return await cancel_when(self._faulty.wait(), generation, _Withdrawn())
        except BadRequest as fault:
            self._faults[index] = fault.with_traceback(None)  # a traceback keeps the request alive
            self._faulty.set()
        return None

    async def _prepare(self, request: RolloutInferRequest) -> Prompt:
        """Load the images and render.

        Raises BadRequest, and the `overloaded` and `not-ready` problems.
        """
        messages, sources = read_conversation(request)
        context = self._engines[0].max_model_len
        length = sum(len(part or "") for message in messages for part in message.parts)
        if length > (most := CHARACTERS_PER_TOKEN * context):
            raise BadRequest(
                "messages",
                f"{length} characters are more than {most}, which is {CHARACTERS_PER_TOKEN} for "
                f"each token of a context of {context} (max_model_len)",
            )
        self.record.images += len(sources)
        try:
            async with self._places, self.media.load(sources) as images:
                prompt = await self._render(messages, images)
        except (MemoryError, TimeoutError) as error:
            found = "memory" if isinstance(error, MemoryError) else "time"
            detail = f"it ran out of {found} while it prepared a request; try again"
            raise refusal("overloaded", detail, "messages") from error
        length = len(prompt.token_ids)
        if length + 1 > context:
            raise BadRequest(
                "messages",
                f"the prompt has {length} tokens, which leaves no room for an answer in a "
                f"context of {context} (max_model_len)",
            )
        self.record.prompt_tokens += length
        return prompt

    async def _render(self, messages: list[PromptMessage], images: list[Image]) -> Prompt:
        work = 1 + sum(image.width * image.height for image in images)
        engine = min(self._engines, key=lambda engine: engine.load.rendering)
        engine.load.rendering += work
        try:
            return await engine.render(messages, images)
        except EngineDead as error:
            raise ended_early(engine, error) from error
        finally:
            engine.load.rendering -= work

    async def _roll_out(self, index: int, prompt: Prompt) -> wire.RolloutEnvelope:
        config = self._config
        seed = None if config.seed is None else config.seed + index
        engine = least_loaded(await self.serving())
        require_weights(self.call, engine.weights_version)
        room = engine.max_model_len - len(prompt.token_ids)
        max_tokens = min(config.max_tokens or room, room)
        tokens = len(prompt.token_ids) + config.n * max_tokens
        request_id, turn = uuid.uuid4().hex, self._turns.take(engine, config.n)
        with charged(engine, tokens, config.n, turn):
            completions = await engine.generate(prompt, config, seed, max_tokens, request_id, turn)
        return self._envelope(prompt, completions, seed, request_id)

    def _envelope(
        self, prompt: Prompt, completions: list[Completion], seed: int | None, request_id: str
    ) -> wire.RolloutEnvelope:
        details = self._config.return_details
        new_tokens = sum(len(completion.token_ids) for completion in completions)
        response = wire.ChatCompletionResponse(
            model=self.model,
            choices=[_choice(completion, details) for completion in completions],
            usage=wire.Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=new_tokens,
                total_tokens=len(prompt.token_ids) + new_tokens,
            ),
            id=request_id,
            created=int(time.time()),
            prompt_token_ids=prompt.token_ids if details else None,
        )
        ended = [each.index for each in completions if each.repeat_terminated]
        versions = [version for each in completions for version in each.weights_version]
        stamp = wire.RolloutStamp(
            repeat_terminate_triggered=1 if ended else 0,
            repeat_terminated_choices=ended,
            weights_version=(min(versions), max(versions)),
            server_epoch=self.server_epoch(),
            seed=seed,
            finish=completions[0].finish,
        )
        return wire.RolloutEnvelope(response=response, coordexp=stamp)


def _choice(completion: Completion, details: bool) -> wire.Choice:
    logprobs = completion.logprobs
    return wire.Choice(
        index=completion.index,
        message=wire.ChatMessage(content=completion.text),
        finish_reason=completion.finish,
        logprobs=None if logprobs is None else wire.ChoiceLogprobs.of(logprobs),
        token_ids=completion.token_ids if details else None,
    )


def refuse_requests(faults: dict[int, BadRequest]) -> ProblemError:
    """Return the refusal of a call with bad requests. faults: by request index."""
    errors = [
        {"index": index, "where": f"infer_requests[{index}].{fault.where}", "detail": fault.found}
        for index, fault in sorted(faults.items())
    ]
    first = errors[0]
    detail = f"{len(errors)} bad request(s), nothing is answered; the first: {first['detail']}"
    return ProblemError(Problem.of("invalid-request", detail, str(first["where"]), errors))


def require_weights(call: wire.InferCall, *versions: int) -> None:
    """Raise the `other-weights` problem for a version that is not the expected one."""
    expected = call.expected_weights_version
    for version in versions:
        if expected not in (None, version):
            raise refusal(
                "other-weights",
                f"version {expected} is expected, and the server's is {version}",
                "expected_weights_version",
            )
