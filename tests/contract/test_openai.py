"""`--openai` on a real server, asked by the public `openai` client (OAI-01)."""

import base64
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from learner.rollout.server_process import free_ports
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
from tests.contract.weight_sender import Sender, finish, load, push, weight_group

pytestmark = [pytest.mark.slow, pytest.mark.req("OAI-01")]

TOKEN = "openai-clients-token-0123456789"
GUARD = {"enabled": True, "min_new_tokens": 1, "max_consecutive_token_repeats": 40}
CALLS, SEQUENCES, IMAGES = 3, 64, 2
VERSION = "x-weights-version"
USER = [{"role": "user", "content": PROMPT}]


def with_images(*urls: str, text: str = PROMPT) -> list[dict[str, Any]]:
    """A message as OpenAI's: each image, then the text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def data_url(image: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()


@contextmanager
def openai_server(checkpoint: Path, folder: Path, **settings: Any) -> Iterator[RunningServer]:
    """A server with the route, a token and a repeat guard; `http` sends the token."""
    folder.mkdir(parents=True)
    (token := folder / "token").touch(mode=0o600)
    token.write_text(TOKEN)
    config = folder / "server.yaml"
    asked = {"openai": True, "token_file": str(token), "repeat_terminate": GUARD} | settings
    config.write_text(yaml.safe_dump(asked))
    with running_server(checkpoint, folder / "server", "--config", str(config)) as server:
        server.http.headers["Authorization"] = f"Bearer {TOKEN}"
        draw_scene(server.media / "scene.png")
        yield server


@pytest.fixture(scope="module")
def served(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("openai") / "served"
    bounds = {
        "max_concurrent_calls": CALLS,
        "max_requests_per_call": SEQUENCES,
        "max_images_per_request": IMAGES,
        # On a busy CPU vLLM compiles for a minute when it is first asked for log-probabilities.
        "hang_seconds": 250.0,
    }
    with openai_server(tied, folder, **bounds) as server:
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


class Asked:
    """An answer with its header."""

    def __init__(self, client: openai.OpenAI, model: Path, messages: Any, **options: Any) -> None:
        create: Any = client.chat.completions.with_raw_response.create
        raw = create(model=str(model), messages=messages, **({"temperature": 0.0} | options))
        self.version = int(raw.headers[VERSION])
        self.completion = raw.parse()

    @property
    def texts(self) -> list[str]:
        return [choice.message.content for choice in self.completion.choices]


def test_the_list_of_models_has_the_one_that_is_served(
    client: openai.OpenAI, served: RunningServer
) -> None:
    (model,) = client.models.list().data
    assert model.id == str(served.checkpoint)
    assert client.models.with_raw_response.list().headers[VERSION] == "0"


def test_an_answer_is_that_of_infer_whichever_way_the_image_comes(
    client: openai.OpenAI, served: RunningServer
) -> None:
    scene = served.media / "scene.png"
    wanted = served.infer([text_request(), image_request(str(scene))], max_tokens=24)
    sources = [USER, with_images(data_url(scene)), with_images(str(scene))]
    for messages, envelope in zip(sources, [wanted[0], wanted[1], wanted[1]], strict=True):
        extra = {"return_token_ids": True}
        asked = Asked(client, served.checkpoint, messages, max_tokens=24, extra_body=extra)
        response = envelope["response"]
        assert asked.texts == [response["choices"][0]["message"]["content"]]
        assert asked.completion.prompt_token_ids == response["prompt_token_ids"]
        (choice,) = asked.completion.choices
        ids = response_ids(envelope)
        assert choice.token_ids[: len(ids)] == ids
        assert choice.finish_reason == response["choices"][0]["finish_reason"]
        assert asked.completion.usage.prompt_tokens == len(response["prompt_token_ids"])
        assert asked.completion.model == str(served.checkpoint)
        assert asked.version == 0


def test_a_stream_has_the_same_text_in_pieces_and_its_header_first(
    client: openai.OpenAI, served: RunningServer
) -> None:
    messages = with_images(data_url(served.media / "scene.png"))
    whole = Asked(client, served.checkpoint, messages, max_tokens=24)
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


def test_log_probabilities_are_those_of_infer(client: openai.OpenAI, served: RunningServer) -> None:
    (envelope,) = served.infer([text_request()], max_tokens=12, logprobs=True)
    wanted = [each["logprob"] for each in envelope["response"]["choices"][0]["logprobs"]["content"]]
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    (choice,) = Asked(client, served.checkpoint, USER, **options).completion.choices
    content = choice.logprobs.content
    assert [token.logprob for token in content[: len(wanted)]] == pytest.approx(wanted, abs=1e-5)
    assert all(len(token.top_logprobs) >= 3 for token in content)
    assert all(math.isfinite(top.logprob) for token in content for top in token.top_logprobs)


def test_several_choices_are_seeded_and_a_stop_string_ends_each(
    client: openai.OpenAI, served: RunningServer
) -> None:
    options = {"n": 4, "temperature": 1.0, "seed": 11, "max_tokens": 24}
    first = Asked(client, served.checkpoint, USER, **options)
    assert [choice.index for choice in first.completion.choices] == [0, 1, 2, 3]
    assert len(set(first.texts)) > 1
    assert Asked(client, served.checkpoint, USER, **options).texts == first.texts
    stop = first.texts[0][3:5]
    stopped = Asked(client, served.checkpoint, USER, **options, stop=[stop])
    assert stopped.texts[0] == first.texts[0][: first.texts[0].index(stop)]
    assert stopped.completion.choices[0].finish_reason == "stop"


def test_the_repeat_guard_ends_a_sequence_here_too(
    client: openai.OpenAI, served: RunningServer
) -> None:
    """Penalties below 0 make it repeat a token; the signal of the guard has no text."""
    penalties = {"presence_penalty": -2.0, "frequency_penalty": -2.0}
    options = {"max_tokens": 200, "logprobs": True} | penalties
    before = _metric(served, "rollout_repeat_guard_triggers_total")
    whole = Asked(client, served.checkpoint, USER, **options)
    (choice,) = whole.completion.choices
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == whole.completion.usage.completion_tokens < 200
    (envelope,) = served.infer([text_request()], max_tokens=200, **penalties)
    assert envelope["coordexp"]["repeat_terminate_triggered"] == 1
    assert whole.texts[0] == envelope["response"]["choices"][0]["message"]["content"]
    assert _metric(served, "rollout_repeat_guard_triggers_total") == before + 2


def test_a_wrong_model_is_not_found_before_its_images_are_looked_at(
    client: openai.OpenAI, served: RunningServer
) -> None:
    messages = with_images("data:image/png;base64,bm8gaW1hZ2U=")
    with pytest.raises(openai.NotFoundError) as error:
        Asked(client, Path("gpt-4"), messages)
    assert (error.value.param, error.value.code) == ("model", "not-found")
    assert str(served.checkpoint) in error.value.message
    assert error.value.type == "invalid_request_error"


def test_a_wrong_token_a_wrong_path_and_a_wrong_method_are_told_in_openais_form(
    client: openai.OpenAI, served: RunningServer
) -> None:
    with client_of(served, "another-token") as stranger:
        with pytest.raises(openai.AuthenticationError) as unauthorized:
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            Asked(stranger, served.checkpoint, USER)
    assert unauthorized.value.code == "unauthorized"
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="m", input="text", encoding_format="float")
    assert missing.value.code == "not-found"
    answer = served.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method-not-allowed"


def unserved() -> dict[str, tuple[dict[str, Any], str]]:
    """Options of a call, and the place that its refusal names."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8="}}
    url = "messages[0].content[0].image_url.url"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def said(*parts: Any, role: str = "user") -> dict[str, Any]:
        return {"messages": [{"role": role, "content": list(parts)}]}

    def image_of(url: str) -> dict[str, Any]:
        return {"messages": with_images(url)}

    video = {"type": "video_url", "video_url": {"url": "x"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    return {
        "tools": ({"tools": [tool]}, "tools"),
        "schema": ({"response_format": schema}, "response_format.type"),
        "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias"),
        "beam search": ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        "vLLM's extra arguments": ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs"),
        "a template": ({"extra_body": {"chat_template": "x"}}, "chat_template"),
        "priority": ({"extra_body": {"priority": -5}}, "priority"),
        "role": (said({"type": "text", "text": "a"}, role="developer"), "messages[0].role"),
        "video": (said(video), "messages[0].content"),
        "no messages": ({"messages": []}, "messages"),
        "no image": (said(image), url),
        "a path outside": (image_of("/etc/hostname"), url),
        "a URL": (image_of("http://127.0.0.1/a.png"), url),
        "many images": (said(*[image] * (IMAGES + 1)), "images"),
        "control token": ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, "messages"),
        "long prompt": ({"messages": [{"role": "user", "content": "a b " * 900}]}, "messages"),
        "n": ({"n": SEQUENCES + 1}, "n"),
        "n of none": ({"n": 0}, "n"),
        "temperature": ({"temperature": -1.0}, "temperature"),
        "penalty": ({"presence_penalty": 9.0}, "presence_penalty"),
        "top_k": ({"extra_body": {"top_k": 2**40}}, "top_k"),
        "seed": ({"seed": -1}, "seed"),
        "logprobs": ({"top_logprobs": 2}, "top_logprobs"),
        "many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        "stream options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    }


@pytest.mark.parametrize("name", unserved())
def test_what_is_not_served_is_refused_by_its_name(
    client: openai.OpenAI, served: RunningServer, name: str
) -> None:
    options, where = unserved()[name]
    with pytest.raises(openai.BadRequestError) as error:
        Asked(client, served.checkpoint, **({"messages": USER} | options))
    assert (error.value.param, error.value.type) == (where, "invalid_request_error")
    assert where in error.value.message
    assert served.http.get("/health/").status_code == 200


def test_a_body_that_is_no_json_is_refused_in_openais_form(served: RunningServer) -> None:
    json_type = {"content-type": "application/json"}
    for body, headers in ((b"{", json_type), (b"[1]", json_type), (b"{}", {})):
        answer = served.http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@contextmanager
def streaming(client: openai.OpenAI, model: Path, **options: Any) -> Iterator[Any]:
    """A long stream that has begun."""
    create: Any = client.chat.completions.create
    given = {"temperature": 1.0, "max_tokens": 480, "stream": True} | options
    with create(model=str(model), messages=USER, **given) as stream:
        next(stream)
        yield stream


def test_calls_of_both_routes_share_the_places_and_a_client_that_leaves_frees_its_own(
    client: openai.OpenAI, served: RunningServer
) -> None:
    with ExitStack() as streams:
        for _ in range(CALLS):
            streams.enter_context(streaming(client, served.checkpoint, n=4))
        with pytest.raises(openai.RateLimitError) as error:
            Asked(client, served.checkpoint, USER)
        assert error.value.code == "too-many-calls"
        assert error.value.response.headers["retry-after"] == "1"
        assert served.post_infer([text_request()]).status_code == 429
    served.wait_for_sequences(lambda sequences: sequences == 0)
    assert Asked(client, served.checkpoint, USER, max_tokens=2).texts
    assert _metric(served, 'rollout_calls_total{outcome="gone"}') >= CALLS


@contextmanager
def learner_of(server: RunningServer) -> Iterator[Sender]:
    """A weight group, and the heartbeats of its learner."""
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


def test_a_push_waits_for_a_stream_and_answers_after_it_have_the_new_version(
    client: openai.OpenAI, served: RunningServer, tied: Path, other_tied: Path
) -> None:
    before = Asked(client, served.checkpoint, USER, max_tokens=24)
    with learner_of(served) as sender, ThreadPoolExecutor() as threads:
        with streaming(client, served.checkpoint, max_tokens=64) as stream:
            pushing = threads.submit(push, served.http, sender, read_weights(other_tied), 1)
            while served.http.get("/info/").json()["weights_state"] != "UPDATING":
                time.sleep(0.01)
            waiting = threads.submit(Asked, client, served.checkpoint, USER, max_tokens=24)
            assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
        pushing.result(timeout=120)
        after = waiting.result(timeout=120)
        (wanted,) = served.infer([text_request()], max_tokens=24)
        assert wanted["coordexp"]["weights_version"] == [1, 1]
        assert after.texts == [wanted["response"]["choices"][0]["message"]["content"]]
        assert (before.version, after.version) == (0, 1)
        assert client.models.with_raw_response.list().headers[VERSION] == "1"
        push(served.http, sender, read_weights(tied), 2)
    again = Asked(client, served.checkpoint, USER, max_tokens=24)
    assert (again.version, again.texts) == (2, before.texts)


def test_poisoned_weights_answer_nothing(
    client: openai.OpenAI, served: RunningServer, tied: Path
) -> None:
    version = served.http.get("/info/").json()["weights_version"] + 1
    weights = read_weights(tied)
    with learner_of(served) as sender:
        load(served.http, sender, weights, version)
        wrong = [{"name": next(iter(weights)), "digest": "0" * 16}]
        assert finish(served.http, version, wrong).status_code == 502
        for ask in (lambda: Asked(client, served.checkpoint, USER), client.models.list):
            with pytest.raises(openai.InternalServerError) as error:
                ask()
            assert (error.value.status_code, error.value.code) == (503, "weights-poisoned")
            assert error.value.type == "server_error"
        push(served.http, sender, weights, version)
    assert Asked(client, served.checkpoint, USER, max_tokens=2).version == version


def test_the_access_log_and_the_metrics_count_chat_completions(
    client: openai.OpenAI, served: RunningServer
) -> None:
    names = ("rollout_requests_total", "rollout_images_total", "rollout_generated_tokens_total")
    before = [_metric(served, name) for name in names]
    scene = data_url(served.media / "scene.png")
    options = {"max_tokens": 5, "n": 2, "temperature": 1.0}
    asked = Asked(client, served.checkpoint, with_images(scene, scene), **options)
    grown = [_metric(served, name) - b for name, b in zip(names, before, strict=True)]
    assert grown == [1, 2, asked.completion.usage.completion_tokens]
    line = [
        text
        for text in served.process.log.read_text().splitlines()
        if "route=/v1/chat/completions/" in text
    ][-1]
    assert "status=200 outcome=answered" in line
    assert "images=2" in line
    assert f"weights_version={asked.version}" in line


def _metric(server: RunningServer, name: str) -> float:
    lines = server.http.get("/metrics/").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_the_program_of_the_document_runs(
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


def test_without_the_option_there_is_no_such_path(server: RunningServer) -> None:
    for path in ("/v1/models", "/v1/models/"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:rollmatch:not-found")
    answer = server.http.post("/v1/chat/completions", json={"messages": USER})
    assert answer.status_code == 404


def test_a_lost_engine_and_a_server_that_stops_end_a_stream_with_an_error(
    tied: Path, tmp_path: Path
) -> None:
    """Both after the first event; a call of one piece gets the status."""
    with (
        openai_server(tied, tmp_path / "ending", grace_seconds=0.1) as server,
        client_of(server) as client,
    ):
        (engine,) = [pid for role, pid in server.processes().items() if role != "server"]
        with streaming(client, tied) as stream:
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.APIError) as lost:
                list(stream)
        assert lost.value.code == "not-ready"
        with pytest.raises(openai.InternalServerError) as unready:
            Asked(client, tied, USER)
        assert (unready.value.status_code, unready.value.code) == (503, "not-ready")
        server.process.wait_until_healthy(280)
        everything = [server.process.pid, *children(server.process.pid)]
        with ThreadPoolExecutor() as threads:
            options = {"temperature": 1.0, "max_tokens": 480, "n": 8}
            whole = threads.submit(Asked, client, tied, USER, **options)
            server.wait_for_sequences(lambda sequences: sequences == 8)
            with streaming(client, tied) as stream:
                os.kill(server.process.pid, signal.SIGTERM)
                with pytest.raises(openai.APIError) as stopped:
                    list(stream)
            with pytest.raises(openai.InternalServerError) as ended:
                whole.result(timeout=60)
        assert "the server is stopping" in stopped.value.message
        assert ended.value.code == "not-ready"
        assert wait_until_gone(everything, timeout_s=60) == []


def test_errors_are_json_with_one_member(served: RunningServer) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": USER, "model": "no"})
    assert answer.headers["content-type"] == "application/json"
    assert set(json.loads(answer.content)) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
