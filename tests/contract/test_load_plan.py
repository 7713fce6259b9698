"""Where parameters land, traced from loaders that fuse, shard and pad."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout_server.engines.verification import Box, Fault, covered
from rollout_server.engines.vllm import read_back
from rollout_server.engines.vllm.load_plan import (
    Constant,
    Plan,
    Target,
    box_of,
    shared_parameters,
    trace,
)
from rollout_server.engines.vllm.staging import Staged
from shared_contracts.weights import ParameterMeta
from tests.contract.weight_sender import digest, manifest

BOXES: list[tuple[str, Callable[[Tensor], Tensor], Box | None]] = [
    ("all", lambda m: m, Box(0, 0, 6, 4)),
    ("rows", lambda m: m[2:5], Box(2, 0, 3, 4)),
    ("columns", lambda m: m[:, 1:3], Box(0, 1, 6, 2)),
    ("one column", lambda m: m[:, 3], Box(0, 3, 6, 1)),
    ("part of a row", lambda m: m[4, 1:3], Box(4, 1, 1, 2)),
    ("an element", lambda m: m[5, 2], Box(5, 2, 1, 1)),
    ("in the middle", lambda m: m[1:3, 2:4], Box(1, 2, 2, 2)),
    ("with more dimensions", lambda m: m.view(6, 2, 2)[1:4], Box(1, 0, 3, 4)),
    ("transposed", lambda m: m.t(), None),
    ("every other row", lambda m: m[::2], None),
    ("over the end of a row", lambda m: m.view(-1)[2:7], None),
    ("nothing", lambda m: m[0:0], None),
]


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(("name", "view", "box"), BOXES, ids=[name for name, _, _ in BOXES])
def test_a_view_is_a_box_of_its_matrix(
    name: str, view: Callable[[Tensor], Tensor], box: Box | None
) -> None:
    assert box_of(view(torch.empty(6, 4, device="meta")), columns=4) == box


class Fused(nn.Module):
    """The second of two workers: half of `a` above half of `b`, and two padding rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 2))
        self.bias = nn.Parameter(torch.zeros(3))

    def load(self, name: str, weight: Tensor) -> None:
        first = {"a": 0, "b": 3}[name]
        self.weight.data[first : first + 3].copy_(weight.narrow(0, 3, 3))
        self.weight.data[6:7].fill_(0)
        self.weight.data[7:] = 0


class Model(nn.Module):
    """Layers of fused matrices, and an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Fused(), Fused()])
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            match name.split("."):
                case ["layers", index, "bias"]:
                    bias: Any = self.layers[int(index)].bias
                    assert bias.shape == weight.shape, f"{tuple(weight.shape)} is no bias"
                    bias.data[:] = weight
                case ["layers", index, part]:
                    layer: Any = self.layers[int(index)]
                    layer.load(part, weight)
                case ["embed"]:
                    self.embed.weight.data.copy_(weight)
                case ["head"]:
                    self.head.weight.data.copy_(weight)
                case ["odd"]:
                    self.embed.weight.data.copy_(weight * 2)
                case ["ignored"]:
                    pass
                case _:
                    raise ValueError(f"there is no {name}")


def reloading(model: nn.Module) -> nn.Module:
    """As vLLM prepares a model: a tensor without data for each but the biases, none shared."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name != "bias":
                setattr(module, name, nn.Parameter(parameter.data.to("meta")))
    return model


def meta(name: str, *shape: int, dtype: Any = "float32") -> ParameterMeta:
    return ParameterMeta(name=name, dtype=dtype, shape=list(shape))


WHOLE = [
    *(meta(f"layers.{i}.{part}", 6, 2) for i in range(2) for part in "ab"),
    *(meta(f"layers.{i}.bias", 3) for i in range(2)),
    meta("embed", 5, 4),
]


def planned(parameters: list[ParameterMeta], model: Model | None = None) -> Plan:
    model = model or Model()
    ties = shared_parameters(model)
    return trace(reloading(model), parameters, "float32", ties)


def faults(parameters: list[ParameterMeta]) -> list[tuple[str, str]]:
    return [(fault.name, fault.kind) for fault in planned(parameters).faults]


@pytest.mark.req("SYNC-05", "SYNC-06")
def test_each_part_is_placed_and_nothing_is_written() -> None:
    model = Model()
    plan = planned(WHOLE, model)
    assert plan.faults == []
    (placed,) = plan.placements["layers.1.b"]
    assert (placed.source, placed.box) == (Box(3, 0, 3, 2), Box(3, 0, 3, 2))
    assert (placed.target.full_name, placed.target.rows) == ("layers.1.weight", 8)
    (bias,) = plan.placements["layers.0.bias"]
    assert bias.source == bias.box == Box(0, 0, 3, 1)
    assert all(not layer.bias.any() for layer in model.layers if isinstance(layer, Fused))


@pytest.mark.req("SYNC-06")
def test_a_shared_tensor_has_a_place_in_each_module_that_reads_it() -> None:
    plan = planned(WHOLE)
    readers = [placed.target.full_name for placed in plan.placements["embed"]]
    assert readers == ["embed.weight", "head.weight"]


def but(name: str, *others: ParameterMeta) -> list[ParameterMeta]:
    return [p for p in WHOLE if p.name != name] + list(others)


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (but("layers.1.b"), [("layers.1.b", "missing")]),
        (but("embed"), [("embed.weight", "missing")]),
        ([*WHOLE, meta("ignored", 1)], [("ignored", "unexpected")]),
        ([*WHOLE, meta("nowhere", 1)], [("nowhere", "unexpected")]),
        ([*WHOLE, WHOLE[0]], [("layers.0.a", "duplicate")]),
        ([*WHOLE, meta("head", 5, 4)], [("head", "duplicate")]),
        (but("layers.0.bias", meta("layers.0.bias", 4)), [("layers.0.bias", "shape")]),
        (but("embed", meta("embed", 5, 4, dtype="float64")), [("embed", "dtype")]),
        (but("embed", meta("odd", 5, 4)), [("odd", "untraceable")]),
    ],
)
def test_faults(parameters: list[ParameterMeta], expected: list[tuple[str, str]]) -> None:
    assert set(expected) <= set(faults(parameters))
    assert {name for name, _ in faults(parameters)} <= {expected[0][0], "embed.weight"}


def changes_the_parameter(model: Model, weight: Tensor) -> None:
    weight.mul_(2)
    model.embed.weight.data.copy_(weight)


def changes_the_target(model: Model, weight: Tensor) -> None:
    model.embed.weight.data.copy_(weight)
    model.embed.weight.data.add_(1)


def copies_bits(model: Model, weight: Tensor) -> None:
    model.embed.weight.data.copy_(weight.view(torch.int32))


def copies_into_bits(model: Model, weight: Tensor) -> None:
    model.embed.weight.data.view(torch.int32).copy_(weight.view(torch.int32))


def copies_columns_as_rows(model: Model, weight: Tensor) -> None:
    model.embed.weight.data[:4, :4].copy_(weight[:4, :4].t())
    model.embed.weight.data[4].copy_(weight[4])


def copies_by_index(model: Model, weight: Tensor) -> None:
    model.embed.weight.data[torch.arange(5)] = weight


def fills_with_what_came(model: Model, weight: Tensor) -> None:
    model.embed.weight.data.fill_(weight[0, 0])


def overwrites_with_a_constant(model: Model, weight: Tensor) -> None:
    model.embed.weight.data.copy_(weight)
    model.embed.weight.data[:, 3].fill_(0)


def takes_the_memory(model: Model, weight: Tensor) -> None:
    model.embed.weight.data = weight


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    "load",
    [
        changes_the_parameter,
        changes_the_target,
        copies_bits,
        copies_into_bits,
        copies_columns_as_rows,
        copies_by_index,
        fills_with_what_came,
        overwrites_with_a_constant,
        takes_the_memory,
    ],
)
def test_whatever_is_no_copy_of_a_part_cannot_be_followed(
    load: Callable[[Model, Tensor], None],
) -> None:
    """A replay of a plan that lacks it would leave other weights than the loaders."""

    class Odd(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, weight in weights:
                if name == "embed":
                    load(self, weight)
                else:
                    super().load_weights([(name, weight)])

    plan = planned(WHOLE, Odd())
    found = [fault.name for fault in plan.faults if fault.kind == "untraceable"]
    assert found in (["embed"], ["embed.weight"])


@pytest.mark.req("SYNC-05", "SYNC-06")
def test_constants_are_planned_with_their_values() -> None:
    class Filled(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            self.embed.weight.data.fill_(3)
            self.embed.weight.data[2:] = 0.5
            super().load_weights(weights)

    plan = planned(WHOLE, Filled())
    assert plan.faults == []
    filled = {target.full_name: constants for target, constants in plan.constants.items()}
    whole, rows = Constant(Box(0, 0, 5, 4), 3.0), Constant(Box(2, 0, 3, 4), 0.5)
    assert filled["embed.weight"] == [whole, rows]
    padding = [Constant(Box(6, 0, 1, 2), 0.0), Constant(Box(7, 0, 1, 2), 0.0)]
    assert filled["layers.1.weight"] == padding * 2


class Experts(nn.Module):
    """Three experts, each of two fused matrices; `also` is a second name of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(1, 1, bias=False)
        self.experts.weight = nn.Parameter(torch.zeros(3, 4, 2))
        self.also = self.experts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            expert, part = divmod(int(name), 2)
            self.experts.weight.data[expert, 2 * part : 2 * part + 2].copy_(weight)


@pytest.mark.req("SYNC-05", "SYNC-06")
def test_the_matrices_of_experts_are_boxes_of_one_matrix() -> None:
    model = Experts()
    ties = shared_parameters(model)
    plan = trace(reloading(model), [meta(str(i), 2, 2) for i in range(6)], "float32", ties)
    assert (plan.faults, ties) == ([], {})
    found = [placed for placements in plan.placements.values() for placed in placements]
    assert [placed.box for placed in found] == [Box(2 * i, 0, 2, 2) for i in range(6)]
    assert {placed.target for placed in found} == {Target("experts", "weight", 12, 2)}


@pytest.mark.req("SYNC-05")
def test_two_names_for_one_place_are_a_fault() -> None:
    class Twice(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            renamed = (("embed" if name == "again" else name, w) for name, w in weights)
            super().load_weights(renamed)

    plan = planned([*WHOLE, meta("again", 5, 4)], Twice())
    detail = "what it fills, embed fills, too"
    assert plan.faults == [Fault("again", "duplicate", detail)]


class Renamed(Model):
    """Takes `layers.0.again` for `layers.0.a`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name.replace("again", "a"), weight) for name, weight in weights)


@pytest.mark.req("SYNC-05")
def test_a_part_that_comes_twice_does_not_stand_in_for_one_that_is_missing() -> None:
    """They are of the same size, so that as many elements come as there are."""
    plan = planned(but("layers.0.b", meta("layers.0.again", 6, 2)), Renamed())
    found = {(fault.name, fault.kind) for fault in plan.faults}
    assert found == {("layers.0.again", "duplicate"), ("layers.0.b", "missing")}
    assert any("10 of 16 elements" in fault.detail for fault in plan.faults)


@pytest.mark.req("SYNC-05")
def test_a_shape_that_no_tensor_has_is_a_fault_of_its_own() -> None:
    impossible = meta("layers.0.a", 0, 2**62, 2**62)
    assert faults(but("layers.0.a", impossible))[0] == ("layers.0.a", "shape")
    assert {name for name, _ in faults(but("layers.0.a", impossible))} == {"layers.0.a"}


@pytest.mark.req("SYNC-05")
def test_a_copy_of_nothing_is_no_fault() -> None:
    class WithNothing(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            self.embed.weight.data[5:].copy_(torch.empty(0, 4))
            self.embed.weight.data[5:] = 0
            super().load_weights(weights)

    assert planned(WHOLE, WithNothing()).faults == []


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize(
    ("boxes", "count"),
    [
        ([], 0),
        ([Box(0, 0, 2, 2), Box(0, 0, 2, 2)], 4),
        ([Box(0, 0, 2, 2), Box(1, 1, 2, 2)], 7),
        ([Box(1, 1, 1, 1), Box(0, 0, 3, 3)], 9),
        ([Box(0, 0, 3, 1), Box(0, 2, 3, 1), Box(1, 0, 1, 3)], 7),
    ],
)
def test_what_boxes_cover_together_counts_once(boxes: list[Box], count: int) -> None:
    assert covered(boxes) == count


@pytest.mark.req("SYNC-05")
def test_a_type_may_be_that_of_the_tensor_it_lands_in() -> None:
    def with_a_wide_bias() -> Model:
        model = Model()
        model.layers[0].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        return model

    wide = but("layers.0.bias", meta("layers.0.bias", 3, dtype="float64"))
    assert planned(wide, with_a_wide_bias()).faults == []
    assert planned(WHOLE, with_a_wide_bias()).faults == []


class Waits(TorchFunctionMode):
    """Counts what a GPU is waited for.

    values: of tensors that are asked for. copies: from the host to the device of the weights,
    which block unless they are said not to.
    """

    values = copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.values += func in (Tensor.__int__, Tensor.item, Tensor.tolist, Tensor.__bool__)
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.copies += any(isinstance(each, list) for each in index)
        elif func in (torch.tensor, torch.as_tensor):
            self.copies += "device" in kwargs
        elif func is Tensor.to and not kwargs.get("non_blocking"):
            self.copies += any(isinstance(each, torch.device) for each in (*args, *kwargs.values()))
        return func(*args, **kwargs)


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    "copies",
    [
        lambda weights: torch.tensor([1, 2], device=weights.device),
        lambda weights: torch.tensor([1, 2]).to(weights.device),
        lambda weights: weights[:, [1, 2]],
    ],
)
def test_a_copy_that_blocks_is_counted(copies: Callable[[Tensor], Tensor]) -> None:
    with Waits() as waits:
        copies(torch.zeros(3, 3))
    assert waits.copies == 1


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("columns", [None, [3, 4, 290]], ids=["all", "some"])
def test_what_is_read_in_pieces_is_waited_for_once_a_parameter(
    device: str, columns: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pieces of each kind of device."""
    for limits in (read_back.COLUMNS_AT_ONCE, read_back.ELEMENTS_AT_ONCE):
        monkeypatch.setitem(limits, "cpu", limits[device])
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=draw).to(torch.bfloat16)
        for name, shape in {"wide": (700, 300), "long": (9000, 301)}.items()
    }
    staged = Staged(manifest(weights))
    staged.model.load_weights(weights.items())
    with Waits() as waits:
        answer = staged.subtotals([(name, columns) for name in weights])
    found = [f"{part[-1]:016x}" for (part,) in answer]
    assert found == [digest(weight, columns) for weight in weights.values()]
    assert (waits.values, waits.copies) == (len(weights), 0)
