"""`POST /infer/` of a real server against plain transformers; its request ids and metrics."""

import base64
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group
from tests.unit.fleets import wait_until


@pytest.mark.req("WIRE-02", "SRV-02")
@pytest.mark.parametrize("with_image", [False, True])
def test_greedy_answer_equals_transformers(
    server: RunningServer, scene: Path, with_image: bool
) -> None:
    images = [scene] if with_image else []
    request = image_request(str(scene)) if with_image else text_request()
    (envelope,) = server.infer([request], max_tokens=24)
    response = envelope["response"]
    assert response["prompt_token_ids"] == reference.prompt_ids(server.checkpoint, PROMPT, images)
    expected = reference.greedy_ids(server.checkpoint, PROMPT, images, 24)
    assert response_ids(envelope) == expected
    content = response["choices"][0]["message"]["content"]
    assert content == reference.decode(server.checkpoint, expected)


@pytest.mark.req("WIRE-01")
def test_every_form_of_an_image_gives_the_same_answer(server: RunningServer, scene: Path) -> None:
    encoded = base64.b64encode(scene.read_bytes()).decode()
    own = {"type": "image", "image": str(scene)}
    listed = {"type": "image"}
    text = {"type": "text", "text": PROMPT}
    requests: list[dict[str, Any]] = [
        image_request(str(scene)),
        image_request(f"file://{scene}"),
        image_request(f"data:image/png;base64,{encoded}"),
        image_request(encoded),
        {"messages": [{"role": "user", "content": [own, text]}]},
        {"messages": [{"role": "user", "content": [listed, text]}], "images": [str(scene)]},
    ]
    envelopes = server.infer(requests)
    prompts = [envelope["response"]["prompt_token_ids"] for envelope in envelopes]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert all(response_ids(e) == response_ids(envelopes[0]) for e in envelopes)


@pytest.mark.req("WIRE-01")
def test_conversations_have_turns_and_several_images(server: RunningServer, scene: Path) -> None:
    other = draw_scene(server.media / "other.png", 5)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>First.<image>"},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    ]
    one, swapped = server.infer(
        [
            {"messages": turns, "images": [str(scene), str(other)]},
            {"messages": turns, "images": [str(other), str(scene)]},
        ]
    )
    assert one["response"]["prompt_token_ids"] == swapped["response"]["prompt_token_ids"]
    assert response_ids(one) != response_ids(swapped)


@pytest.mark.req("SRV-01", "SEED-01", "WIRE-02")
def test_request_i_has_seed_plus_i(server: RunningServer) -> None:
    together = server.infer([text_request()] * 5, temperature=1.0, seed=40)
    alone = [server.infer([text_request()], temperature=1.0, seed=40 + i)[0] for i in range(5)]
    assert [response_ids(e) for e in together] == [response_ids(e) for e in alone]
    assert [e["coordexp"]["seed"] for e in together] == [40, 41, 42, 43, 44]
    assert len({tuple(response_ids(e)) for e in together}) == 5


@pytest.mark.req("WIRE-02", "WIRE-03", "LOGP-01")
def test_without_details_there_are_no_ids_and_no_logprobs(server: RunningServer) -> None:
    health = server.http.get("/health/").json()
    (envelope,) = server.infer([text_request()], return_details=False)
    response, version = envelope["response"], health["weights_version"]
    (choice,) = response["choices"]
    assert response["prompt_token_ids"] is choice["token_ids"] is choice["logprobs"] is None
    assert choice["message"]["content"]
    usage = response["usage"]
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16
    assert envelope["coordexp"] == {
        "repeat_terminate_triggered": 0,
        "repeat_terminated_choices": [],
        "weights_version": [version, version],
        "server_epoch": health["server_epoch"],
        "seed": None,
        "finish": "length",
    }


@pytest.mark.req("WIRE-02", "LOGP-01")
def test_ids_and_logprobs_end_before_the_stop_token(server: RunningServer) -> None:
    """Hot sampling, so that some sequences end with the stop token."""
    hot = {"temperature": 2.0, "seed": 0, "max_tokens": 300, "logprobs": True}
    envelopes = server.infer([text_request()] * 24, **hot)
    choices = [envelope["response"]["choices"][0] for envelope in envelopes]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    for envelope, choice in zip(envelopes, choices, strict=True):
        ids, text = choice["token_ids"], choice["message"]["content"]
        assert len(chosen_logprobs(choice)) == len(ids)
        if choice["finish_reason"] == "stop":
            assert len(ids) < 300
            assert text == reference.decode(server.checkpoint, ids)
            assert not text.endswith("<|im_end|>")
            assert envelope["coordexp"]["finish"] == "stop"
        else:
            assert len(ids) == 300


@pytest.mark.req("WIRE-01")
def test_text_ends_before_a_stop_string(server: RunningServer) -> None:
    (free,) = server.infer([text_request()], max_tokens=16)
    text = free["response"]["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:6]
    (stopped,) = server.infer([text_request()], max_tokens=16, stop=[stop])
    choice = stopped["response"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[: text.index(stop)]


def chosen_logprobs(choice: dict[str, Any]) -> list[float]:
    return [each["logprob"] for each in choice["logprobs"]["content"]]


@pytest.mark.req("LOGP-01")
@pytest.mark.parametrize(
    "decoding",
    [
        {"temperature": 0.0},
        {"temperature": 2.0, "n": 3, "seed": 7, "top_k": 50, "repetition_penalty": 1.3},
    ],
    ids=["greedy", "sampled"],
)
def test_logprobs_are_those_of_the_model_alone(
    server: RunningServer, scene: Path, decoding: dict[str, Any]
) -> None:
    """Neither temperature nor penalties nor top-k are in them."""
    options = {"logprobs": True, "max_tokens": 24} | decoding
    (envelope,) = server.infer([image_request(str(scene))], **options)
    choices = envelope["response"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(decoding.get("n", 1)))
    assert len({tuple(choice["token_ids"]) for choice in choices}) == len(choices)
    for choice in choices:
        ids, found = choice["token_ids"], chosen_logprobs(choice)
        assert len(found) == len(ids)
        expected = reference.logprobs(server.checkpoint, PROMPT, [scene], ids)
        assert found == pytest.approx(expected, abs=1e-4)
        assert max(found) <= 0.0


@pytest.mark.req("WIRE-01")
def test_answer_ends_with_the_context(server: RunningServer) -> None:
    (envelope,) = server.infer([text_request()], max_tokens=100_000)
    length = len(envelope["response"]["prompt_token_ids"]) + len(response_ids(envelope))
    finish = envelope["response"]["choices"][0]["finish_reason"]
    assert length == 512 if finish == "length" else length < 512


@pytest.mark.req("WIRE-02")
def test_client_of_ms_swift_reads_both_forms(
    server: RunningServer, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class as installed; only its check for a distribution named `vllm` is patched."""
    protocol = importlib.import_module("swift.infer_engine.protocol")
    vllm_client = importlib.import_module("swift.rlhf_trainers.vllm_client")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    url = str(server.http.base_url).rstrip("/")
    client = vllm_client.VLLMInferClient(base_urls=[url])
    config = protocol.RequestConfig(
        max_tokens=8, temperature=0.0, return_details=True, logprobs=True
    )
    message = {"role": "user", "content": f"<image>{PROMPT}"}
    request = protocol.RolloutInferRequest(messages=[message], images=[str(scene)])
    (enveloped,) = client.infer([request], config)
    assert isinstance(enveloped, protocol.RolloutOutput)
    ids = response_ids(server.infer([image_request(str(scene))], max_tokens=8)[0])
    assert enveloped.response.choices[0].token_ids == ids
    mixin = importlib.import_module("swift.rlhf_trainers.rollout_mixin").RolloutTrainerMixin
    found = mixin._extract_logprobs_from_choice(enveloped.response.choices[0])
    expected = reference.logprobs(server.checkpoint, PROMPT, [scene], ids)
    assert found == pytest.approx(expected, abs=1e-4)

    requests = [image_request(str(scene)), text_request()]
    body = {"infer_requests": requests, "request_config": {"max_tokens": 8}}
    enveloped = server.http.post("/infer/", json=body).json()
    bare = server.http.post("/infer/?envelope=0", json=body).json()
    assert [each["choices"] for each in bare] == [each["response"]["choices"] for each in enveloped]
    assert protocol.ChatCompletionResponse(**bare[0]).choices[0]["message"]["role"] == "assistant"
    assert server.http.post("/infer/?envelope=0", json={"infer_requests": []}).json() == []


# --- refusals


@pytest.mark.req("WIRE-05")
def test_call_with_bad_requests_is_refused_and_names_each(
    server: RunningServer, scene: Path
) -> None:
    broken = server.media / "broken.png"
    broken.write_bytes(scene.read_bytes()[:60])
    answer = server.post_infer(
        [
            image_request(str(scene)),
            image_request(str(broken)),
            text_request("word " * 600),
            text_request(),
            {"messages": text_request("<image>")["messages"]},
            image_request("/etc/hostname"),
        ]
    )
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "urn:rollmatch:invalid-request"
    assert [(error["index"], error["where"]) for error in problem["errors"]] == [
        (1, "infer_requests[1].images[0]"),
        (2, "infer_requests[2].messages"),
        (4, "infer_requests[4].images"),
        (5, "infer_requests[5].images[0]"),
    ]


@pytest.mark.req("WIRE-05")
def test_longest_prompt_that_fits_is_served(server: RunningServer) -> None:
    """A prompt must leave room for one token."""
    base = len(reference.prompt_ids(server.checkpoint, "", []))
    per_word = len(reference.prompt_ids(server.checkpoint, "a" * 8, [])) - base
    assert per_word == 8  # one letter, one token: any length can be made
    (envelope,) = server.infer([text_request("a" * (511 - base))], max_tokens=None)
    assert len(envelope["response"]["prompt_token_ids"]) == 511
    assert len(response_ids(envelope)) <= 1
    refused = server.post_infer([text_request("a" * (512 - base))])
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["index"] == 0


@pytest.mark.req("WIRE-05")
def test_odd_input_is_answered_or_refused_and_breaks_nothing(server: RunningServer) -> None:
    """Bytes on the wire: valid JSON that is no valid text, and odd images."""
    sliver = server.media / "sliver.png"
    Image.new("L", (1, 1000)).save(sliver)
    dot = server.media / "dot.png"
    Image.new("I;16", (1, 1)).save(dot)
    requests = {
        rb"""{"messages":[{"role":"user","content":"a\ud800b"}]}""": 400,
        rb"""{"messages":[{"role":"user","content":"<image>"}],"images":["/a\u0000"]}""": 422,
        rb"""{"messages":[{"role":"user","content":"a\u0000b"}]}""": 200,
        rb"""{"messages":[{"role":"user","content":[]}]}""": 200,
        rb"""{"messages":[{"role":"user","content":"<|im_end|><|image_pad|>"}]}""": 422,
        json.dumps(image_request(str(sliver))).encode(): 422,
        json.dumps(image_request(str(dot))).encode(): 200,
    }
    for request, status in requests.items():
        body = b'{"infer_requests":[%s],"request_config":{"max_tokens":2}}' % request
        answer = server.http.post(
            "/infer/", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == status, (request, answer.text)
    assert server.http.get("/health/").status_code == 200


@pytest.mark.req("SRV-07")
def test_sequences_of_a_client_that_goes_away_are_aborted(server: RunningServer) -> None:
    long = {"temperature": 1.0, "seed": 3, "max_tokens": 480}
    connection = server.begin_infer([text_request()] * 256, long)
    server.wait_for_sequences(lambda running: running == 64)
    connection.close()
    server.wait_for_sequences(lambda running: running == 0)


# --- request ids, expected weights and metrics


SAMPLED = {"temperature": 1.0, "max_tokens": 16}  # without a seed, so that answers differ


def post(server: RunningServer, requests: int = 1, **body: Any) -> httpx.Response:
    body = {"infer_requests": [text_request()] * requests, "request_config": SAMPLED} | body
    return server.http.post("/infer/", json=body)


@contextmanager
def growth(server: RunningServer) -> Iterator[dict[str, float]]:
    """The growth of each counter over a block, after it."""
    before, grown = server.metrics(), dict[str, float]()
    yield grown
    grown |= {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}


@pytest.mark.req("DIST-05")
def test_repeated_call_joins_the_one_whose_connection_ended(server: RunningServer) -> None:
    requests, config = [text_request()] * 64, SAMPLED | {"max_tokens": 400}
    with growth(server) as grown:
        cut = server.begin_infer(requests, config, request_id="cut")
        server.wait_for_sequences(lambda running: running > 0)
        cut.close()
        wait_until(lambda: server.metrics()["rollout_calls_in_flight"] == 0)
        repeated = server.begin_infer(requests, config, request_id="cut")
        assert len(json.loads(repeated.getresponse().read())) == 64
        repeated.close()
    assert grown["rollout_requests_total"] == 64
    assert grown["rollout_calls_total{outcome=gone}"] == 1
    assert grown["rollout_calls_total{outcome=repeated}"] == 1


@pytest.mark.req("WIRE-03", "DIST-05")
def test_call_for_other_weights_is_refused_and_a_kept_answer_is_not(
    server: RunningServer, tied: Path
) -> None:
    old = server.version
    expecting = {"expected_weights_version": old}
    kept = post(server, request_id="before the push", **expecting)
    assert kept.status_code == 200, kept.text
    with weight_group(server.http) as sender, growth(server) as grown:
        report = push(server.http, sender, read_weights(tied), old + 1)
    assert grown["rollout_weight_pushes_total"] == 1
    assert grown["rollout_weight_push_bytes_total"] == report["bytes"]
    assert grown["rollout_weights_version"] == 1

    refused = post(server, **expecting)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:rollmatch:other-weights")
    assert refused.json()["where"] == "expected_weights_version"
    assert post(server, expected_weights_version=old + 1).status_code == 200
    assert post(server, request_id="before the push", **expecting).content == kept.content


@pytest.mark.req("WIRE-06")
def test_metrics_count_answers(server: RunningServer, scene: Path) -> None:
    requests = [text_request(), image_request(str(scene))]
    with growth(server) as grown:
        envelopes = server.infer(requests, max_tokens=8)
    usages = [envelope["response"]["usage"] for envelope in envelopes]
    assert grown["rollout_calls_total{outcome=answered}"] == 1
    assert (grown["rollout_requests_total"], grown["rollout_images_total"]) == (2, 1)
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    assert grown["rollout_prompt_tokens_total"] == prompt_tokens
    assert grown["rollout_generated_tokens_total"] == 16
    assert grown["rollout_phase_seconds_count{phase=generate}"] == 1
    now = server.metrics()
    assert now["rollout_ready"] == now["rollout_replica_state{replica=0,state=serving}"] == 1
