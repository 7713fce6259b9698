"""`--openai` on a real server with the public `openai` client (OAI-01)."""

import base64
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from learner.rollout.server_process import free_ports
from tests.contract.running_server import (
    PROMPT,
    START_TIMEOUT_S,
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
from tests.contract.weight_sender import Sender, push, weight_group

pytestmark = [pytest.mark.slow, pytest.mark.req("OAI-01")]

TOKEN = "openai-clients-token-0123456789"
GUARD = {"enabled": True, "min_new_tokens": 1, "max_consecutive_token_repeats": 40}
CALLS, SEQUENCES, IMAGES = 3, 64, 2
VERSION = "x-weights-version"
USER = [{"role": "user", "content": PROMPT}]


def with_images(*urls: str, text: str = PROMPT) -> list[dict[str, Any]]:
    """A message in OpenAI's form: each image, then the text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def data_url(image: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()


@pytest.fixture(scope="module")
def served(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the routes, a token and a repeat guard; `http` sends the token.

    One test kills its engine before the first push; the last one stops the server.
    """
    folder = tmp_path_factory.mktemp("openai")
    (token := folder / "token").touch(mode=0o600)
    token.write_text(TOKEN)
    config = folder / "server.yaml"
    options = {
        "openai": True,
        "token_file": str(token),
        "repeat_terminate": GUARD,
        "max_concurrent_calls": CALLS,
        "max_requests_per_call": SEQUENCES,
        "max_images_per_request": IMAGES,
        "grace_seconds": 0.1,
    }
    config.write_text(yaml.safe_dump(options))
    with running_server(tied, folder / "server", "--config", str(config)) as server:
        server.http.headers["Authorization"] = f"Bearer {TOKEN}"
        draw_scene(server.media / "scene.png")
        yield server


def client_of(server: RunningServer, token: str = TOKEN) -> openai.OpenAI:
    """It does not try again by itself, and takes no proxy from the environment."""
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
    """An answer with its header."""

    def __init__(self, client: openai.OpenAI, model: Path, messages: Any, **options: Any) -> None:
        create: Any = client.chat.completions.with_raw_response.create
        raw = create(model=str(model), messages=messages, **({"temperature": 0.0} | options))
        self.version = int(raw.headers[VERSION])
        self.completion = raw.parse()

    @property
    def texts(self) -> list[str]:
        return [choice.message.content for choice in self.completion.choices]


def test_models_has_the_served_one(client: openai.OpenAI, served: RunningServer) -> None:
    (model,) = client.models.list().data
    assert model.id == str(served.checkpoint)
    assert client.models.with_raw_response.list().headers[VERSION] == "0"


def test_chat_completion_equals_infer_for_every_kind_of_image(
    client: openai.OpenAI, served: RunningServer
) -> None:
    scene = served.media / "scene.png"
    wanted = served.infer([text_request(), image_request(str(scene))], max_tokens=24)
    sources = [USER, with_images(data_url(scene)), with_images(str(scene))]
    for messages, envelope in zip(sources, [wanted[0], wanted[1], wanted[1]], strict=True):
        extra = {"return_token_ids": True}
        chat = Chat(client, served.checkpoint, messages, max_tokens=24, extra_body=extra)
        response = envelope["response"]
        assert chat.texts == [response["choices"][0]["message"]["content"]]
        assert chat.completion.prompt_token_ids == response["prompt_token_ids"]
        (choice,) = chat.completion.choices
        ids = response_ids(envelope)
        assert choice.token_ids[: len(ids)] == ids
        assert choice.finish_reason == response["choices"][0]["finish_reason"]
        assert chat.completion.usage.prompt_tokens == len(response["prompt_token_ids"])
        assert chat.completion.model == str(served.checkpoint)
        assert chat.version == 0


def test_stream_has_the_same_text_in_pieces(client: openai.OpenAI, served: RunningServer) -> None:
    messages = with_images(data_url(served.media / "scene.png"))
    whole = Chat(client, served.checkpoint, messages, max_tokens=24)
    create: Any = client.chat.completions.with_streaming_response.create
    with create(
        model=str(served.checkpoint),
        messages=messages,
        temperature=0.0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as raw:
        assert raw.headers[VERSION] == "0"
        chunks = list(raw.parse())
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
    before = _metric(served, "rollout_repeat_guard_triggers_total")
    whole = Chat(client, served.checkpoint, USER, **repeating)
    assert whole.completion.choices[0].finish_reason == "stop"
    (envelope,) = served.infer([text_request()], **repeating)
    assert envelope["coordexp"]["repeat_terminate_triggered"] == 1
    assert whole.texts[0] == envelope["response"]["choices"][0]["message"]["content"]
    assert _metric(served, "rollout_repeat_guard_triggers_total") == before + 2


def test_errors_are_those_of_the_client(client: openai.OpenAI, served: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        Chat(client, Path("gpt-4"), USER)
    assert (unknown.value.param, unknown.value.code) == ("model", "not-found")
    assert str(served.checkpoint) in unknown.value.message
    with (
        client_of(served, "another-token") as stranger,
        pytest.raises(openai.AuthenticationError) as unauthorized,
    ):
        Chat(stranger, served.checkpoint, USER)
    assert unauthorized.value.code == "unauthorized"
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="m", input="text", encoding_format="float")
    assert missing.value.code == "not-found"


def unserved() -> dict[str, tuple[dict[str, Any], str]]:
    """Options of a call, and the field that its refusal names."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8="}}
    url = "messages[0].content[0].image_url.url"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}

    def user(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    return {
        "tools": ({"tools": [tool]}, "tools"),
        "schema": ({"response_format": schema}, "response_format.type"),
        "template": ({"extra_body": {"chat_template": "x"}}, "chat_template"),
        "video": (user([{"type": "video_url", "video_url": {"url": "x"}}]), "messages[0].content"),
        "no messages": ({"messages": []}, "messages"),
        "no image": (user([image]), url),
        "path outside": ({"messages": with_images("/etc/hostname")}, url),
        "URL": ({"messages": with_images("http://127.0.0.1/a.png")}, url),
        "many images": (user([image] * (IMAGES + 1)), "images"),
        "control token": (user("<|im_end|>"), "messages"),
        "long prompt": (user("a b " * 900), "messages"),
        "n": ({"n": SEQUENCES + 1}, "n"),
        "temperature": ({"temperature": -1.0}, "temperature"),
        "logprobs": ({"top_logprobs": 2}, "top_logprobs"),
        "stream options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    }


def test_unserved_options_are_refused_by_name(client: openai.OpenAI, served: RunningServer) -> None:
    for name, (options, where) in unserved().items():
        with pytest.raises(openai.BadRequestError) as error:
            Chat(client, served.checkpoint, **({"messages": USER} | options))
        assert (error.value.param, error.value.type) == (where, "invalid_request_error"), name
        assert where in error.value.message
    assert served.http.get("/health/").status_code == 200


@contextmanager
def streaming(client: openai.OpenAI, model: Path, **options: Any) -> Iterator[Any]:
    """A long stream after its first event."""
    create: Any = client.chat.completions.create
    given = {"temperature": 1.0, "max_tokens": 480, "stream": True} | options
    with create(model=str(model), messages=USER, **given) as stream:
        next(stream)
        yield stream


def test_lost_engine_ends_a_stream_with_an_error(
    client: openai.OpenAI, served: RunningServer
) -> None:
    engine = served.processes()["engine 0"]
    with streaming(client, served.checkpoint) as stream:
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as lost:
            list(stream)
    assert lost.value.code == "not-ready"
    with pytest.raises(openai.InternalServerError) as unready:
        Chat(client, served.checkpoint, USER)
    assert (unready.value.status_code, unready.value.code) == (503, "not-ready")
    served.process.wait_until_healthy(START_TIMEOUT_S)


@contextmanager
def learner_of(server: RunningServer) -> Iterator[Sender]:
    """A weight group with the heartbeats of a learner."""
    (port,) = free_ports(1)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(1.0):
            server.http.post("/keep_communicator/", json={"attempt": "sender"})

    with weight_group(server.http, port, timeout_s=120) as sender, ThreadPoolExecutor() as threads:
        threads.submit(beat)
        try:
            yield sender
        finally:
            over.set()


def test_push_waits_for_a_stream_and_later_answers_have_the_new_version(
    client: openai.OpenAI, served: RunningServer, tied: Path, other_tied: Path
) -> None:
    before = Chat(client, served.checkpoint, USER, max_tokens=24)
    with learner_of(served) as sender, ThreadPoolExecutor() as threads:
        with streaming(client, served.checkpoint, max_tokens=64) as stream:
            pushing = threads.submit(push, served.http, sender, read_weights(other_tied), 1)
            while served.http.get("/info/").json()["weights_state"] != "UPDATING":
                time.sleep(0.01)
            waiting = threads.submit(Chat, client, served.checkpoint, USER, max_tokens=24)
            assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
        pushing.result(timeout=120)
        after = waiting.result(timeout=120)
        (wanted,) = served.infer([text_request()], max_tokens=24)
        assert wanted["coordexp"]["weights_version"] == [1, 1]
        assert after.texts == [wanted["response"]["choices"][0]["message"]["content"]]
        assert (before.version, after.version) == (0, 1)
        assert client.models.with_raw_response.list().headers[VERSION] == "1"
        push(served.http, sender, read_weights(tied), 2)
    again = Chat(client, served.checkpoint, USER, max_tokens=24)
    assert (again.version, again.texts) == (2, before.texts)


def _metric(server: RunningServer, name: str) -> float:
    lines = server.http.get("/metrics/").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_program_of_the_document_runs(
    served: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    document = Path(__file__).parents[2] / "docs" / "openai.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    given = {
        "http://127.0.0.1:8000": served.process.base_url,
        '"TOKEN"': f'"{TOKEN}"',
        "data:image/png;base64,iVBORw0KG...": data_url(served.media / "scene.png"),
        "max_tokens=512": "max_tokens=8",
    }
    for written, value in given.items():
        assert written in program
        program = program.replace(written, value)
    exec(compile(program, document, "exec"), {})
    version, _, text = capsys.readouterr().out.partition(" ")
    assert int(version) == served.http.get("/info/").json()["weights_version"]
    assert text.strip()


@pytest.mark.req("SRV-05")
def test_stopping_server_ends_streams_and_calls_with_an_error_and_leaves_no_process(
    client: openai.OpenAI, served: RunningServer, tied: Path
) -> None:
    everything = [served.process.pid, *children(served.process.pid)]
    with ThreadPoolExecutor() as threads:
        options = {"temperature": 1.0, "max_tokens": 480, "n": 8}
        whole = threads.submit(Chat, client, tied, USER, **options)
        served.wait_for_sequences(lambda sequences: sequences == 8)
        with streaming(client, tied) as stream:
            os.kill(served.process.pid, signal.SIGTERM)
            with pytest.raises(openai.APIError) as stopped:
                list(stream)
        with pytest.raises(openai.InternalServerError) as ended:
            whole.result(timeout=60)
    assert "the server is stopping" in stopped.value.message
    assert ended.value.code == "not-ready"
    assert wait_until_gone(everything, timeout_s=60) == []
