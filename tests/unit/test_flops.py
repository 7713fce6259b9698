"""Arithmetic of a step: against the operations that it runs, and in the log of a step."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.flops import DeviceUse
from learner.models.gpus import Gpu, gpu_named, gpu_of_device
from learner.models.load import load_model
from learner.operate.estimate.step import longest_pack, meta_model, recipe_of, step_cost
from learner.training.step import PlainEngine, StepRunner
from learner.types import Sample
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.req("FULL-09")

GIB = 2**30
LORA = {
    "train_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "train_coordinate_rows": False,
}


@pytest.fixture
def samples(toy_data: ToyData) -> list[Sample]:
    return read_samples(toy_data.train_jsonl, allow_poly=False)[:4]


@pytest.mark.parametrize("tuner", [{"train_type": "full"}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "context",
    [
        {"n_softctx_iter": 1},
        {"n_softctx_iter": 4, "softctx_grad_mode": "em_detach"},
        {"n_softctx_iter": 3, "softctx_grad_mode": "unroll"},
    ],
    ids=["once", "detached", "unrolled"],
)
def test_a_pack_is_as_much_as_its_operations(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    samples: list[Sample],
    tuner: dict[str, Any],
    context: dict[str, Any],
) -> None:
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    changed = {"tuner": tuner, "stage2_ab": context, "global_max_length": 1000}
    config: Config = parse_config(merge(small, changed))
    loaded = meta_model(config)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe, samples)
    counted = step_cost(config, samples, "A").flops
    # Middle forwards read slots alone, and the mean embedding is a product: both small.
    assert recipe.flops(loaded.model, pack, "A") == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA H100 NVL", 93.1, None),
        ("Tesla T4", 14.6, None),
    ],
)
def test_a_gpu_is_known_by_what_cuda_calls_it(device: str, gib: float, name: str | None) -> None:
    found = gpu_of_device(device, int(gib * GIB))
    assert found == (None if name is None else gpu_named(name))


def test_on_a_cpu_the_peak_is_that_of_the_process() -> None:
    use = DeviceUse(torch.device("cpu"))
    use.begin()
    held = torch.ones(100 * 2**20)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / GIB
    assert use.gpu is None
    assert held.nbytes / GIB < resident <= use.peak_gib() + 0.01


@pytest.fixture
def one_step(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, samples: list[Sample]
) -> Callable[[], dict[str, float]]:
    """Runs a step of channel A; its metrics."""
    config = parse_config(small_mapping(toy_checkpoint, toy_data, tmp_path / "run"))

    def run() -> dict[str, float]:
        loaded = load_model(config)
        loaded.model.train()
        runner = StepRunner(config, recipe_of(config, loaded), None)
        _, report = runner.run(loaded.model, samples, 0, PlainEngine())
        return report.metrics

    return run


def test_a_step_logs_tokens_memory_and_on_a_known_gpu_its_use(
    one_step: Callable[[], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = one_step()
    tokens, seconds = plain["packing/post_rollout_selected_total_len"], plain["time/learn_s"]
    assert plain["perf/tokens_per_s"] == pytest.approx(tokens / seconds)
    assert plain["perf/peak_memory_gib"] > 0
    assert "perf/mfu" not in plain

    class Known(DeviceUse):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.gpu = Gpu("slow", 1, 1e9, 1.0, 1.0, 1.0)

    monkeypatch.setattr("learner.training.step.DeviceUse", Known)
    known = one_step()
    flops = known["perf/mfu"] * 1e9 * known["time/learn_s"]
    assert 1e6 < flops / known["packing/post_rollout_selected_total_len"] < 1e8
