"""`--openai` on a real server with the public `openai` client (OAI-01)."""

import base64
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from learner.rollout.server_process import free_ports
from shared_contracts.errors import Problem
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    children,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
    wait_until_gone,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group

pytestmark = [pytest.mark.slow, pytest.mark.req("OAI-01")]

TOKEN = "openai-clients-token-0123456789"
GUARD = {"enabled": True, "min_new_tokens": 1, "max_consecutive_token_repeats": 40}
SEQUENCES = 64
ENDLESS = {"ignore_eos": True}
USER = [{"role": "user", "content": PROMPT}]


def with_image(url: str, text: str = PROMPT) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: the image, then the text."""
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def scene_url(server: RunningServer) -> str:
    return data_url((server.media / "scene.png").read_bytes())


@pytest.fixture(scope="module")
def served(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the routes, a token and a repeat guard; `http` sends the token.

    Its model is an adapter over `tied`, which the server merges, without an effect of its own.

    Its tests run in order: one kills its engine, a later one pushes, the last one stops the server.
    """
    folder = tmp_path_factory.mktemp("openai")
    (token := folder / "token").touch(mode=0o600)
    token.write_text(TOKEN)
    base = Qwen3VLForConditionalGeneration.from_pretrained(tied, dtype=torch.float32)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"])
    get_peft_model(base, adapter).save_pretrained(str(folder / "adapter"))
    config = folder / "server.yaml"
    options = {
        "openai": True,
        "token_file": str(token),
        "repeat_terminate": GUARD,
        "max_requests_per_call": SEQUENCES,
        "max_image_megapixels": 0.01,
        "grace_seconds": 0.1,
    }
    config.write_text(yaml.safe_dump(options))
    with running_server(folder / "adapter", folder / "server", "--config", str(config)) as server:
        server.http.headers["Authorization"] = f"Bearer {TOKEN}"
        draw_scene(server.media / "scene.png")
        yield server


def client_of(server: RunningServer, token: str = TOKEN) -> openai.OpenAI:
    """A client without retries and without a proxy of the environment."""
    return openai.OpenAI(
        base_url=f"{server.process.base_url}/v1",
        api_key=token,
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@pytest.fixture
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


class Chat:
    """An answer."""

    def __init__(self, client: openai.OpenAI, model: Path, messages: Any, **options: Any) -> None:
        create: Any = client.chat.completions.create
        settings = {"temperature": 0.0} | options
        self.completion = create(model=str(model), messages=messages, **settings)

    @property
    def texts(self) -> list[str]:
        return [choice.message.content for choice in self.completion.choices]


def test_chat_completion_equals_infer(client: openai.OpenAI, served: RunningServer) -> None:
    scene = str(served.media / "scene.png")
    envelopes = served.infer([text_request(), image_request(scene)], max_tokens=24)
    for messages, envelope in zip([USER, with_image(scene_url(served))], envelopes, strict=True):
        extra = {"return_token_ids": True}
        chat = Chat(client, served.checkpoint, messages, max_tokens=24, extra_body=extra)
        response, (choice,) = envelope["response"], chat.completion.choices
        assert chat.texts == [response["choices"][0]["message"]["content"]]
        assert chat.completion.prompt_token_ids == response["prompt_token_ids"]
        ids = response_ids(envelope)
        assert choice.token_ids[: len(ids)] == ids
        assert choice.finish_reason == response["choices"][0]["finish_reason"]


def test_stream_has_the_same_text_in_pieces(client: openai.OpenAI, served: RunningServer) -> None:
    messages = with_image(scene_url(served))
    whole = Chat(client, served.checkpoint, messages, max_tokens=24)
    create: Any = client.chat.completions.create
    with create(
        model=str(served.checkpoint),
        messages=messages,
        temperature=0.0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(delta or "" for delta in deltas) == whole.texts[0]
    assert len([delta for delta in deltas if delta]) > 3
    assert chunks[-1].usage == whole.completion.usage


def test_choices_are_seeded_and_the_repeat_guard_ends_a_sequence(
    client: openai.OpenAI, served: RunningServer
) -> None:
    """Penalties below 0 make the model repeat a token; the signal of the guard has no text."""
    options = {"n": 4, "temperature": 1.0, "seed": 11, "max_tokens": 24}
    first = Chat(client, served.checkpoint, USER, **options)
    assert [choice.index for choice in first.completion.choices] == [0, 1, 2, 3]
    assert len(set(first.texts)) > 1
    assert Chat(client, served.checkpoint, USER, **options).texts == first.texts
    repeating = {"max_tokens": 200, "presence_penalty": -2.0, "frequency_penalty": -2.0}
    whole = Chat(client, served.checkpoint, USER, **repeating)
    assert whole.completion.choices[0].finish_reason == "stop"
    (envelope,) = served.infer([text_request()], **repeating)
    assert envelope["coordexp"]["repeat_terminate_triggered"] == 1
    assert whole.texts[0] == envelope["response"]["choices"][0]["message"]["content"]


def test_errors_are_those_of_the_client(client: openai.OpenAI, served: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        Chat(client, Path("gpt-4"), USER)
    with (
        client_of(served, "another-token") as stranger,
        pytest.raises(openai.AuthenticationError) as unauthorized,
    ):
        Chat(stranger, served.checkpoint, USER)
    assert Problem.model_validate(unauthorized.value.body).kind == "unauthorized"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="text", encoding_format="float")


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
    client: openai.OpenAI, served: RunningServer, tmp_path: Path
) -> None:
    def status(**options: Any) -> int:
        try:
            Chat(client, served.checkpoint, **({"messages": USER} | options))
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    scene = served.media / "scene.png"
    Image.new("L", (101, 100)).save(large := tmp_path / "large.png")
    with counting_web() as (web, paths):
        bad = {
            "web": status(messages=with_image(f"{web}/a.png")),
            "path": status(messages=with_image(str(scene))),
            "no image": status(messages=with_image(data_url(b"no"))),
            "pixels": status(messages=with_image(data_url(large.read_bytes()))),
            "no messages": status(messages=[]),
            "long prompt": status(messages=[{"role": "user", "content": "a b " * 900}]),
            "template": status(extra_body={"chat_template": "x"}),
            "processor": status(extra_body={"mm_processor_kwargs": {"size": 1}}),
            "n": status(n=SEQUENCES + 1),
            "temperature": status(temperature=-1.0),
        }
        assert status(messages=with_image(scene.as_uri())) == 500  # vLLM's RuntimeError
    assert paths == []
    assert bad == dict.fromkeys(bad, 400)
    assert status() == 200


@contextmanager
def streaming(client: openai.OpenAI, model: Path, **options: Any) -> Iterator[Any]:
    """A stream of `max_tokens` tokens, after its first event."""
    create: Any = client.chat.completions.create
    given = {"temperature": 1.0, "max_tokens": 480, "stream": True, "extra_body": ENDLESS} | options
    with create(model=str(model), messages=USER, **given) as stream:
        next(stream)
        yield stream


def test_push_waits_for_a_stream_and_later_answers_have_the_new_version(
    client: openai.OpenAI, served: RunningServer, tied: Path, other_tied: Path
) -> None:
    before = Chat(client, served.checkpoint, USER, max_tokens=24)
    (port,) = free_ports(1)
    group = weight_group(served.http, port, timeout_s=120)
    with group as sender, ThreadPoolExecutor() as threads:
        with streaming(client, served.checkpoint, max_tokens=64) as stream:
            pushing = threads.submit(push, served.http, sender, read_weights(other_tied), 1)
            while served.http.get("/info/").json()["weights_state"] != "UPDATING":
                pass
            waiting = threads.submit(Chat, client, served.checkpoint, USER, max_tokens=24)
            assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
        pushing.result(timeout=120)
        after = waiting.result(timeout=120)
        (wanted,) = served.infer([text_request()], max_tokens=24)
        assert wanted["coordexp"]["weights_version"] == [1, 1]
        assert after.texts == [wanted["response"]["choices"][0]["message"]["content"]]
        assert after.texts != before.texts
        push(served.http, sender, read_weights(tied), 2)
    again = Chat(client, served.checkpoint, USER, max_tokens=24)
    assert again.texts == before.texts


def test_program_of_the_document_runs(
    served: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    document = Path(__file__).parents[2] / "docs" / "server.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    given = {
        "http://127.0.0.1:8000": served.process.base_url,
        '"TOKEN"': f'"{TOKEN}"',
        "data:image/png;base64,iVBORw0KG...": scene_url(served),
        "max_tokens=512": "max_tokens=8",
    }
    for written, value in given.items():
        assert written in program
        program = program.replace(written, value)
    exec(compile(program, document, "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.req("SRV-05")
def test_stopping_server_ends_streams_and_calls_with_an_error_and_leaves_no_process(
    client: openai.OpenAI, served: RunningServer
) -> None:
    everything = [served.process.pid, *children(served.process.pid)]
    with ThreadPoolExecutor() as threads:
        options = {"temperature": 1.0, "max_tokens": 480}
        whole = threads.submit(served.post_infer, [text_request()] * 32, **options)
        served.wait_for_sequences(lambda sequences: sequences > 0)
        with streaming(client, served.checkpoint) as stream:
            os.kill(served.process.pid, signal.SIGTERM)
            with pytest.raises(openai.APIError) as stopped:
                list(stream)
        ended = whole.result(timeout=60)
    assert "the server is stopping" in stopped.value.message
    assert (ended.status_code, ended.json()["detail"]) == (503, "the server is stopping")
    assert wait_until_gone(everything, timeout_s=60) == []
