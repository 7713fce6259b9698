"""OpenAI's routes of the shared server with the public `openai` client (OAI-01).

test_repeat_terminate.py has the repeat guard, test_replicas.py the end of the server.
"""

import base64
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    image_request,
    response_ids,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group

pytestmark = [pytest.mark.slow, pytest.mark.req("OAI-01")]

USER = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def with_image(url: str) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: the image, then the text."""
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": PROMPT}]}]


def data_url(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def client_of(server: RunningServer, token: str) -> openai.OpenAI:
    """A client without retries and without a proxy of the environment."""
    return openai.OpenAI(
        base_url=f"{server.process.base_url}/v1",
        api_key=token,
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server, "any") as client:
        yield client


def create(client: openai.OpenAI, server: RunningServer, **options: Any) -> Any:
    """Return the completion, or the stream, of a call for USER."""
    call: Any = client.chat.completions.create
    return call(**{"model": str(server.checkpoint), "messages": USER} | options)


def texts(completion: Any) -> list[str]:
    return [choice.message.content for choice in completion.choices]


@contextmanager
def streaming(client: openai.OpenAI, server: RunningServer, max_tokens: int) -> Iterator[Any]:
    """A stream of `max_tokens` sampled tokens, after its first event."""
    extra = {"ignore_eos": True}
    with create(
        client, server, temperature=1.0, max_tokens=max_tokens, stream=True, extra_body=extra
    ) as stream:
        next(stream)
        yield stream


def test_chat_completion_equals_infer(
    client: openai.OpenAI, server: RunningServer, scene: Path
) -> None:
    """And a stream has the same text; vLLM joins the pieces that a slow reader has not taken."""
    (model,) = client.models.list().data
    assert model.id == str(server.checkpoint)
    envelopes = server.infer([text_request(), image_request(str(scene))], max_tokens=24)
    for messages, envelope in zip([USER, with_image(data_url(scene))], envelopes, strict=True):
        extra = {"return_token_ids": True}
        whole = create(client, server, messages=messages, extra_body=extra, **GREEDY)
        response, (choice,) = envelope["response"], whole.choices
        text = response["choices"][0]["message"]["content"]
        assert texts(whole) == [text]
        assert whole.prompt_token_ids == response["prompt_token_ids"]
        ids = response_ids(envelope)
        assert choice.token_ids[: len(ids)] == ids
        assert choice.finish_reason == response["choices"][0]["finish_reason"]
        usage = {"include_usage": True}
        with create(
            client, server, messages=messages, stream=True, stream_options=usage, **GREEDY
        ) as stream:
            chunks = list(stream)
        deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert "".join(delta or "" for delta in deltas) == text
        assert chunks[-1].usage == whole.usage


@contextmanager
def counting_web() -> Iterator[tuple[str, list[str]]]:
    """A loopback web server: its URL, and the paths that were requested."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{web.server_port}", paths
        finally:
            web.shutdown()
            thread.join()


def test_bad_calls_are_refused_and_nothing_is_fetched(
    client: openai.OpenAI, server: RunningServer, scene: Path, tmp_path: Path
) -> None:
    def status(**options: Any) -> int:
        try:
            create(client, server, **GREEDY | options)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    Image.new("1", (8001, 8000)).save(large := tmp_path / "large.png")
    with counting_web() as (web, paths):
        bad = {
            "web": status(messages=with_image(f"{web}/a.png")),
            "path": status(messages=with_image(str(scene))),
            "pixels": status(messages=with_image(data_url(large))),
            "template": status(extra_body={"chat_template": "x"}),
            "processor": status(extra_body={"mm_processor_kwargs": {"size": 1}}),
            "n": status(n=4097),
        }
        with pytest.raises(openai.InternalServerError) as failed:  # vLLM's RuntimeError
            create(client, server, messages=with_image(scene.as_uri()))
    assert failed.value.response.headers["connection"] == "close"
    assert paths == []
    assert bad == dict.fromkeys(bad, 400)
    assert status(model="gpt-4") == 404
    assert status() == 200


def test_push_waits_for_a_stream_and_later_answers_have_the_new_version(
    client: openai.OpenAI, server: RunningServer, tied: Path, other_tied: Path
) -> None:
    before = create(client, server, **GREEDY)
    version, group = server.version + 1, weight_group(server.http, timeout_s=120)
    with group as sender, ThreadPoolExecutor() as threads:
        with streaming(client, server, max_tokens=64) as stream:
            pushing = threads.submit(push, server.http, sender, read_weights(other_tied), version)
            while server.info()["weights_state"] != "UPDATING":
                pass
            waiting = threads.submit(create, client, server, **GREEDY)
            assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
        pushing.result(timeout=120)
        after = waiting.result(timeout=120)
        (wanted,) = server.infer([text_request()], max_tokens=24)
        assert wanted["coordexp"]["weights_version"] == [version, version]
        assert texts(after) == [wanted["response"]["choices"][0]["message"]["content"]]
        assert texts(after) != texts(before)
        push(server.http, sender, read_weights(tied), version + 1)
    assert texts(create(client, server, **GREEDY)) == texts(before)


def test_program_of_the_document_runs(
    server: RunningServer, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = Path(__file__).parents[2] / "docs" / "server.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    given = {
        "http://127.0.0.1:8000": server.process.base_url,
        "data:image/png;base64,iVBORw0KG...": data_url(scene),
        "max_tokens=512": "max_tokens=8",
    }
    for written, value in given.items():
        assert written in program
        program = program.replace(written, value)
    exec(compile(program, document, "exec"), {})
    assert capsys.readouterr().out.strip()
