"""What a push sends: shards put together, and experts one by one."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.rollout.sync.weights import BaseWeights, GatheredWeights, MergedWeights

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


def test_experts_are_sent_as_transformers_saves_them_apart(tmp_path: Path) -> None:
    """This family has one matrix for each expert in its checkpoints; others, a fused tensor."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=50,
            hidden_size=8,
            intermediate_size=12,
            moe_intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=3,
            num_experts_per_tok=2,
        )
    )
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    gathered = GatheredWeights(model, sends=True)
    gathered.gather("float32")
    for source in (BaseWeights(model), MergedWeights(model), gathered):
        sent = dict(source.tensors("float32"))
        assert [(each.name, tuple(each.shape)) for each in source.metadata("float32")] == [
            (name, tuple(tensor.shape)) for name, tensor in sent.items()
        ]
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name]) for name in saved)
        assert all(tensor.is_contiguous() for tensor in sent.values())
