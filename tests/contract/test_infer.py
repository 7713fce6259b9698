"""`POST /infer/` of a real server, held against plain transformers."""

import base64
import importlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    cpu_seconds,
    draw_scene,
    image_request,
    response_ids,
    text_request,
)


@pytest.mark.req("WIRE-02", "SRV-02")
def test_greedy_text_equals_transformers(server: RunningServer) -> None:
    (envelope,) = server.infer([text_request()], max_tokens=24)
    response = envelope["response"]
    assert response["prompt_token_ids"] == reference.prompt_ids(server.checkpoint, PROMPT, [])
    expected = reference.greedy_ids(server.checkpoint, PROMPT, [], 24)
    assert response_ids(envelope) == expected
    content = response["choices"][0]["message"]["content"]
    assert content == reference.decode(server.checkpoint, expected)


@pytest.mark.req("WIRE-02", "SRV-02")
def test_greedy_answer_to_an_image_equals_transformers(server: RunningServer, scene: Path) -> None:
    (envelope,) = server.infer([image_request(str(scene))], max_tokens=24)
    expected_prompt = reference.prompt_ids(server.checkpoint, PROMPT, [scene])
    assert envelope["response"]["prompt_token_ids"] == expected_prompt
    expected = reference.greedy_ids(server.checkpoint, PROMPT, [scene], 24)
    assert response_ids(envelope) == expected


@pytest.mark.req("WIRE-01")
def test_every_way_to_give_an_image_is_the_same_image(server: RunningServer, scene: Path) -> None:
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
        {"messages": [{"role": "user", "content": [listed, text]}], "images": str(scene)},
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


@pytest.mark.req("SRV-01", "SEED-01")
def test_request_i_is_sampled_with_seed_plus_i(server: RunningServer) -> None:
    together = server.infer([text_request()] * 5, temperature=1.0, seed=40)
    alone = [server.infer([text_request()], temperature=1.0, seed=40 + i)[0] for i in range(5)]
    assert [response_ids(e) for e in together] == [response_ids(e) for e in alone]
    assert [e["coordexp"]["seed"] for e in together] == [40, 41, 42, 43, 44]
    assert len({tuple(response_ids(e)) for e in together}) == 5


@pytest.mark.req("WIRE-02")
def test_answers_come_in_the_order_of_the_requests(server: RunningServer) -> None:
    requests = [text_request(f"{PROMPT} {'again ' * i}") for i in range(40, 0, -1)]
    envelopes = server.infer(requests, max_tokens=4)
    lengths = [len(e["response"]["prompt_token_ids"]) for e in envelopes]
    assert len(set(lengths)) == 40
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.req("WIRE-02")
def test_without_details_there_are_no_ids(server: RunningServer) -> None:
    (envelope,) = server.infer([text_request()], return_details=False)
    response = envelope["response"]
    assert response["prompt_token_ids"] is None
    assert response["choices"][0]["token_ids"] is None
    assert response["choices"][0]["message"]["content"]
    assert response["choices"][0]["finish_reason"] == "length"
    usage = response["usage"]
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16


@pytest.mark.req("WIRE-02")
def test_ids_end_before_the_stop_token(server: RunningServer) -> None:
    """Hot sampling, so that some sequences end by themselves."""
    envelopes = server.infer([text_request()] * 48, temperature=2.0, seed=0, max_tokens=300)
    ended = [e for e in envelopes if e["response"]["choices"][0]["finish_reason"] == "stop"]
    cut = [e for e in envelopes if e["response"]["choices"][0]["finish_reason"] == "length"]
    assert ended
    assert cut
    for envelope in ended:
        text = envelope["response"]["choices"][0]["message"]["content"]
        assert len(response_ids(envelope)) < 300
        assert text == reference.decode(server.checkpoint, response_ids(envelope))
        assert not text.endswith("<|im_end|>")
        assert envelope["coordexp"]["finish"] == "stop"
    assert all(len(response_ids(envelope)) == 300 for envelope in cut)


@pytest.mark.req("WIRE-01")
def test_a_stop_string_ends_the_text_before_it(server: RunningServer) -> None:
    (free,) = server.infer([text_request()], max_tokens=16)
    text = free["response"]["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:6]
    (stopped,) = server.infer([text_request()], max_tokens=16, stop=[stop])
    choice = stopped["response"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[: text.index(stop)]


@pytest.mark.req("WIRE-01")
def test_n_gives_as_many_choices(server: RunningServer) -> None:
    (envelope,) = server.infer([text_request()], n=3, temperature=1.0, seed=7)
    choices = envelope["response"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert envelope["response"]["usage"]["completion_tokens"] == 48


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
    asked = {"logprobs": True, "max_tokens": 24} | decoding
    (envelope,) = server.infer([image_request(str(scene))], **asked)
    for choice in envelope["response"]["choices"]:
        ids, found = choice["token_ids"], chosen_logprobs(choice)
        assert len(found) == len(ids)
        expected = reference.logprobs(server.checkpoint, PROMPT, [scene], ids)
        assert found == pytest.approx(expected, abs=1e-4)
        assert max(found) <= 0.0


@pytest.mark.req("LOGP-01")
def test_logprobs_end_with_the_ids(server: RunningServer) -> None:
    """Hot sampling, so that some sequences end by themselves; their stop token has none."""
    asked = {"temperature": 2.0, "seed": 0, "max_tokens": 300, "logprobs": True}
    choices = [
        envelope["response"]["choices"][0]
        for envelope in server.infer([text_request()] * 16, **asked)
    ]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    for choice in choices:
        assert len(chosen_logprobs(choice)) == len(choice["token_ids"])


@pytest.mark.req("LOGP-01")
def test_without_a_request_for_them_there_are_no_logprobs(server: RunningServer) -> None:
    (envelope,) = server.infer([text_request()])
    assert envelope["response"]["choices"][0]["logprobs"] is None


@pytest.mark.req("WIRE-01")
@pytest.mark.parametrize("max_tokens", [None, 100_000])
def test_an_answer_ends_with_the_context(server: RunningServer, max_tokens: int | None) -> None:
    (envelope,) = server.infer([text_request()], max_tokens=max_tokens)
    prompt = envelope["response"]["prompt_token_ids"]
    finish = envelope["response"]["choices"][0]["finish_reason"]
    if finish == "length":
        assert len(prompt) + len(response_ids(envelope)) == 512
    else:
        assert len(prompt) + len(response_ids(envelope)) < 512


@pytest.mark.req("WIRE-03")
def test_the_envelope_is_stamped(server: RunningServer) -> None:
    health = server.http.get("/health/").json()
    (envelope,) = server.infer([text_request()])
    version = health["weights_version"]
    assert envelope["coordexp"] == {
        "repeat_terminate_triggered": 0,
        "repeat_terminated_choices": [],
        "weights_version": [version, version],
        "server_epoch": health["server_epoch"],
        "seed": None,
        "finish": "length",
    }


def test_no_requests_no_answers(server: RunningServer) -> None:
    assert server.infer([]) == []


@pytest.mark.req("WIRE-02")
def test_the_client_of_ms_swift_reads_both_forms(
    server: RunningServer, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class as installed; only its look for a distribution named `vllm` is answered."""
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

    body = {"infer_requests": [image_request(str(scene))], "request_config": None}
    (bare,) = server.http.post("/infer/?envelope=0", json=body).json()
    assert protocol.ChatCompletionResponse(**bare).choices[0]["message"]["role"] == "assistant"


# --- refusals


@pytest.mark.req("WIRE-05")
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|vision_start|>"])
def test_a_control_token_in_a_text_is_refused(
    server: RunningServer, scene: Path, token: str
) -> None:
    """It would be encoded as the token, and move the image or end the turn."""
    bad = image_request(str(scene))
    bad["messages"][0]["content"] = f"<image>What is {token} here?"
    answer = server.post_infer([bad])
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["where"], token in error["detail"]) == ("infer_requests[0].messages", True)


@pytest.mark.req("WIRE-05")
def test_a_call_with_bad_requests_is_refused_whole_naming_each(
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
    details = [error["detail"] for error in problem["errors"]]
    assert "cannot be read" in details[0]
    assert "512" in details[1]
    assert "0 given" in details[2]
    assert "--allowed-media-dir" in details[3]


@pytest.mark.req("WIRE-05")
def test_the_longest_prompt_that_fits_is_served(server: RunningServer) -> None:
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
def test_sampling_parameters_that_do_not_go_together_are_refused(server: RunningServer) -> None:
    for config in ({"n": 2, "temperature": 0.0}, {"temperature": 3.0}):
        answer = server.post_infer([text_request()], **config)
        assert answer.status_code == 422
        assert answer.json()["where"] == "request_config"


@pytest.mark.req("WIRE-05")
def test_odd_input_is_answered_or_refused_and_never_breaks_the_server(
    server: RunningServer,
) -> None:
    """Bytes as they come over the wire: what JSON allows and text does not, odd images."""
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


# --- the batch and the event loop


@pytest.mark.req("SRV-02")
def test_calls_share_a_batch_and_the_loop_stays_free(server: RunningServer) -> None:
    """A short call overtakes a long one, and probes answer meanwhile."""
    with ThreadPoolExecutor() as threads:
        long = threads.submit(
            server.infer, [text_request()] * 16, temperature=1.0, seed=1, max_tokens=300
        )
        time.sleep(0.3)
        server.infer([text_request()], max_tokens=2)
        assert not long.done()
        probes = 0
        while not long.done():
            assert server.http.get("/live/").status_code == 200
            probes += 1
        assert len(long.result()) == 16
    assert probes > 5


@pytest.mark.req("SRV-07")
def test_a_client_that_goes_away_has_its_sequences_aborted(server: RunningServer) -> None:
    engine = server.processes()["engine 0"]
    body = {
        "infer_requests": [text_request()] * 64,
        "request_config": {"temperature": 1.0, "seed": 3, "max_tokens": 480},
    }  # up to 30,000 tokens: many seconds
    with ThreadPoolExecutor() as threads:
        call = threads.submit(server.http.post, "/infer/", json=body, timeout=2.0)
        server.wait_for_sequences(lambda running: running == 64)
        with pytest.raises(httpx.ReadTimeout):
            call.result()
    server.wait_for_sequences(lambda running: running == 0)
    before = cpu_seconds(engine)
    time.sleep(0.5)
    assert cpu_seconds(engine) - before < 0.1


def test_an_idle_server_leaves_the_cores_alone(server: RunningServer) -> None:
    server.infer([text_request()])
    pids = server.processes().values()
    before = sum(map(cpu_seconds, pids))
    time.sleep(4.0)
    assert sum(map(cpu_seconds, pids)) - before < 0.2


@pytest.mark.req("WIRE-06")
def test_the_probes_of_a_ready_server(server: RunningServer) -> None:
    health = server.http.get("/health").json()
    assert (health["status"], health["state"]) == ("ok", "READY")
    (replica,) = health["replicas"]
    assert (replica["index"], replica["state"], replica["restarts"]) == (0, "serving", 0)
    assert 0 <= replica["heartbeat_age_s"] < 10
    live = server.http.get("/live").json()
    assert live["server_epoch"] == health["server_epoch"]
    (age,) = live["heartbeat_age_s"]
    assert 0 <= age < 10
    time.sleep(2.5)
    (later,) = server.http.get("/live").json()["heartbeat_age_s"]
    assert later < age + 2.0, "no heartbeat came in between"


def test_the_pool_survives_many_calls_at_once(server: RunningServer) -> None:
    answers: list[int] = []

    def call(seed: int) -> None:
        answers.append(len(server.infer([text_request()] * 4, seed=seed, temperature=1.0)))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [4] * 16


@pytest.mark.req("WIRE-04", "ROLL-01")
def test_an_image_of_16_bits_is_answered_as_that_of_8_bits(server: RunningServer) -> None:
    """An image of floats is refused with the index of its request."""
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    images = {
        "8.png": Image.fromarray((grey >> 8).astype(np.uint8)),
        "16.tiff": Image.fromarray(grey),
        "float.tiff": Image.fromarray(grey.astype(np.float32)),
    }
    for name, image in images.items():
        image.save(server.media / name)
    requests = {name: image_request(str(server.media / name)) for name in images}
    eight, sixteen = server.infer([requests["8.png"], requests["16.tiff"]], max_tokens=24)
    assert sixteen["response"]["prompt_token_ids"] == eight["response"]["prompt_token_ids"]
    assert response_ids(sixteen) == response_ids(eight)
    refused = server.post_infer([requests["8.png"], requests["float.tiff"]])
    assert refused.status_code == 422, refused.text
    assert refused.json()["where"] == "infer_requests[1].images[0]"
    assert "floating-point numbers (mode F)" in refused.text
