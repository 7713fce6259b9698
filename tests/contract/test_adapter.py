"""Pushes of LoRA adapters into a real engine, against their merged weights (SYNC-01)."""

import copy
import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3VLForConditionalGeneration

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import (
    AdapterWeights,
    MergedWeights,
    OneSource,
    SourceChoice,
    SyncMode,
)
from shared_contracts.errors import ContractError, ProblemError
from shared_contracts.weights import (
    AdapterMeta,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
)
from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    START_TIMEOUT_S,
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
)
from tests.unit.push_worker import wait_until

pytestmark = pytest.mark.slow

RANK, ALPHA, ROOM = 4, 12, 8
MAX_TOKENS = 16


def adapted(checkpoint: Path, seed: int, **config: Any) -> PeftModel:
    """A model under training whose adapter does something; peft starts it at zero."""
    base = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    given: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    model = get_peft_model(base, LoraConfig(**given | config))
    assert isinstance(model, PeftModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(model: PeftModel) -> OneSource:
    return OneSource(AdapterWeights(model))


@dataclass
class Adapting:
    """A server with room for adapters, and the answers of transformers to the same requests.

    scenes: images it may read. merged: a checkpoint for each model.
    """

    server: RunningServer
    client: RolloutClient
    port: int
    folder: Path
    scenes: list[Path]
    merged: dict[PeftModel, Path] = field(default_factory=dict)

    def pusher(self, choice: SourceChoice) -> WeightPusher:
        return WeightPusher(self.client, self.port, choice, "gloo", 2**16, "full")

    def push(self, choice: SourceChoice) -> SyncReport:
        pusher = self.pusher(choice)
        try:
            return pusher.push(self.version + 1)
        finally:
            pusher.close()

    @property
    def version(self) -> int:
        return self.client.info().weights_version

    def answers(self) -> list[list[int]]:
        """To a prompt, the same with an image, and with two; all in one call."""
        one, two = (str(scene) for scene in self.scenes)
        both = text_request(f"<image><image>{PROMPT}") | {"images": [one, two]}
        requests = [text_request(), image_request(one), both]
        envelopes = self.server.infer(requests, max_tokens=MAX_TOKENS)
        return [response_ids(envelope) for envelope in envelopes]

    def expected(self, model: PeftModel | None) -> list[list[int]]:
        """Of a model with its adapter merged; None: of the checkpoint."""
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

    def rebuild(self) -> None:
        """Kill the engine; built again, it has the checkpoint's weights."""
        restarts = self.client.info().replicas[0].restarts
        os.kill(self.server.processes()["engine 0"], signal.SIGKILL)
        wait_until(lambda: self.client.info().replicas[0].restarts > restarts, START_TIMEOUT_S)


@pytest.fixture(scope="module")
def lora_server(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapting]:
    folder = tmp_path_factory.mktemp("adapters")
    (port,) = free_ports(1)
    options = ("--enable-lora", "--max-lora-rank", str(ROOM), "--max-num-seqs", "4")
    with (
        running_server(tied, folder / "server", *options) as server,
        RolloutClient(server.process.base_url, timeout_s=30) as client,
    ):
        scenes = [draw_scene(server.media / f"{number}.png", number) for number in (1, 6)]
        yield Adapting(server, client, port, folder, scenes)


@pytest.fixture
def adapting(lora_server: Adapting) -> Adapting:
    """The engine has the checkpoint's weights and an adapter that changes nothing."""
    idle = adapted(lora_server.server.checkpoint, seed=0)
    with torch.no_grad():
        for name, parameter in idle.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    try:
        lora_server.push(adapter_of(idle))
    except WeightSyncError:
        lora_server.rebuild()
        lora_server.push(adapter_of(idle))
    return lora_server


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_an_adapter_answers_as_its_merged_weights_and_a_second_one_replaces_it(
    adapting: Adapting,
) -> None:
    """The same prompts again and again, so that nothing cached may answer for other weights."""
    assert adapting.client.info().enable_lora
    answers = [adapting.answers()]
    assert answers[0] == adapting.expected(None)
    for seed, alpha in ((1, ALPHA), (2, 7)):
        model = adapted(adapting.server.checkpoint, seed, lora_alpha=alpha)
        report = adapting.push(adapter_of(model))
        assert report.verified == len(AdapterWeights(model).metadata("float32"))
        assert report.bytes == sum(t.nbytes for _, t in AdapterWeights(model).tensors("float32"))
        answers.append(adapting.answers())
        assert answers[-1] == adapting.expected(model)
    for earlier, later in pairwise(answers):
        assert all(then != now for then, now in zip(earlier, later, strict=True))
    # Greedy, as vLLM samples several continuations: among one token.
    one_of_one = {"n": 3, "temperature": 1.0, "top_k": 1, "seed": 1, "max_tokens": MAX_TOKENS}
    (envelope,) = adapting.server.infer([text_request()], **one_of_one)
    choices = envelope["response"]["choices"]
    assert [choice["token_ids"] for choice in choices] == [answers[-1][0]] * 3


@pytest.mark.req("SYNC-01", "SYNC-05")
def test_a_sequence_that_waits_in_the_engine_during_a_push_has_the_new_adapter(
    adapting: Adapting,
) -> None:
    """Four are decoded at once, so that most wait inside the engine when the push begins."""
    old, new = (adapted(adapting.server.checkpoint, seed) for seed in (4, 5))
    adapting.push(adapter_of(old))
    version = adapting.version
    expected = {version: adapting.expected(old)[0], version + 1: adapting.expected(new)[0]}
    with ThreadPoolExecutor() as threads:
        running = threads.submit(
            adapting.server.infer, [text_request()] * 48, max_tokens=MAX_TOKENS
        )
        adapting.server.wait_for_sequences(lambda number: number == 4)
        adapting.push(adapter_of(new))
        envelopes = running.result()
    seen = set()
    for envelope in envelopes:
        first, last = envelope["coordexp"]["weights_version"]
        assert first == last
        assert response_ids(envelope) == expected[first]
        seen.add(first)
    assert seen == expected.keys()


# --- what cannot be served


@pytest.mark.req("SYNC-01", "SYNC-05")
def test_an_adapter_that_cannot_be_served_is_refused_and_changes_nothing(
    adapting: Adapting,
) -> None:
    model = adapted(adapting.server.checkpoint, seed=6)
    adapting.push(adapter_of(model))
    version, before = adapting.version, adapting.answers()
    meta, parameters = AdapterWeights(model).adapter, AdapterWeights(model).metadata("float32")
    stranger = ParameterMeta(
        name="base_model.model.model.layers.0.q_proj.lora_A.weight", dtype="float32", shape=[4, 8]
    )
    saved = ParameterMeta(name="base_model.model.lm_head.weight", dtype="float32", shape=[4, 8])
    wide = parameters[0].model_copy(update={"shape": [RANK, 7]})
    bad: list[tuple[AdapterMeta, list[ParameterMeta], str]] = [
        (meta.model_copy(update={"r": 16}), parameters, "rank 16 is greater than"),
        (meta.model_copy(update={"use_dora": True}), parameters, "DoRA"),
        (meta, [*parameters, stranger], "no LoRA layer there"),
        (meta, [*parameters, saved], "no A or B"),
        (meta, parameters[1:], "not one A and one B"),
        (meta, [*parameters, parameters[0]], "not one A and one B"),
        (meta, [wide, *parameters[1:]], f"not [{RANK}, "),
        (meta.model_copy(update={"r": 2}), parameters, "not [2, "),
    ]
    pusher = adapting.pusher(adapter_of(model))
    pusher.connect()
    for adapter, listed, reason in bad:
        body = StartWeightUpdate(
            version=version + 1, parameters=listed, adapter=adapter, attempt=None
        )
        with pytest.raises(ProblemError) as caught:
            adapting.client.start_weight_update(body)
        problem = caught.value.problem
        assert (problem.status, problem.kind) == (422, "adapter-refused")
        assert reason in problem.detail
        health = adapting.client.health()
        assert (health.state, health.weights_version) == ("READY", version)
    assert adapting.answers() == before
    pusher.close()


# Read back through a packed layer that holds two others, too.
CHANGED = "model.language_model.layers.1.self_attn.k_proj.weight"


@pytest.mark.req("SYNC-01", "SYNC-05", "SYNC-06")
def test_an_adapter_of_another_base_is_refused_and_full_weights_come_instead(
    adapting: Adapting,
) -> None:
    """One frozen weight differs."""
    old, strange = (adapted(adapting.server.checkpoint, seed) for seed in (11, 12))
    adapting.push(adapter_of(old))
    version, before = adapting.version, adapting.answers()
    assert before == adapting.expected(old)
    with torch.no_grad():
        dict(AdapterWeights(strange).base.tensors("float32"))[CHANGED].neg_()
    named = f"not the learner's base: {re.escape(CHANGED)}: replica 0: .* is held .1 fault"
    with pytest.raises(WeightSyncError, match=named) as caught:
        adapting.push(adapter_of(strange))
    assert caught.value.phase == "start"
    health = adapting.client.health()
    assert (health.state, health.weights_version) == ("READY", version)
    assert adapting.answers() == before

    mode = SyncMode.of(strange, "adapter", fallback_to_full=True)
    adapting.push(mode)
    assert mode.mode == "full"
    assert CHANGED in str(mode.fallback)
    assert adapting.answers() == adapting.expected(strange)


# --- full weights


@pytest.mark.req("SYNC-01", "SYNC-05")
def test_no_adapter_follows_full_weights_until_a_restart(lora_server: Adapting) -> None:
    first, second = (adapted(lora_server.server.checkpoint, seed) for seed in (8, 9))
    lora_server.push(OneSource(MergedWeights(second)))
    with pytest.raises(WeightSyncError, match="full weights were pushed"):
        lora_server.push(adapter_of(first))
    assert lora_server.answers() == lora_server.expected(second)

    mode = SyncMode.of(first, "adapter", fallback_to_full=True)
    lora_server.push(mode)
    assert mode.mode == "full"
    assert "full weights were pushed" in str(mode.fallback)
    assert lora_server.answers() == lora_server.expected(first)

    lora_server.rebuild()
    lora_server.push(adapter_of(second))
    assert lora_server.answers() == lora_server.expected(second)


@pytest.mark.req("SYNC-01", "SYNC-02")
def test_adapter_sync_can_fall_back_to_full_sync(
    lora_server: Adapting, caplog: pytest.LogCaptureFixture
) -> None:
    """A DoRA adapter, which vLLM cannot serve. Without the fallback the push is an error."""
    model = adapted(lora_server.server.checkpoint, seed=10, use_dora=True)
    version, before = lora_server.version, lora_server.answers()
    with pytest.raises(ContractError, match="DoRA"):
        lora_server.push(SyncMode.of(model, "adapter", fallback_to_full=False))
    assert (lora_server.version, lora_server.answers()) == (version, before)

    mode = SyncMode.of(model, "adapter", fallback_to_full=True)
    pusher = lora_server.pusher(mode)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pusher.push(lora_server.version + 1)
            assert lora_server.answers() == lora_server.expected(model)
    pusher.close()
    assert mode.mode == "full"
    assert "DoRA" in str(mode.fallback)
    (warned,) = [record.getMessage() for record in caplog.records if "DoRA" in record.getMessage()]
    assert "full" in warned
