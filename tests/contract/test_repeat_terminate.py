"""Repeat-aware termination in real engines: our server, plain vLLM, `swift rollout` (section 4)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoTokenizer

from benchmarks.processes import Peer
from learner.rollout.server_process import free_ports
from rollout_server.engines import vllm as vllm_room
from rollout_server.settings.repeat_config import CONFIG_JSON, PROCESSOR, repeat_environment
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids
from tests.contract.running_server import (
    START_TIMEOUT_S,
    RunningServer,
    draw_scene,
    image_request,
    running_server,
    start_server,
    stop_server,
    text_request,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUARD = RepeatTerminateConfig(
    enabled=True,
    min_new_tokens=4,
    max_consecutive_token_repeats=3,
    ngram_size=2,
    ngram_repeats=3,
    max_object_keys=4,
)
TOKENS = 96
WORDS = ("cat", "square", "red", "blue", "a", "7 8", "green red", "{", "the red square", "circle")


@pytest.fixture(scope="module")
def tokenizer(tied: Path) -> Any:
    return AutoTokenizer.from_pretrained(tied)


@pytest.fixture(scope="module")
def key(tokenizer: Any) -> list[int]:
    return entry_token_ids(partial(tokenizer.encode, add_special_tokens=False), "object_keys")


def trigger(config: RepeatTerminateConfig, key: list[int], ids: Sequence[int]) -> int | None:
    """How many of `ids` it takes until the guard triggers."""
    guard = RepeatGuard(config, key)
    return next((taken for taken, each in enumerate(ids, 1) if guard.push(each)), None)


# --- the server


@pytest.fixture(scope="module")
def settings_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guard") / "server.yaml"
    settings = {"repeat_terminate": GUARD.model_dump(), "openai": True}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def guarded(
    tied: Path, settings_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The shared server's twin, with the guard.

    Its model is an adapter over `tied`, which the server merges, without an effect of its own.
    """
    folder = tmp_path_factory.mktemp("guarded")
    base = AutoModelForImageTextToText.from_pretrained(tied, dtype=torch.float32)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"])
    get_peft_model(base, adapter).save_pretrained(str(folder / "adapter"))
    with running_server(
        folder / "adapter", folder / "server", "--config", str(settings_file)
    ) as guarded:
        draw_scene(guarded.media / "scene.png")
        yield guarded


def requests(server: RunningServer) -> list[dict[str, Any]]:
    image = image_request(str(server.media / "scene.png"))
    return [*map(text_request, WORDS), image]


def choices(envelopes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every choice; `ended`: whether the envelope names it as ended by the guard."""
    return [
        choice | {"ended": choice["index"] in envelope["coordexp"]["repeat_terminated_choices"]}
        for envelope in envelopes
        for choice in envelope["response"]["choices"]
    ]


@pytest.mark.req("REP-02", "REP-04", "REP-05")
@pytest.mark.parametrize(
    "decoding", [{}, {"temperature": 0.25, "n": 3, "seed": 5}], ids=["greedy", "sampled"]
)
def test_offending_sequence_is_terminated_without_batch_abort(
    server: RunningServer,
    guarded: RunningServer,
    tokenizer: Any,
    key: list[int],
    decoding: dict[str, Any],
) -> None:
    """A choice ends where the guard triggers; all others are as they are without it.

    Expected ends: the guard over the answers of the server without one.
    """
    free = choices(server.infer(requests(server), max_tokens=TOKENS, **decoding))
    kept = choices(guarded.infer(requests(guarded), max_tokens=TOKENS, **decoding))
    ends = [trigger(GUARD, key, choice["token_ids"]) for choice in free]
    assert any(ends)
    assert not all(ends)
    sentinel = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert not any(sentinel in choice["token_ids"] for choice in free), "choose other prompts"
    for before, after, end in zip(free, kept, ends, strict=True):
        ended = end is not None and end < TOKENS
        ids = before["token_ids"][:end]
        assert after["ended"] is ended
        assert after["token_ids"] == ids
        assert after["finish_reason"] == ("stop" if ended else before["finish_reason"])
        assert after["message"]["content"] == tokenizer.decode(ids)


@pytest.mark.req("REP-05", "REP-06", "WIRE-02", "WIRE-06")
def test_the_envelope_names_the_choices_that_the_guard_ended(
    server: RunningServer, guarded: RunningServer
) -> None:
    """It names them with and without details, and beside stop strings."""
    on, off = (each.info()["repeat_terminate"] for each in (guarded, server))
    assert on == {"active": True, "config": GUARD.model_dump()}
    assert off == {"active": False, "config": RepeatTerminateConfig().model_dump()}
    decoding = {"max_tokens": TOKENS, "temperature": 0.4, "n": 3, "seed": 5}
    stamps = [
        [each["coordexp"] for each in guarded.infer(requests(guarded), **decoding, **more)]
        for more in ({}, {"return_details": False}, {"stop": ["never written"]})
    ]
    ended = [[stamp["repeat_terminated_choices"] for stamp in each] for each in stamps]
    assert ended == [ended[0]] * 3
    assert {len(each) for each in ended[0]} >= {0, 1}
    for stamp in stamps[0]:
        assert stamp["repeat_terminate_triggered"] == bool(stamp["repeat_terminated_choices"])


@pytest.mark.usefixtures("server")  # so in the same process, which has started `guarded`
@pytest.mark.req("REP-05")
def test_a_choice_that_ends_by_its_length_is_not_named_as_ended_by_the_guard(
    guarded: RunningServer,
) -> None:
    """Its last token triggers the guard, but no next token can be forced."""
    whole = choices(guarded.infer(requests(guarded), max_tokens=TOKENS))
    index, choice = next((i, choice) for i, choice in enumerate(whole) if choice["ended"])
    length = len(choice["token_ids"])
    (cut,) = choices(guarded.infer([requests(guarded)[index]], max_tokens=length))
    assert cut["token_ids"] == choice["token_ids"]
    assert (cut["finish_reason"], cut["ended"]) == ("length", False)


@pytest.mark.usefixtures("server")
@pytest.mark.req("OAI-01", "REP-05")
def test_a_chat_completion_ends_as_the_call_that_the_guard_ends(guarded: RunningServer) -> None:
    """The sentinel of the guard has no text."""
    whole = choices(guarded.infer(requests(guarded), max_tokens=TOKENS))
    index, choice = next((i, choice) for i, choice in enumerate(whole) if choice["ended"])
    body = {
        "model": str(guarded.checkpoint),
        "messages": requests(guarded)[index]["messages"],
        "temperature": 0.0,
        "max_tokens": TOKENS,
    }
    (chat,) = guarded.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert chat["finish_reason"] == "stop"
    assert chat["message"]["content"] == choice["message"]["content"]


@pytest.mark.req("REP-06", "SRV-04")
def test_config_required_repeat_aware_processor_missing_fails_fast(
    tied: Path, settings_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's environment has other settings than the server, which is never healthy."""
    other = repeat_environment(GUARD.model_copy(update={"ngram_size": 9}))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        f"    os.environ.update({other!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    server = start_server(tied, tmp_path / "server", "--config", str(settings_file))
    try:
        with pytest.raises(ContractError, match="it ended with code 2"):
            server.process.wait_until_healthy(START_TIMEOUT_S)
    finally:
        stop_server(server)
    lines = server.process.log.read_text().splitlines()
    begin = lines.index("error: repeat_terminate")  # an engine may log more after it
    found, do = lines[begin + 1 : begin + 3]
    assert "'ngram_size': 9" in found
    for name in (PROCESSOR, "VLLM_USE_V2_MODEL_RUNNER=0", CONFIG_JSON):
        assert name in do


# --- other programs, with the settings in the environment

OFFLINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
# Sequences are long enough for the KV cache to be too small for all of them.
LONGER = GUARD.model_copy(update={"min_new_tokens": 48})


def assert_forced(
    token_ids: list[int], config: RepeatTerminateConfig, key: list[int], eos: int
) -> bool:
    """Whether the guard ended the sequence: then it has one more id, the end of the sequence."""
    end = trigger(config, key, token_ids)
    if end is None or end == len(token_ids):
        return False
    assert token_ids[end:] == [eos]
    return True


@pytest.fixture(scope="module")
def plain(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of `tests.contract.plain_vllm`."""
    out = tmp_path_factory.mktemp("plain") / "runs.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.plain_vllm", str(tied), str(out)],
        env=os.environ | OFFLINE | repeat_environment(LONGER),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs: dict[str, Any] = json.loads(out.read_text())
    return runs


@pytest.mark.nightly  # vLLM is pinned, and test_repeat_processor.py has its batches
@pytest.mark.req("REP-02", "REP-04")
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_plain_vllm_forces_the_end_of_sequence_one_step_after_the_trigger(
    plain: dict[str, Any], tokenizer: Any, key: list[int], scheduling: str
) -> None:
    """Greedy and sampled sequences in one batch, n = 2, chunked prompts, preempted."""
    run = plain[scheduling]
    assert run["preemptions"] >= 5
    eos = tokenizer.eos_token_id
    ended = [assert_forced(token_ids, LONGER, key, eos) for token_ids in run["sequences"]]
    assert any(ended)
    assert not all(ended)


@pytest.mark.nightly  # ms-swift and vLLM are pinned
@pytest.mark.req("REP-04")
def test_swift_rollout_ends_sequences_with_the_plug_in(
    tied: Path, tmp_path: Path, tokenizer: Any, key: list[int]
) -> None:
    """ms-swift's own server and loader. Only its check for a GPU is left out."""
    (port,) = map(str, free_ports(1))
    plugin = Path(vllm_room.__path__[0]) / "swift_plugin.py"
    arguments = [str(tied), port, "--external_plugins", str(plugin)]
    variables = OFFLINE | {CONFIG_JSON: GUARD.model_dump_json()}
    log, url = tmp_path / "swift.log", f"http://127.0.0.1:{port}"
    with Peer("benchmarks.peers.swift_rollout", arguments, log, variables) as peer:
        peer.wait_until_healthy(f"{url}/health/")
        config = {"max_tokens": TOKENS, "temperature": 0.0, "return_details": True}
        call = {"infer_requests": [*map(text_request, WORDS)], "request_config": config}
        answers = httpx.post(f"{url}/infer/", json=call, timeout=START_TIMEOUT_S).json()
    eos = tokenizer.eos_token_id
    found = [answer["response"]["choices"][0]["token_ids"] for answer in answers]
    assert any(assert_forced(token_ids, GUARD, key, eos) for token_ids in found)
    assert all(trigger(GUARD, key, ids) in (None, len(ids), len(ids) - 1) for ids in found)
