"""Repeat-aware termination in real engines: our server's and plain vLLM's (section 4)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    INJECTION,
    PROCESSOR,
    repeat_environment,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import (
    RepeatGuard,
    RepeatTerminateConfig,
    entry_token_ids,
)
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
    """A `--config` file that asks for the guard."""
    path = tmp_path_factory.mktemp("guard") / "server.yaml"
    path.write_text(yaml.safe_dump({"repeat_terminate": GUARD.model_dump()}))
    return path


@pytest.fixture(scope="module")
def guarded(
    tied: Path, settings_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The shared server's twin, with the guard."""
    folder = tmp_path_factory.mktemp("guarded")
    with running_server(tied, folder, "--config", str(settings_file)) as guarded:
        draw_scene(guarded.media / "scene.png")
        yield guarded


def requests(server: RunningServer) -> list[dict[str, Any]]:
    image = image_request(str(server.media / "scene.png"))
    return [*map(text_request, WORDS), image]


def choices(envelopes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every choice, with whether the envelope says that the guard ended it."""
    return [
        choice | {"ended": choice["index"] in envelope["coordexp"]["repeat_terminated_choices"]}
        for envelope in envelopes
        for choice in envelope["response"]["choices"]
    ]


DECODING = pytest.mark.parametrize(
    "decoding",
    [{}, {"temperature": 0.25, "n": 3, "seed": 5}, {"temperature": 1.0, "top_p": 0.9, "seed": 8}],
    ids=["greedy", "sampled-n-3", "sampled"],
)


@pytest.mark.req("REP-02", "REP-04", "REP-05")
@DECODING
def test_offending_sequence_is_terminated_without_batch_abort(
    server: RunningServer,
    guarded: RunningServer,
    tokenizer: Any,
    key: list[int],
    decoding: dict[str, Any],
) -> None:
    """A choice ends where the guard triggers, and all others are as they are without it.

    The guard replayed over the answers of a server without one tells where.
    """
    free = choices(server.infer(requests(server), max_tokens=TOKENS, **decoding))
    kept = choices(guarded.infer(requests(guarded), max_tokens=TOKENS, **decoding))
    ends = [trigger(GUARD, key, choice["token_ids"]) for choice in free]
    assert any(ends)
    assert not all(ends)
    sentinel = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert not any(sentinel in choice["token_ids"] for choice in free), "ask something else"
    for before, after, end in zip(free, kept, ends, strict=True):
        ended = end is not None and end < TOKENS
        ids = before["token_ids"][:end]
        assert after["ended"] is ended
        assert after["token_ids"] == ids
        assert after["finish_reason"] == ("stop" if ended else before["finish_reason"])
        assert after["message"]["content"] == tokenizer.decode(ids)


@pytest.mark.req("REP-05", "WIRE-02")
def test_the_envelope_names_the_choices_the_guard_ended(guarded: RunningServer) -> None:
    """With and without details; one that ended by itself is not among them."""
    asked = {"max_tokens": TOKENS, "temperature": 0.4, "n": 3, "seed": 5}
    stamps = [
        [envelope["coordexp"] for envelope in guarded.infer(requests(guarded), **asked, **details)]
        for details in ({}, {"return_details": False})
    ]
    ended = [[stamp["repeat_terminated_choices"] for stamp in each] for each in stamps]
    assert ended[0] == ended[1]
    assert {len(each) for each in ended[0]} >= {0, 1}
    for stamp in stamps[0]:
        assert stamp["repeat_terminate_triggered"] == bool(stamp["repeat_terminated_choices"])


@pytest.mark.req("REP-05")
def test_stop_strings_do_not_hide_the_signal(guarded: RunningServer) -> None:
    plain, stopping = (
        choices(guarded.infer(requests(guarded), max_tokens=TOKENS, stop=stop))
        for stop in ([], ["never written"])
    )
    assert any(choice["ended"] for choice in plain)
    assert stopping == plain


@pytest.mark.req("REP-05")
def test_a_choice_that_is_cut_before_it_could_be_ended_is_not_called_ended(
    guarded: RunningServer,
) -> None:
    """Its last token triggers the guard; there is no next one to be forced."""
    whole = choices(guarded.infer(requests(guarded), max_tokens=TOKENS))
    index, choice = next((i, choice) for i, choice in enumerate(whole) if choice["ended"])
    length = len(choice["token_ids"])
    (cut,) = choices(guarded.infer([requests(guarded)[index]], max_tokens=length))
    assert cut["token_ids"] == choice["token_ids"]
    assert (cut["finish_reason"], cut["ended"]) == ("length", False)


@pytest.mark.req("REP-06", "WIRE-06")
def test_info_says_what_is_guarded(server: RunningServer, guarded: RunningServer) -> None:
    on, off = (each.http.get("/info/").json()["repeat_terminate"] for each in (guarded, server))
    assert on == {"active": True, "config": GUARD.model_dump()}
    assert off == {"active": False, "config": RepeatTerminateConfig().model_dump()}


LINES = 5


@pytest.fixture(scope="module")
def endless_lines(tied: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that writes newlines: their large embedding, which is tied, outweighs others."""
    checkpoint = tmp_path_factory.mktemp("endless") / "checkpoint"
    shutil.copytree(tied, checkpoint)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    (embedding,) = (each for name, each in weights.items() if name.endswith("embed_tokens.weight"))
    embedding[tokenizer.encode("\n", add_special_tokens=False)] *= 50.0
    save_file(weights, file, {"format": "pt"})
    return checkpoint


@pytest.mark.req("FMT-01", "REP-02", "REP-06")
def test_an_answer_in_compact_is_ended_at_the_bound_of_lines(
    endless_lines: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """By a server that reads the format in `custom` of a training YAML."""
    guard: dict[str, Any] = {"enabled": True, "max_object_keys": LINES}
    run = {
        "custom": {"answer_format": "compact"},
        "rollout_matching": {"decode_batch_size": 8, "repeat_terminate": guard},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    with running_server(
        endless_lines, tmp_path, "--run-config", str(tmp_path / "run.yaml")
    ) as server:
        told = server.http.get("/info/").json()["repeat_terminate"]
        ended = choices(server.infer([text_request("cat"), text_request("a")], max_tokens=TOKENS))
        cut = choices(server.infer([text_request("cat")], max_tokens=LINES - 1))
    expected = RepeatTerminateConfig(**guard, answer_format="compact")
    assert told == {"active": True, "config": expected.model_dump()}
    for choice in ended:
        assert (choice["token_ids"], choice["ended"]) == (newline * LINES, True)
    for choice in cut:
        assert (choice["token_ids"], choice["ended"]) == (newline * (LINES - 1), False)


# --- a server that must not start


def assert_refuses_to_start(server: RunningServer, told: str) -> None:
    """It ends with code 2, has never been healthy, and says how the guard is activated."""
    try:
        with pytest.raises(ContractError, match="it ended with code 2"):
            server.process.wait_until_healthy(START_TIMEOUT_S)
    finally:
        stop_server(server)
    lines = server.process.log.read_text().splitlines()
    begin = lines.index("error: repeat_terminate")  # a process of the engine may say more after it
    found, do = lines[begin + 1 : begin + 3]
    assert told in found
    for name in (PROCESSOR, INJECTION, CONFIG_JSON):
        assert name in do


@pytest.mark.req("REP-06", "SRV-04")
def test_config_required_repeat_aware_processor_missing_fails_fast(
    tied: Path, settings_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine guards otherwise: something between it and the server changes its environment."""
    other = repeat_environment(GUARD.model_copy(update={"ngram_size": 9}))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        f"    os.environ.update({other!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    server = start_server(tied, tmp_path / "server", "--config", str(settings_file))
    assert_refuses_to_start(server, "'ngram_size': 9")


@pytest.mark.req("REP-06")
def test_a_model_without_an_id_for_the_sentinel_is_not_served(
    tied: Path, settings_file: Path, tmp_path: Path
) -> None:
    """Its one reserved token is part of its conversations."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tied, checkpoint)
    template = checkpoint / "chat_template.jinja"
    template.write_text("{#- <|video_pad|> -#}\n" + template.read_text())
    server = start_server(checkpoint, tmp_path / "server", "--config", str(settings_file))
    assert_refuses_to_start(server, "sentinel")


# --- plain vLLM


@pytest.fixture(scope="module")
def plain(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.contract.plain_vllm` generates under GUARD, given by the environment."""
    out = tmp_path_factory.mktemp("plain") / "runs.json"
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.plain_vllm", str(tied), str(out)],
        env=os.environ | variables | repeat_environment(GUARD),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs: dict[str, Any] = json.loads(out.read_text())
    return runs


@pytest.fixture(scope="module", params=["sync", "async"])
def run(plain: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    one: dict[str, Any] = plain[request.param]
    return one


@pytest.mark.req("REP-02", "REP-04")
def test_plain_vllm_forces_the_end_of_sequence_one_step_after_the_trigger(
    run: dict[str, Any], tokenizer: Any, key: list[int]
) -> None:
    """Guarded, unguarded and differently guarded sequences in one batch, n = 2, preempted."""
    assert run["preemptions"] >= 5
    ended = {"own": 0, "server": 0}
    for sequence in run["sequences"]:
        ids = sequence["token_ids"]
        end = trigger(config_of(sequence["own"]), key, ids)
        if end is not None and end < len(ids):
            assert ids[end:] == [tokenizer.eos_token_id]
            assert (sequence["finish"], sequence["stop"]) == ("stop", None)
            ended["server" if sequence["own"] is None else "own"] += 1
    assert min(ended.values()) > 0


def config_of(own: dict[str, Any] | bool | None) -> RepeatTerminateConfig:
    if own is None:
        return GUARD
    return RepeatTerminateConfig.model_validate(own or {})


@pytest.mark.req("REP-04")
def test_sequences_that_are_not_guarded_repeat_as_they_like(
    run: dict[str, Any], key: list[int]
) -> None:
    free = [s["token_ids"] for s in run["sequences"] if s["own"] is False]
    ends = [trigger(GUARD, key, ids) for ids in free]
    assert any(end is not None and end + 1 < len(ids) for end, ids in zip(ends, free, strict=True))
