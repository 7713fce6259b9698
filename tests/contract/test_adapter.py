"""Pushes of LoRA adapters into a real engine, against their merged weights (SYNC-01)."""

import copy
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from learner.rollout.sync.weights import AdapterWeights, SyncMode
from shared_contracts.errors import ContractError
from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
)

pytestmark = pytest.mark.slow

RANK, ALPHA, ROOM = 4, 12, 8
MAX_TOKENS = 16


def adapted(checkpoint: Path, seed: int, **config: Any) -> PeftModel:
    """A model under training whose adapter does something; peft starts it at zero."""
    base = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    given: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    model = get_peft_model(base, LoraConfig(**given | config))
    assert isinstance(model, PeftModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(model: PeftModel) -> SyncMode:
    """A refused adapter is a ContractError."""
    return SyncMode.of(model, "adapter", fallback_to_full=False)


@dataclass
class Adapting:
    """A server with room for adapters, and the answers of transformers to the same requests.

    scenes: images it may read. merged: a checkpoint for each model.
    """

    server: RunningServer
    folder: Path
    scenes: list[Path]
    merged: dict[PeftModel, Path] = field(default_factory=dict)

    def answers(self) -> list[list[int]]:
        """Answers to a prompt with no, one and two images, by one call."""
        one, two = (str(scene) for scene in self.scenes)
        both = text_request(f"<image><image>{PROMPT}") | {"images": [one, two]}
        requests = [text_request(), image_request(one), both]
        envelopes = self.server.infer(requests, max_tokens=MAX_TOKENS)
        return [response_ids(envelope) for envelope in envelopes]

    def expected(self, model: PeftModel | None) -> list[list[int]]:
        """Answers of transformers with the adapter merged. None: those of the checkpoint."""
        checkpoint = self.server.checkpoint if model is None else self._merged(model)
        return [
            reference.greedy_ids(checkpoint, PROMPT, self.scenes[:images], MAX_TOKENS)
            for images in range(3)
        ]

    def _merged(self, model: PeftModel) -> Path:
        folder = self.merged.setdefault(model, self.folder / f"merged-{len(self.merged)}")
        if not folder.exists():
            shutil.copytree(self.server.checkpoint, folder)
            merged: Any = copy.deepcopy(model).merge_and_unload()
            merged.save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def lora_server(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapting]:
    """Its tests run in order."""
    folder = tmp_path_factory.mktemp("adapters")
    options = ("--enable-lora", "--max-lora-rank", str(ROOM), "--max-num-seqs", "4")
    with running_server(tied, folder / "server", *options) as server:
        scenes = [draw_scene(server.media / f"{number}.png", number) for number in (1, 6)]
        yield Adapting(server, folder, scenes)


@pytest.mark.req("SYNC-01", "SYNC-05")
def test_an_adapter_answers_as_its_merged_weights_and_a_second_one_replaces_it(
    lora_server: Adapting,
) -> None:
    """The same prompts again and again, so that nothing cached may answer for other weights."""
    assert lora_server.server.info()["enable_lora"]
    answers = [lora_server.answers()]
    assert answers[0] == lora_server.expected(None)
    for seed, alpha in ((1, ALPHA), (2, 7)):
        model = adapted(lora_server.server.checkpoint, seed, lora_alpha=alpha)
        report = lora_server.server.push_by_learner(adapter_of(model))
        assert report.bytes == len(AdapterWeights(model).safetensors("float32"))
        answers.append(lora_server.answers())
        assert answers[-1] == lora_server.expected(model)
    for earlier, later in pairwise(answers):
        assert all(then != now for then, now in zip(earlier, later, strict=True))
    # Greedy, as vLLM samples several continuations: among one token.
    one_of_one = {"n": 3, "temperature": 1.0, "top_k": 1, "seed": 1, "max_tokens": MAX_TOKENS}
    (envelope,) = lora_server.server.infer([text_request()], **one_of_one)
    choices = envelope["response"]["choices"]
    assert [choice["token_ids"] for choice in choices] == [answers[-1][0]] * 3


@pytest.mark.req("SYNC-01", "SYNC-05", "WIRE-03")
def test_sequences_in_flight_keep_their_adapter(lora_server: Adapting) -> None:
    """Four are decoded at once, so that most wait inside the engine during the pushes."""
    models = [adapted(lora_server.server.checkpoint, seed) for seed in (4, 5, 6)]
    lora_server.server.push_by_learner(adapter_of(models[0]))
    version = lora_server.server.version
    with ThreadPoolExecutor() as threads:
        running = threads.submit(
            lora_server.server.infer, [text_request()] * 48, max_tokens=MAX_TOKENS
        )
        lora_server.server.wait_for_sequences(lambda number: number == 4)
        for model in models[1:]:
            lora_server.server.push_by_learner(adapter_of(model))
        assert not running.done()
        envelopes = running.result()
    for envelope in envelopes:
        assert envelope["coordexp"]["weights_version"] == [version, version]
        assert response_ids(envelope) == lora_server.expected(models[0])[0]
    assert lora_server.answers() == lora_server.expected(models[-1])


@pytest.mark.req("SYNC-01", "SYNC-02", "SYNC-05")
def test_adapter_sync_can_fall_back_to_full_sync(
    lora_server: Adapting, caplog: pytest.LogCaptureFixture
) -> None:
    """A DoRA adapter, which vLLM cannot serve: refused without the fallback. The last test."""
    model = adapted(lora_server.server.checkpoint, seed=10, use_dora=True)
    before = lora_server.server.version, lora_server.answers()
    with pytest.raises(ContractError, match="DoRA"):
        lora_server.server.push_by_learner(adapter_of(model))
    assert (lora_server.server.version, lora_server.answers()) == before

    mode = SyncMode.of(model, "adapter", fallback_to_full=True)
    with lora_server.server.pusher(mode) as pusher, caplog.at_level(logging.WARNING):
        for _ in range(2):
            pusher.push(lora_server.server.version + 1)
            assert lora_server.answers() == lora_server.expected(model)
    assert mode.adapter is None
    (warned,) = [record.getMessage() for record in caplog.records if "DoRA" in record.getMessage()]
    assert "full" in warned
    other = adapter_of(adapted(lora_server.server.checkpoint, seed=8))
    with pytest.raises(ContractError, match="full weights were pushed"):
        lora_server.server.push_by_learner(other)
