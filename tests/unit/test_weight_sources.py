"""What a push sends, and when: full weights, merged and gathered, or adapters; its digests."""

import copy
import logging
import random
import struct
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, load_file
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.models.toy import build_toy_model, make_toy_tokenizer, toy_config
from learner.rollout.sync.group import pack_bucket
from learner.rollout.sync.weights import AdapterWeights, GatheredWeights, MergedWeights, SyncMode
from shared_contracts.errors import ContractError
from shared_contracts.weights import AdapterMeta, DtypeName, digest, meet, positions_of
from tests.contract.weight_sender import digest as defined
from tests.unit.refusals import refused

DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")
BFLOAT16 = {torch.bfloat16}


@pytest.fixture
def toy() -> PreTrainedModel:
    return build_toy_model(toy_config(make_toy_tokenizer(), tie=True), seed=0)


def adapted(toy: PreTrainedModel, **config: Any) -> PeftModel:
    given: dict[str, Any] = {"r": 4, "target_modules": "all-linear"} | config
    model = get_peft_model(toy, LoraConfig(**given))
    assert isinstance(model, PeftModel)
    return model


def assert_declared_as_sent(source: MergedWeights) -> None:
    for dtype in DTYPES:
        declared = [(m.name, m.dtype, m.shape) for m in source.metadata(dtype)]
        assert declared == [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in source.tensors(dtype)
        ]
        assert {kind for _, kind, _ in declared} == {dtype}


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_merged_as_by_peft(toy: PreTrainedModel, use_dora: bool) -> None:
    plain = {name: p.clone() for name, p in toy.named_parameters()}
    model = adapted(toy, use_dora=use_dora, target_modules=["q_proj", "v_proj", "qkv"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # peft starts them at zero
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator).abs())
    before = {name: p.clone() for name, p in model.named_parameters()}
    weights = MergedWeights(model)
    sent = dict(weights.tensors("float32"))
    assert_declared_as_sent(weights)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    merged: nn.Module = copy.deepcopy(model).merge_and_unload()
    expected = dict(merged.named_parameters())
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(sent[name], weight, atol=1e-6), name
    changed = {name for name in sent if not torch.allclose(sent[name], plain[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "qkv"}


class Gathers(TorchDispatchMode):
    """Records each gather of a tensor.

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


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A model in shards over four processes, of which this one alone exists."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        made = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))
        fully_shard(made, mesh=init_device_mesh("cpu", (4,)))
        yield made
    finally:
        dist.destroy_process_group()


@pytest.mark.req("FULL-03", "SYNC-02")
def test_a_shard_is_cast_before_its_gather_and_one_parameter_is_whole(sharded: nn.Module) -> None:
    gathered = GatheredWeights(sharded, sends=True)
    parameters = gathered.metadata("bfloat16")
    bucket = torch.empty(sum(p.wire_bytes for p in parameters), dtype=torch.uint8)

    def stream() -> None:
        pack_bucket(parameters, gathered.stream("bfloat16"), bucket)

    for work in (stream, lambda: gathered.gather("bfloat16")):
        with Gathers() as seen:
            work()
        assert seen.types == [torch.bfloat16] * 3
        assert seen.alive == [0, 0, 0], "beside the host's copy"
    with Gathers() as seen:
        sent = dict(gathered.tensors("bfloat16"))
    assert seen.types == [], "a push gathers nothing"
    assert {name: tuple(t.shape) for name, t in sent.items()} == {
        "0.weight": (16, 8),
        "0.bias": (16,),
        "1.weight": (4, 16),
    }
    assert {t.dtype for t in sent.values()} == BFLOAT16
    idle = GatheredWeights(sharded, sends=False)
    idle.gather("float32")
    with pytest.raises(AssertionError):
        dict(idle.tensors("float32"))


@pytest.mark.req("FULL-03", "SYNC-02")
def test_experts_are_sent_as_transformers_saves_them(tmp_path: Path) -> None:
    """This family has one matrix for each expert in its checkpoints."""
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
    for dtype in reversed(DTYPES):
        gathered.gather(dtype)
    for sent_by in (MergedWeights(model).tensors, gathered.tensors, gathered.stream):
        sent = dict(sent_by("float32"))
        assert list(sent) == [each.name for each in gathered.metadata("float32")]
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name]) for name in saved)
        assert all(tensor.is_contiguous() for tensor in sent.values())
    assert_declared_as_sent(gathered)


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_is_sent_as_peft_saves_it_with_its_rank_scale_and_kind(
    toy: PreTrainedModel, use_dora: bool, tmp_path: Path
) -> None:
    kind: dict[str, Any] = {"lora_alpha": 12, "use_dora": use_dora, "use_rslora": not use_dora}
    model = adapted(toy, target_modules=["q_proj", "qkv"], init_lora_weights=False, **kind)
    model.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    weights = AdapterWeights(model)
    assert {each.dtype for each in load(weights.safetensors("bfloat16")).values()} == BFLOAT16
    sent = load(weights.safetensors("float32"))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    meta = AdapterMeta(r=4, target_modules=["q_proj", "qkv"], **kind)
    assert weights.adapter.use_dora if use_dora else weights.adapter == meta


FULL, ADAPTER = cast(Any, "full weights"), cast(Any, "an adapter")


@pytest.mark.req("SYNC-01")
def test_without_fallback_a_failure_is_raised_with_a_remedy() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=False)
    found = "RuntimeError: rank 64 is too large"
    with refused("rollout_matching.vllm.sync.mode", found, "fallback_to_full"):
        mode.adapter_failed(RuntimeError("rank 64 is too large"))
    assert mode.state() == ("adapter", None)


@pytest.mark.req("SYNC-01")
def test_failing_adapters_switch_together_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    servers = 16
    mode, together = SyncMode(FULL, ADAPTER, fallback_to_full=True), Barrier(servers)
    assert (mode.adapter, mode.state()) == (ADAPTER, ("adapter", None))

    def fail(number: int) -> object:
        together.wait()
        mode.adapter_failed(RuntimeError(f"server {number}"))
        return mode.adapter

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(servers) as threads:
        assert set(threads.map(fail, range(servers))) == {None}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(mode.fallback).startswith("RuntimeError: server ")
    assert str(mode.fallback) in caplog.text


@pytest.mark.req("SYNC-01")
def test_the_sources_of_a_model() -> None:
    plain, layers = nn.Sequential(nn.Linear(4, 4)), cast(Any, nn.Sequential(nn.Linear(4, 4)))
    adapted = get_peft_model(layers, LoraConfig(target_modules=["0"]))
    assert {SyncMode.of(m, "full", True).adapter for m in (plain, adapted)} == {None}
    assert SyncMode.of(adapted, "adapter", True).state() == ("adapter", None)
    with pytest.raises(ContractError, match="tuner"):
        SyncMode.of(plain, "adapter", True)


def digest_of(words: list[int]) -> int:
    tensor = torch.tensor(words, dtype=torch.int64)
    return int(digest(tensor, torch.arange(positions_of(len(words)))))


def some_words(count: int) -> list[int]:
    draw = random.Random(count)
    return [draw.randrange(-(2**63), 2**63) for _ in range(count)]


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 20_001])
def test_a_digest_is_that_of_its_definition(count: int) -> None:
    words = some_words(count)
    assert digest_of(words) % 2**64 == defined(struct.pack(f"{count}q", *words))
    assert positions_of(2**26) == 2**14


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("bit", [0, 63])
@pytest.mark.parametrize("place", [0, 4095, 4096, 10_000])
def test_a_flipped_bit_and_words_that_trade_places_are_seen(bit: int, place: int) -> None:
    """Bit 63 is the sign. The distances are those of a word, a row, and to the tail."""
    words = some_words(10_001)
    flipped = list(words)
    flipped[place] ^= -(2**63) if bit == 63 else 2**bit
    assert digest_of(flipped) != digest_of(words)
    for other in (1, 4096, 10_000):
        traded = list(words)
        traded[place], traded[other] = words[other], words[place]
        assert (digest_of(traded) == digest_of(words)) == (place == other)


@pytest.mark.req("FULL-07", "SYNC-04")
def test_ranks_that_are_missing_are_named() -> None:
    with pytest.raises(TimeoutError) as caught:
        meet(HashStore(), 1, 4, 0.1)
    missing = "learner (rank 0), engine worker (rank 2), engine worker (rank 3): missing for 0.1 s"
    assert str(caught.value) == missing


@pytest.mark.req("FULL-07", "SYNC-04")
def test_a_rank_whose_group_is_given_up_stops_waiting() -> None:
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as ranks:
        waiting = ranks.submit(meet, HashStore(), 0, 2, 3600.0, given_up.is_set)
        given_up.set()
        assert isinstance(waiting.exception(60.0), ConnectionAbortedError)
