"""A server that was pushed to answers as an engine that loaded the same weights (SYNC-06).

Every case starts one server. Its engines load `new`, then are killed and built again with `old`
from the same folder, then get `new` by a push.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from learner.data.toy import make_data
from learner.models.toy import ToyFamily
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.stages.clean_prefix import common_length
from learner.training.input_checks import check_inputs
from learner.training.server_checks import reach_servers
from learner.training.train import train
from shared_contracts.weights import Transport
from tests.contract.running_server import (
    RunningServer,
    by_servers,
    children,
    draw_scene,
    environment_of,
    image_request,
    response_ids,
    running_server,
    text_request,
    wait_until_gone,
)
from tests.contract.test_adapter import adapted, adapter_of
from tests.contract.toy_checkpoints import WEIGHTS, make_checkpoint
from tests.unit.fleets import wait_until
from tests.unit.small_run import metric_lines, small_config

STEPS = 2

pytestmark = pytest.mark.slow

Answers = list[list[int]]


@dataclass(frozen=True)
class Case:
    family: ToyFamily
    tie: bool
    transport: Transport
    options: tuple[str, ...] = ()


# What vLLM's CPU build needs for linear attention.
LINEAR = ("--dtype", "bfloat16", "--no-prefix-caching")
# A tied Qwen3-VL in float32 is that of the shared server (test_weight_push.py), an untied one that
# of test_replicas.py.
TRAINED = {
    "two replicas of qwen2_5_vl": Case(
        "qwen2_5_vl", True, "gloo", ("--replicas", "2", "--enable-lora", "--max-lora-rank", "8")
    ),
    "qwen3_vl_moe": Case("qwen3_vl_moe", False, "gloo"),
}
CASES = TRAINED | {
    "tensor parallel": Case(
        "qwen3_vl_moe", True, "ipc", ("--dtype", "bfloat16", "--tensor-parallel-size", "2")
    ),
    "qwen3_5": Case("qwen3_5", True, "gloo", (*LINEAR, "--enable-lora", "--max-lora-rank", "8")),
    "qwen3_5_moe": Case("qwen3_5_moe", False, "gloo", LINEAR),
    "untied qwen2_5_vl": Case("qwen2_5_vl", False, "ipc"),
    "bfloat16": Case("qwen3_vl", True, "gloo", ("--dtype", "bfloat16")),
}
# Their layers are among those of the others.
LATER = {
    name: pytest.param(name, marks=pytest.mark.nightly)
    for name in ("qwen3_5", "untied qwen2_5_vl", "bfloat16")
}


@dataclass(frozen=True)
class Pushed:
    """A server, and its answers with the weights `new`, `old`, and `new` again.

    adapted: with an adapter over `old`, and with its merged weights.
    """

    server: RunningServer
    transport: Transport
    bfloat16: bool
    loaded: Answers
    before: Answers
    pushed: Answers
    adapted: list[Answers]


def checkpoint(folder: Path, case: Case, seed: int) -> Path:
    """A toy whose norms and biases are random, too; it can be split in two."""
    make_checkpoint(folder, seed, case.tie, case.family)
    weights, draw = load_file(folder / WEIGHTS), torch.Generator().manual_seed(seed)
    for weight in weights.values():
        if weight.ndim == 1:
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_heads"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(server: RunningServer) -> Answers:
    """Greedy answers to texts and images, of which each replica gets every one."""
    scenes = [str(draw_scene(server.media / f"{number}.png", number)) for number in range(4)]
    requests = [text_request(), text_request("red square"), *map(image_request, scenes)]
    twice = [request for request in requests for _ in range(2)]
    return [response_ids(envelope) for envelope in server.infer(twice, max_tokens=32)]


def serve(server: RunningServer, weights: Path) -> None:
    copied = Path(shutil.copy(weights, server.checkpoint / "copied"))
    copied.replace(server.checkpoint / WEIGHTS)
    server.rebuild()


@pytest.fixture(scope="module")
def pushed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pushed]:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("fresh")
    new, old = (checkpoint(folder / str(seed), case, seed) for seed in (1, 0))
    shutil.copytree(new, folder / "served")
    options = ("--weight-transport", case.transport, *case.options)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")  # for two workers on one machine
        with running_server(folder / "served", folder / "server", *options) as server:
            loaded = answers(server)
            serve(server, old / WEIGHTS)
            before = answers(server)
            modes = []
            if "--enable-lora" in case.options:
                targets = ["q_proj", "v_proj", "o_proj"]
                if case.family == "qwen3_5":
                    targets += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
                adapter = adapted(old, 2, target_modules=targets)
                modes = [adapter_of(adapter), full_of(adapter)]
            model = AutoModelForImageTextToText.from_pretrained(new, dtype=torch.float32)
            modes.append(full_of(model))
            pushes = []
            for mode in modes:
                server.push_by_learner(mode, case.transport)
                pushes.append(answers(server))
            *with_adapter, pushed = pushes
            bfloat16 = "bfloat16" in case.options
            yield Pushed(server, case.transport, bfloat16, loaded, before, pushed, with_adapter)


def full_of(model: Any) -> SyncMode:
    return SyncMode(MergedWeights(model), None, fallback_to_full=False)


@pytest.mark.req("FAM-01", "SYNC-02", "SYNC-03", "SYNC-05", "SYNC-06", "SEED-02", "SRV-05")
@pytest.mark.parametrize("pushed", [LATER.get(name, name) for name in CASES], indirect=True)
def test_a_pushed_engine_answers_as_one_that_loaded_the_weights(pushed: Pushed) -> None:
    assert pushed.pushed == pushed.loaded
    assert all(old != new for old, new in zip(pushed.before, pushed.loaded, strict=True))


@pytest.mark.req("FAM-01", "SYNC-02", "SYNC-06", "SYNC-10", "STEP-01")
@pytest.mark.parametrize("pushed", TRAINED, indirect=True)
def test_a_run_trains_and_every_push_has_the_effect_of_the_trained_weights(
    pushed: Pushed, tmp_path: Path
) -> None:
    """Channel B; `verify: full` raises if the server computes with other weights."""
    server = pushed.server
    before = server.version
    vllm = by_servers(server.process.base_url)
    config = small_config(
        server.checkpoint,
        make_data(server.media / "toy", train=4, val=1, seed=0),
        tmp_path / "run",
        training={"max_steps": STEPS, "learning_rate": 0.01, "save_strategy": "no"},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "max_new_tokens": 24,
            "vllm": vllm | {"sync": {"transport": pushed.transport, "verify": "full"}},
        },
    )
    out = train(config, check_inputs(config), reach_servers(config), Console(quiet=True))
    steps = metric_lines(out, "loss")
    assert [line["sync/weights_version"] for line in steps] == [before + 1, before + 2]
    assert all(line["sync/probe_s"] > 0 for line in steps)
    trained = zip(answers(server), pushed.pushed, strict=True)
    assert all(now != then for now, then in trained)


@pytest.mark.req("FAM-01", "SYNC-01")
@pytest.mark.parametrize("pushed", [*list(TRAINED)[:1], LATER["qwen3_5"]], indirect=True)
def test_a_pushed_adapter_answers_as_its_merged_weights(pushed: Pushed) -> None:
    """In bfloat16, in which Qwen3.5 is served, answers begin with the same tokens."""
    served, merged = pushed.adapted
    if pushed.bfloat16:
        assert sum(map(common_length, served, merged)) >= 8 * len(served)
    else:
        assert served == merged
    assert all(with_it != without for with_it, without in zip(served, pushed.before, strict=True))


@pytest.mark.req("SRV-05", "SRV-08")
@pytest.mark.parametrize("pushed", list(TRAINED)[:1], indirect=True)
def test_a_killed_server_leaves_no_orphan_and_no_file(pushed: Pushed) -> None:
    """The last test of its server."""
    below = children(pushed.server.process.pid)
    scratch = Path(environment_of(pushed.server.processes()["engine 0"])["TMPDIR"])
    assert scratch.exists()
    os.kill(pushed.server.process.pid, signal.SIGKILL)
    assert wait_until_gone(below, timeout_s=60) == []
    wait_until(lambda: not scratch.exists())
