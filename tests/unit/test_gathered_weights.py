"""Weights in shards, put together for a push: what travels, and what stays on the host."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from learner.rollout.sync.weights import GatheredWeights

pytestmark = pytest.mark.req("FULL-03", "SYNC-02")


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """In shards over four processes, of which this one alone is there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        made = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))
        fully_shard(made, mesh=init_device_mesh("cpu", (4,)))
        yield made
    finally:
        dist.destroy_process_group()


class Gathers(TorchDispatchMode):
    """The types of what is gathered while it is open.

    alive: how many of the whole tensors made before exist when the next one is gathered.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: list[torch.dtype] = []
        self.alive: list[int] = []
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.types.append(args[0].dtype)
            self.alive.append(sum(storage() is not None for storage in self._storages))
            self._storages.append(weakref.ref(made.untyped_storage()))
        return made


def test_a_shard_is_cast_before_it_travels_and_the_host_holds_no_other_type(
    model: nn.Module,
) -> None:
    gathered = GatheredWeights(model, sends=True)
    with Gathers() as seen:
        gathered.gather("bfloat16")
    assert seen.types == [torch.bfloat16] * 3
    sent = dict(gathered.tensors("bfloat16"))
    assert {name: tuple(t.shape) for name, t in sent.items()} == {
        "0.weight": (16, 8),
        "0.bias": (16,),
        "1.weight": (4, 16),
    }
    assert {t.dtype for t in sent.values()} == {torch.bfloat16}
    assert seen.alive == [0, 0, 0], "one parameter is whole at a time, beside the host's copy"
    again = dict(gathered.tensors("bfloat16"))
    assert all(again[name].data_ptr() == t.data_ptr() for name, t in sent.items())


def test_a_process_that_does_not_send_keeps_nothing(model: nn.Module) -> None:
    gathered = GatheredWeights(model, sends=False)
    with Gathers() as seen:
        gathered.gather("float32")
    assert seen.types == [torch.float32] * 3
    with pytest.raises(AssertionError):
        dict(gathered.tensors("float32"))
