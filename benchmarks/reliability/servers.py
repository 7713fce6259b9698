"""A real server with the toy model, and what its answers are held against."""

from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.workload import engine_settings, infer_call, make_scenes
from learner.rollout.server_process import ServerProcess
from shared_contracts.repeat_guard import RepeatTerminateConfig

START_S = 1200.0
ANSWER_S = 300.0
# Connections without a call are closed by the server after five seconds.
SETTLE_S = 12.0
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=4, max_consecutive_token_repeats=4, ngram_size=2, ngram_repeats=5
)


def start_server(name: str, checkpoint: Path, folder: Path, **more: Any) -> ServerProcess:
    """more: settings beside those of every benchmark. It is not healthy yet."""
    settings = engine_settings(checkpoint).model_dump(mode="json", exclude_unset=True)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings | more), encoding="utf-8")
    return ServerProcess(["--config", str(config)], folder / f"{name}.log")


def greedy_tokens(base_url: str) -> list[list[int]]:
    """Answers to four prompts with an image and four without; the same with the same weights."""
    scenes = make_scenes(1, 4, with_image=True) + make_scenes(2, 4, with_image=False)
    body = infer_call(scenes, tokens=32)
    with httpx.Client(base_url=base_url, timeout=ANSWER_S, trust_env=False) as http:
        envelopes = http.post("/infer/", json=body).raise_for_status().json()
    return [envelope["response"]["choices"][0]["token_ids"] for envelope in envelopes]
