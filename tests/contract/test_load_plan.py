"""Pushes by vLLM's loaders and by a plan of them, against fresh models."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
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
from shared_contracts.weights import ParameterMeta
from tests.contract.weight_sender import Weights, manifest

ROOT = Path(__file__).parents[2]
CONFIG: Any = SimpleNamespace(dtype=torch.float32)


# --- vLLM's own models


def pushed(folder: Path, ranks: int, *names: str) -> list[dict[str, Any]]:
    """What `pushed_models` prints, of all ranks."""
    command = [sys.executable, "-m", "tests.contract.pushed_models", str(folder)]
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


@pytest.mark.slow
@pytest.mark.req("SYNC-02", "SYNC-03", "SYNC-06")
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, ("tied", "untied", "bfloat16", "qwen2.5", "experts")), (2, ("experts",))],
    ids=["one rank", "two ranks"],
)
def test_a_pushed_model_equals_a_fresh_one_in_every_bit(
    tmp_path: Path, ranks: int, names: tuple[str, ...]
) -> None:
    """By vLLM's loaders and by the plan: fused, padded, tied and packed matrices, and experts."""
    found = pushed(tmp_path, ranks, *names)
    assert [one["name"] for one in found] == [*names] * ranks
    for one in found:
        faults = (one["faults"], one["loaded"], one["replayed"], one["unchanged"])
        assert faults == ([], [], [], []), one["name"]
        assert ranks > 1 or one["constants"] > 0, "padding"


# --- a model of three layers


class Doubled(QuantizeMethodBase):
    """The layer computes with twice its weight, and drops the weight itself."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def process_weights_after_loading(self, layer: Any) -> None:
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
    """Two fused layers, one of which processes its weight; a tied head.

    loaded: how many parameters came through the loaders.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.doubled = Fused(None), Fused(Doubled())
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
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
            if owner == "ignored":
                continue
            if owner == "doubles":
                self.embed.weight.data.copy_(weight * 2)
                continue
            layer: Any = getattr(self, owner)
            parameter: Any = layer.bias if leaf == "bias" else layer.weight
            assert leaf != "bias" or weight.shape == parameter.shape, "this is no bias"
            parameter.weight_loader(parameter, weight, 3 if leaf == "b" else 0)


def weights_of(seed: int) -> Weights:
    """The two matrices of a layer come apart, as in two buckets."""
    draw = torch.Generator().manual_seed(seed)
    layers = ("doubled", "plain")
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.a": (3, 2) for layer in layers}
    shapes |= {f"{layer}.bias": (3,) for layer in layers} | {"embed.weight": (5, 4)}
    shapes |= {f"{layer}.b": (3, 2) for layer in layers}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def planned(parameters: list[ParameterMeta], model: Model | None = None) -> Plan:
    model = model or Model()
    ties = shared_parameters(model)
    initialize_layerwise_reload(model)
    return trace(model, parameters, "float32", ties)


def loaded(model: Model, weights: Weights) -> Plan:
    """Push through the loaders."""
    plan = planned(manifest(weights), model)
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


def after_loading(seed: int) -> dict[str, Tensor]:
    model = Model()
    loaded(model, weights_of(seed))
    return held(model)


# --- plans


def meta(name: str, *shape: int, dtype: Any = "float32") -> ParameterMeta:
    return ParameterMeta(name=name, dtype=dtype, shape=list(shape))


def but(name: str, *others: ParameterMeta) -> list[ParameterMeta]:
    return [p for p in manifest(weights_of(0)) if p.name != name] + list(others)


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (but("plain.b"), ("plain.weight", "missing")),
        (but("embed.weight"), ("embed.weight", "missing")),
        (but("", meta("ignored.weight", 1)), ("ignored.weight", "unexpected")),
        (but("", meta("nowhere.weight", 1)), ("nowhere.weight", "shape")),
        (but("", meta("plain.a", 3, 2)), ("plain.a", "duplicate")),
        (but("", meta("head.weight", 5, 4)), ("head.weight", "duplicate")),
        (but("embed.weight", meta("doubles.weight", 5, 4)), ("doubles.weight", "untraceable")),
        (but("plain.bias", meta("plain.bias", 4)), ("plain.bias", "shape")),
        (but("plain.a", meta("plain.a", 0, 2**62, 2**62)), ("plain.a", "shape")),
        (
            but("embed.weight", meta("embed.weight", 5, 4, dtype="float64")),
            ("embed.weight", "dtype"),
        ),
    ],
)
def test_a_parameter_that_does_not_fit_is_a_fault(
    parameters: list[ParameterMeta], expected: tuple[str, str]
) -> None:
    faults = [(fault.name, fault.kind) for fault in planned(parameters).faults]
    assert expected in faults
    assert {name for name, _ in faults} <= {expected[0], "embed.weight", "plain.weight"}


# --- pushes by a plan


@pytest.mark.req("SYNC-02", "SYNC-03")
@pytest.mark.parametrize("bucket", [1, 7])
def test_a_push_by_a_plan_leaves_the_same_as_the_loaders(bucket: int) -> None:
    model = Model()
    replay = Replay(model, CONFIG, loaded(model, weights_of(0)))
    for seed in (1, 2):
        weights, names = weights_of(seed), list(weights_of(seed))
        assert replay.begin()
        for start in range(0, len(names), bucket):
            replay.load_weights((n, weights[n].clone()) for n in names[start : start + bucket])
        replay.finish()
        assert_equal(held(model), after_loading(seed))
    assert model.loaded == len(weights_of(0))
    assert model.head.weight is model.embed.weight
    assert replay.begin()
    replay.load_weights((name, w) for name, w in weights_of(3).items() if name != "plain.b")
    with pytest.raises(RuntimeError, match=r"plain\.b did not come"):
        replay.finish()
    loaded(model, weights_of(4))
    assert_equal(held(model), after_loading(4))
    model.plain.weight = nn.Parameter(model.plain.weight.clone(), requires_grad=False)
    assert not replay.begin(), "the tensors are others"
