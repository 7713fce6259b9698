"""From the bytes of a body to what a route is given, a bounded piece at a time.

Parsing holds the interpreter, and so the event loop, whatever thread it runs in. So the body of
`/infer/` is cut into its requests first, one block at a time, by nothing but brackets, commas and
quotes. Each request is parsed and validated by itself, with a turn of the event loop between two
pieces. The first MAX_FAULTS faults end it: what comes after them is not read. Every other body is
parsed in one.

JSON here is UTF-8, has each key of an object once, and has no NaN.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jiter
import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from rollout_server.http.problems import NOT_SENT_AS_JSON, NoJson, sent_as_json
from rollout_server.runtime.refusals import refusal
from rollout_server.serving.chat import ChatCall
from shared_contracts.infer import InferCall, RolloutInferRequest

MAX_FAULTS = 20
# After so many bytes or requests other callers have their turn: some milliseconds.
PIECE_BYTES = 2**18
PIECE_REQUESTS = 64
# Of an `/infer/` body without its requests.
MAX_REST_BYTES = 2**20

QUOTE, BACKSLASH, COMMA, OPENING_BRACKET = b'"\\,['
# What each byte adds to the depth of brackets; NO_MARK for one that cuts nothing.
NO_MARK = 2
DEPTH_CHANGE = np.full(256, NO_MARK, np.int8)
DEPTH_CHANGE[list(b"[{")], DEPTH_CHANGE[list(b"]}")], DEPTH_CHANGE[COMMA] = 1, -1, 0
# The key of the list of requests, up to its bracket.
REQUESTS_KEY = re.compile(rb'(?<!\\)"infer_requests"\s{0,16}:\s{0,16}\Z')
LONGEST_KEY = 64


def parse_json(text: bytes) -> Any:
    """Raises NoJson."""
    try:
        return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise NoJson(str(error)) from None


class StrictRoute(APIRoute):
    """A route whose body is JSON as `parse_json` takes it, and says so: a form does not."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST" and not sent_as_json(request.headers):
                raise refusal("bad-request", NOT_SENT_AS_JSON, "body")
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except NoJson as error:  # what FastAPI expects of a body that is none
            raise json.JSONDecodeError(str(error), "", 0) from None


async def disconnected(request: Request) -> None:
    """Wait for the end of the connection (SRV-07): its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def read_chat_call(body: bytes) -> ChatCall:
    """Parse and validate the body of `/v1/chat/completions`, in one piece.

    Raises NoJson, and RequestValidationError with the first MAX_FAULTS faults.
    """
    sent = parse_json(body)
    try:
        return ChatCall.model_validate(sent)
    except ValidationError as error:
        raise RequestValidationError(_faults(error)[:MAX_FAULTS], body=sent) from None


async def read_infer_call(body: bytes, most: int) -> InferCall:
    """Parse and validate the body of `/infer/`.

    Raises NoJson for a body that is none, RequestValidationError with the first MAX_FAULTS faults
    of one that breaks the contract, and the `invalid-request` problem where there are more than
    `most` requests.
    """
    if not body:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "it is empty"}])
    requests: list[RolloutInferRequest] = []
    bad, rest, piece, index = _Bad(), bytearray(), 0, 0
    for texts in _cut(body, rest):
        for text in texts:
            if index == most:
                found = f"more requests than {most} (max_requests_per_call)"
                raise refusal("invalid-request", found, "infer_requests")
            sent = parse_json(text)
            try:
                requests.append(RolloutInferRequest.model_validate(sent))
            except ValidationError as error:
                bad.note(error, index, sent)
                if len(bad.faults) >= MAX_FAULTS:
                    bad.refuse({})
            index += 1
            piece += len(text) + PIECE_BYTES // PIECE_REQUESTS
            if piece > PIECE_BYTES:
                piece = 0
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    return _read_rest(parse_json(bytes(rest)), bad).model_copy(update={"infer_requests": requests})


@dataclass
class _Bad:
    """Faults so far, at most MAX_FAULTS and those of one request; the bad requests by index."""

    faults: list[Any] = field(default_factory=list)
    requests: dict[int, Any] = field(default_factory=dict)

    def note(self, error: ValidationError, index: int, sent: Any) -> None:
        """Of the request `sent`."""
        self.faults += _faults(error, "infer_requests", index)
        self.requests[index] = sent

    def refuse(self, rest: dict[str, Any]) -> NoReturn:
        """rest: the call without its requests, as far as it is known."""
        body = rest | {"infer_requests": self.requests} if self.requests else rest
        raise RequestValidationError(self.faults[:MAX_FAULTS], body=body)


def _read_rest(rest: Any, bad: _Bad) -> InferCall:
    """rest: the call without its requests."""
    try:
        call = InferCall.model_validate(rest)
    except ValidationError as error:
        bad.faults += _faults(error)
    if bad.faults:
        bad.refuse(rest)
    return call


def _faults(error: ValidationError, *at: int | str) -> list[Any]:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return [{**fault, "loc": ("body", *at, *fault["loc"])} for fault in found]


def _cut(body: bytes, rest: bytearray) -> Iterator[list[bytes]]:
    """The texts of the requests that end in each block of PIECE_BYTES, in order.

    rest: is given what lies outside of them. Where body is JSON, the texts and `rest` are; where
    one of them is none, body is none.
    """
    marks, count, start, outside_from = _Marks(), 0, None, 0
    for block_start in range(0, len(body), PIECE_BYTES):
        texts: list[bytes] = []
        for place, char in marks.of(body, block_start):
            if start is None:
                if char == OPENING_BRACKET and REQUESTS_KEY.search(
                    body, place - LONGEST_KEY, place
                ):
                    rest += body[outside_from : place + 1]
                    start = place + 1
                continue
            text = body[start:place]
            if char == COMMA:
                texts.append(text)
                start = place + 1
            else:
                if count or texts or text.strip():  # no list without requests
                    texts.append(text)
                start, outside_from = None, place
        count += len(texts)
        seen = min(block_start + PIECE_BYTES, len(body))
        if start is None and len(rest) + seen - outside_from > MAX_REST_BYTES:
            found = f"more than {MAX_REST_BYTES // 2**20} MiB lie outside of its requests"
            raise refusal("invalid-request", found, "body")
        yield texts
    if start is not None:
        raise NoJson("it ends within its requests")
    rest += body[outside_from:]


@dataclass
class _Marks:
    """Finds what opens, parts and closes the lists and objects in the outermost one.

    depth: of brackets, and `in_string`, `escaped`: whether the next byte is in a string, and
    escaped by a backslash; all after the blocks so far.
    """

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def of(self, body: bytes, start: int) -> list[tuple[int, int]]:
        """Places in body and bytes of the marks in the block at `start`."""
        block = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - start), start)
        quotes = self._unescaped(block, np.flatnonzero(block == QUOTE))
        change = DEPTH_CHANGE[block]
        places = np.flatnonzero(change != NO_MARK)
        places = places[(np.searchsorted(quotes, places) + self.in_string) % 2 == 0]
        change = change[places]
        depths = self.depth + np.cumsum(change, dtype=np.int64)
        places = places[((depths == 2) & (change >= 0)) | ((depths == 1) & (change < 0))]
        self.in_string ^= bool(len(quotes) % 2)
        self.depth = int(depths[-1]) if len(depths) else self.depth
        return list(zip((places + start).tolist(), block[places].tolist(), strict=True))

    def _unescaped(self, block: NDArray[np.uint8], quotes: NDArray[np.intp]) -> NDArray[np.intp]:
        """The quotes that do not follow an odd number of backslashes."""
        backslashes = block == BACKSLASH
        if not self.escaped and not backslashes.any():
            return quotes
        others = np.where(backslashes, -1 - self.escaped, np.arange(len(block)))
        # Byte i follows `i - 1 - (place of the last other byte before it)` backslashes.
        before = np.concatenate(([-1 - self.escaped], np.maximum.accumulate(others)))
        self.escaped = bool((len(block) - 1 - before[-1]) % 2)
        unescaped: NDArray[np.intp] = quotes[(quotes - 1 - before[quotes]) % 2 == 0]
        return unescaped


def declare_body(document: dict[str, Any], path: str, model: type[BaseModel]) -> None:
    """Say in an OpenAPI document that the body of `POST path` is a `model`."""
    schemas, definitions = models_json_schema(
        [(model, "validation")], ref_template="#/components/schemas/{model}"
    )
    document["components"]["schemas"] |= definitions["$defs"]
    operation = document["paths"][path]["post"]
    responses = operation.pop("responses")
    content = {"application/json": {"schema": schemas[model, "validation"]}}
    operation |= {"requestBody": {"required": True, "content": content}, "responses": responses}
