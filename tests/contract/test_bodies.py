"""Bodies of `/infer/` are read a bounded piece at a time, and their faults are few."""

import asyncio
import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rollout_server.http import bodies
from rollout_server.http.bodies import MAX_FAULTS, PIECE_REQUESTS, parse_json, read_infer_call
from rollout_server.http.problems import NoJson
from shared_contracts.errors import ProblemError
from shared_contracts.infer import MAX_FIELDS, MAX_REQUESTS, InferCall

JSON = Headers({"content-type": "application/json"})
REQUEST = {"messages": [{"role": "user", "content": "x"}]}


def read(body: bytes) -> tuple[InferCall, int]:
    """The call, and how often others had their turn while it was read."""

    async def count(turns: list[None]) -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def work() -> tuple[InferCall, int]:
        turns: list[None] = []
        others = asyncio.create_task(count(turns))
        try:
            return await read_infer_call(body, MAX_REQUESTS), len(turns)
        finally:
            others.cancel()

    return asyncio.run(work())


def faults(body: bytes) -> list[Any]:
    with pytest.raises(RequestValidationError) as error:
        read(body)
    return list(error.value.errors())


@pytest.mark.req("WIRE-01")
def test_a_call_is_what_its_model_makes_of_it() -> None:
    body = {
        "infer_requests": [REQUEST | {"images": ["/a.png"]}, REQUEST | {"uuid": "b[]"}],
        "request_config": {"max_tokens": 3, "stop": ["[]"]},
        "request_id": "[]",
    }
    for text in (json.dumps(body), json.dumps(body, indent=3), json.dumps(body)[:-1] + " }\n"):
        assert read(text.encode())[0] == InferCall.model_validate(body)


@pytest.mark.req("SRV-02", "SRV-06")
def test_others_have_their_turns_while_a_large_call_is_read() -> None:
    call, turns = read(json.dumps({"infer_requests": [REQUEST] * 4096}).encode())
    assert len(call.infer_requests) == 4096
    assert turns >= 4096 / PIECE_REQUESTS / 2
    large = [REQUEST | {"images": ["a" * 2**20]}] * 16
    assert read(json.dumps({"infer_requests": large}).encode())[1] >= 16


@pytest.mark.req("SRV-06", "WIRE-05")
def test_a_body_of_nothing_but_faults_is_given_up_early() -> None:
    """39 MB of unknown keys took 140 s, and were answered with 373 MB."""
    bad = REQUEST | {f"unknown{number}": 1 for number in range(MAX_FIELDS - 1)}
    found = faults(json.dumps({"infer_requests": [bad] * MAX_REQUESTS}).encode())
    assert len(found) == MAX_FAULTS
    assert found[0]["loc"] == ("body", "infer_requests", 0, "unknown0")
    assert "input" not in found[0]
    # Each of them has one fault: the first ones are named.
    found = faults(json.dumps({"infer_requests": [1] * MAX_REQUESTS}).encode())
    assert [fault["loc"][2] for fault in found] == list(range(MAX_FAULTS))


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"infer_requests":[],"infer_requests":[1]}', id="of the call"),
        pytest.param(b'{"infer_requests":[],"request_id":"a","request_id":"b"}', id="of a field"),
        pytest.param(b'{"infer_requests":[{"messages":[],"messages":[]}]}', id="of a request"),
        pytest.param('{"infer_requests":[]}'.encode("utf-16"), id="UTF-16"),
        pytest.param('{"infer_requests":[]}'.encode("utf-32"), id="UTF-32"),
        pytest.param(b'\xef\xbb\xbf{"infer_requests":[]}', id="a byte order mark"),
        pytest.param(b'{"infer_requests":[],"metrics":NaN}', id="NaN"),
    ],
)
def test_a_text_of_two_meanings_is_no_json(body: bytes) -> None:
    with pytest.raises(NoJson):
        read(body)


TEXTS = st.text(st.sampled_from('ab"\\\\[]{},: \n\u00e4\U0001f600'), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.req("WIRE-01", "SRV-06")
@given(
    st.lists(st.builds(lambda text: REQUEST | {"uuid": text}, TEXTS), max_size=8),
    TEXTS.filter(bool),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.integers(1, 70),
)
def test_a_call_is_cut_at_its_requests_wherever_a_block_ends(
    requests: list[Any], request_id: str, indent: int | None, ascii_only: bool, block: int
) -> None:
    body = {"request_id": request_id, "infer_requests": requests, "request_config": {"n": 2}}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE_BYTES", block)
        assert read(text)[0] == InferCall.model_validate(body)


@pytest.mark.req("WIRE-05", "SRV-06")
@given(
    st.lists(VALUES, min_size=1, max_size=4),
    st.sampled_from('"\\[]{},: x'),
    st.integers(0, 400),
    st.integers(1, 70),
)
def test_what_is_no_json_is_never_read_as_a_call(
    values: list[Any], char: str, at: int, block: int
) -> None:
    """A byte is put into a body at random; the parser of the whole of it says what that is."""
    text = json.dumps({"request_id": "a", "infer_requests": values, "b": values[:1]})
    text = text[: at % len(text)] + char + text[at % len(text) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE_BYTES", block)
        try:
            parse_json(text.encode())
        except NoJson:
            with pytest.raises((NoJson, RequestValidationError)):
                read(text.encode())
        else:
            with pytest.raises(RequestValidationError):
                read(text.encode())


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize(
    "body",
    [
        b'{"infer_requests":[',
        b'{"infer_requests":[{}',
        b'{"infer_requests":[{}}',
        b'{"infer_requests":[,]}',
        b'{"infer_requests":[] "request_id":"a"}',
        b'["infer_requests":[]]',
        b'{"infer_requests":["]}',
        b'{"infer_requests":[]}]',
        b'{"infer_requests"::[]}',
    ],
)
def test_a_broken_body_is_no_json(body: bytes) -> None:
    with pytest.raises(NoJson):
        read(body)


def test_a_key_that_ends_like_the_one_of_the_requests_is_unknown() -> None:
    (missing, unknown) = faults(b'{"\\"infer_requests":[]}')
    assert missing["type"] == "missing"
    assert unknown["loc"] == ("body", '"infer_requests')


def test_an_empty_list_may_have_blanks_in_it() -> None:
    assert read(b' { "infer_requests" :\n [ \t ] } ')[0] == InferCall(infer_requests=[])


@pytest.mark.req("SRV-06")
def test_no_body_has_more_requests_than_a_call_may() -> None:
    request = json.dumps(REQUEST)
    with pytest.raises(ProblemError, match=f"more requests than {MAX_REQUESTS}"):
        read(f'{{"infer_requests":[{",".join([request] * (MAX_REQUESTS + 1))}]}}'.encode())


@pytest.mark.req("SRV-06")
def test_little_lies_outside_of_the_requests() -> None:
    body = json.dumps({"infer_requests": [], "request_id": "a" * 2**21}).encode()
    with pytest.raises(ProblemError, match="outside of its requests"):
        read(body)
