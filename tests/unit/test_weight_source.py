"""Merged weights leave the training model alone and equal peft's own merge."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from learner.models.toy import build_toy_model, make_toy_tokenizer, toy_config
from learner.rollout.sync.transports import pack_bucket
from learner.rollout.sync.weights import MergedWeights, OneSource
from shared_contracts.weights import DtypeName, plan_buckets


def toy(tie: bool) -> PreTrainedModel:
    return build_toy_model(toy_config(make_toy_tokenizer(), tie), seed=0)


def adapted(base: PreTrainedModel, use_dora: bool) -> PeftModel:
    """LoRA or DoRA with adapters that do something (peft starts them at zero)."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv"], use_dora=use_dora)
    model = get_peft_model(copy.deepcopy(base), config)
    assert isinstance(model, PeftModel)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator).abs())
    return model


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("tie", [True, False])
def test_a_plain_model_sends_every_parameter_once_tied_ones_too(tie: bool) -> None:
    model = toy(tie)
    names = [name for name, _ in MergedWeights(model).tensors("float32")]
    assert names == [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" in names) == (not tie)
    assert any(".visual." in name for name in names)


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_merged_on_the_fly_without_touching_the_model(use_dora: bool) -> None:
    base = toy(tie=True)
    model = adapted(base, use_dora)
    before = {name: p.clone() for name, p in model.named_parameters()}
    sent = dict(MergedWeights(model).tensors("float32"))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    merged: nn.Module = copy.deepcopy(model).merge_and_unload()
    expected = dict(merged.named_parameters())
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(sent[name], weight, atol=1e-6), name
    plain = dict(base.named_parameters())
    changed = {name for name in sent if not torch.allclose(sent[name], plain[name])}
    assert changed
    assert all(name.split(".")[-2] in ("q_proj", "v_proj", "qkv") for name in changed)


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_metadata_declares_exactly_what_is_sent_in_the_type_of_the_engines(
    dtype: DtypeName,
) -> None:
    weights = MergedWeights(adapted(toy(tie=True), use_dora=False))
    declared = [(m.name, m.dtype, m.shape) for m in weights.metadata(dtype)]
    sent = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape))
        for name, t in weights.tensors(dtype)
    ]
    assert declared == sent
    assert {dtype for _, dtype, _ in declared} == {dtype}


def test_one_source_is_the_same_before_and_after_a_failure() -> None:
    weights = MergedWeights(toy(tie=True))
    choice = OneSource(weights)
    assert choice.current() is weights
    assert not choice.failed(weights, RuntimeError("broken"))
    assert choice.current() is weights


@pytest.mark.req("SYNC-03")
def test_buckets_carry_every_byte_in_manifest_order() -> None:
    weights = MergedWeights(toy(tie=True))
    parameters = weights.metadata("bfloat16")
    stream = iter(weights.tensors("bfloat16"))
    sent = dict(weights.tensors("bfloat16"))
    buckets = plan_buckets(parameters, 2**20)
    assert len(buckets) > 2
    for indices in buckets:
        chosen = [parameters[i] for i in indices]
        bucket = torch.full((sum(p.wire_bytes for p in chosen),), 255, dtype=torch.uint8)
        pack_bucket(chosen, stream, bucket)
        offset = 0
        for parameter in chosen:
            raw = bucket[offset : offset + parameter.num_bytes]
            assert torch.equal(raw.view(torch.bfloat16).view(parameter.shape), sent[parameter.name])
            padding = bucket[offset + parameter.num_bytes : offset + parameter.wire_bytes]
            assert not padding.any(), parameter.name
            offset += parameter.wire_bytes
