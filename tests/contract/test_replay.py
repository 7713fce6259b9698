"""Pushes by the copies of a plan, against the same pushes through loaders."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from rollout_server.engines.vllm.load_plan import Plan, shared_parameters, trace
from rollout_server.engines.vllm.replay import Replay
from tests.contract.weight_sender import Weights, manifest

ROOT = Path(__file__).parents[2]
CONFIG: Any = SimpleNamespace(dtype=torch.float32)


# --- vLLM's own models


def replayed(folder: Path, ranks: int, *names: str) -> list[dict[str, Any]]:
    """What `replayed_models` prints, of all ranks."""
    command = [sys.executable, "-m", "tests.contract.replayed_models", str(folder)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "VLLM_DIST_IDENT": folder.name,
    }
    processes = []
    for rank in range(ranks):
        (folder / str(rank)).mkdir()
        processes.append(
            subprocess.Popen(
                [*command, str(rank), str(ranks), *names],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=(folder / f"{rank}.log").open("w"),
                text=True,
            )
        )
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    for rank, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"{rank}.log").read_text()[-3000:]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def assert_alike(found: list[dict[str, Any]]) -> None:
    """Both ways leave the same bits, and neither those of before."""
    for one in found:
        assert (one["faults"], one["unequal"], one["unchanged"]) == ([], [], []), one["name"]


@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06")
def test_a_push_by_the_plan_equals_one_through_vllms_loaders(tmp_path: Path) -> None:
    """In every bit: fused, padded and tied matrices, packed ones, and experts."""
    found = replayed(tmp_path, 1, "tied", "untied", "bfloat16", "experts")
    assert [(one["faults"], one["unequal"], one["unchanged"]) for one in found] == [
        ([], [], [])
    ] * 4
    padded = {one["name"]: one["constants"] for one in found}
    assert padded == {"tied": 1, "untied": 2, "bfloat16": 1, "experts": 2}


@pytest.mark.req("SYNC-02", "SYNC-03")
def test_each_of_two_ranks_replays_its_shards(tmp_path: Path) -> None:
    found = replayed(tmp_path, 2, "experts")
    assert [(one["faults"], one["unequal"], one["unchanged"]) for one in found] == [
        ([], [], [])
    ] * 2


# --- a model of three layers


class Doubled(QuantizeMethodBase):
    """The layer computes with twice its weight, and gives the weight itself away."""

    broken = False

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.broken:
            raise RuntimeError("no memory is left")
        layer.twice = (layer.weight * 2).clone()
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


def load(param: nn.Parameter, weight: Tensor, first: int) -> None:
    param.data[first : first + len(weight)].copy_(weight)
    if param.shape == (7, 2):
        param.data[6:].fill_(7)


class Fused(nn.Module):
    """Two matrices of three rows above a row of padding, and a bias of another type."""

    def __init__(self, method: QuantizeMethodBase | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 2))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.quant_method = method


class Model(nn.Module):
    """Two fused layers, of which one processes its weight, and an embedding that the head shares.

    loaded: how many parameters came through the loaders.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.doubled = Fused(None), Fused(Doubled())
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.requires_grad_(False)
        for parameter in self.parameters():
            cast(Any, parameter).weight_loader = load
        self.head.weight = self.embed.weight
        self.loaded = 0
        record_metadata_for_reloading(self)
        Doubled().process_weights_after_loading(self.doubled)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.loaded += not weight.is_meta
            owner, leaf = name.split(".")
            layer: Any = getattr(self, owner)
            parameter: Any = layer.bias if leaf == "bias" else layer.weight
            parameter.weight_loader(parameter, weight, 3 if leaf == "b" else 0)


def weights_of(seed: int) -> Weights:
    """Both halves of a layer lie apart, as in two buckets."""
    draw = torch.Generator().manual_seed(seed)
    layers = ("doubled", "plain")
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.a": (3, 2) for layer in layers}
    shapes |= {f"{layer}.bias": (3,) for layer in layers} | {"embed.weight": (5, 4)}
    shapes |= {f"{layer}.b": (3, 2) for layer in layers}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def loaded(model: Model, weights: Weights) -> Plan:
    """Push through the loaders."""
    ties = shared_parameters(model)
    initialize_layerwise_reload(model)
    plan = trace(model, manifest(weights), "float32", ties)
    model.load_weights(weights.items())
    finalize_layerwise_reload(model, CONFIG)
    assert plan.faults == []
    return plan


def held(model: Model) -> dict[str, Tensor]:
    found: dict[str, Any] = {name: p.clone() for name, p in model.named_parameters()}
    return found | {"twice": cast(Any, model.doubled).twice.clone()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture
def pushed() -> tuple[Model, Replay]:
    """A model with weights 0, and what pushes the next ones."""
    model = Model()
    plan = loaded(model, weights_of(0))
    return model, Replay(model, CONFIG, plan)


def after_loading(seed: int) -> dict[str, Tensor]:
    model = Model()
    loaded(model, weights_of(seed))
    return held(model)


@pytest.mark.req("SYNC-02", "SYNC-03")
@pytest.mark.parametrize("bucket", [1, 2, 7])
def test_a_replay_leaves_what_the_loaders_leave(pushed: tuple[Model, Replay], bucket: int) -> None:
    """Buckets of any size, each of memory that is used again; no loader runs."""
    model, replay = pushed
    through_loaders = model.loaded
    for seed in (1, 2):
        weights, names = weights_of(seed), list(weights_of(seed))
        assert replay.begin()
        for start in range(0, len(names), bucket):
            replay.load_weights((n, weights[n].clone()) for n in names[start : start + bucket])
        replay.finish()
        assert_equal(held(model), after_loading(seed))
    assert model.loaded == through_loaders == len(weights_of(0))
    assert model.head.weight is model.embed.weight


@pytest.mark.req("SYNC-05")
def test_a_push_that_breaks_half_way_leaves_nothing_to_the_next(
    pushed: tuple[Model, Replay],
) -> None:
    model, replay = pushed
    plan = loaded(model, weights_of(0))
    assert replay.begin()
    replay.load_weights(list(weights_of(1).items())[:4])
    whole = Replay(model, CONFIG, plan)
    assert whole.begin()
    whole.load_weights(weights_of(2).items())
    whole.finish()
    assert_equal(held(model), after_loading(2))
    loaded(model, weights_of(3))
    assert_equal(held(model), after_loading(3))


@pytest.mark.req("SYNC-05")
def test_a_push_of_which_a_part_is_missing_does_not_end(pushed: tuple[Model, Replay]) -> None:
    _, replay = pushed
    weights = weights_of(1)
    assert replay.begin()
    replay.load_weights((name, w) for name, w in weights.items() if name != "plain.b")
    with pytest.raises(RuntimeError, match=r"plain\.b did not come"):
        replay.finish()
    assert replay.begin()
    with pytest.raises(RuntimeError, match=r"doubled\.a did not come \(7 did not\)"):
        replay.finish()
    with pytest.raises(KeyError, match="nowhere"):
        replay.load_weights([("nowhere", torch.zeros(1))])


@pytest.mark.req("SYNC-05")
def test_a_layer_that_cannot_be_processed_keeps_what_it_had(
    pushed: tuple[Model, Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, replay = pushed
    before, weight = held(model), model.doubled.weight
    monkeypatch.setattr(Doubled, "broken", True)
    assert replay.begin()
    with pytest.raises(RuntimeError, match="no memory is left"):
        replay.load_weights(weights_of(1).items())
    assert model.doubled.weight is weight
    assert torch.equal(held(model)["twice"], before["twice"])
    monkeypatch.undo()
    loaded(model, weights_of(2))
    assert_equal(held(model), after_loading(2))


def replaced(model: Model) -> None:
    model.plain.weight = nn.Parameter(model.plain.weight.clone(), requires_grad=False)


def moved(model: Model) -> None:
    model.embed.weight.data = model.embed.weight.data.clone()


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize("change", [replaced, moved])
def test_a_plan_does_not_hold_for_other_tensors(
    pushed: tuple[Model, Replay], change: Callable[[Model], None]
) -> None:
    model, replay = pushed
    assert replay.begin()
    change(model)
    assert not replay.begin()


@pytest.mark.req("SYNC-05")
def test_a_plan_does_not_hold_where_loaders_write_to_a_buffer() -> None:
    class Counting(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights(weights)
            cast(Tensor, self.calls).add_(1)

    model = Counting()
    plan = loaded(model, weights_of(0))
    assert plan.besides == ["calls (aten.add_.Tensor)"]
    assert not Replay(model, CONFIG, plan).begin()
