"""The adapter leaves the learner as peft would save it, or not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from learner.models.toy import build_toy_model, make_toy_tokenizer, toy_config
from learner.rollout.sync.weights import AdapterWeights, MergedWeights
from shared_contracts.errors import RunError
from shared_contracts.weights import AdapterMeta


@pytest.fixture
def toy() -> PreTrainedModel:
    return build_toy_model(toy_config(make_toy_tokenizer(), tie=True), seed=0)


def adapted(toy: PreTrainedModel, **config: Any) -> PeftModel:
    given: dict[str, Any] = {"r": 4, "target_modules": "all-linear"} | config
    model = get_peft_model(toy, LoraConfig(**given))
    assert isinstance(model, PeftModel)
    return model


def snapshot(model: PeftModel) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().clone(), parameter.requires_grad


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize("use_dora", [False, True])
def test_names_and_tensors_are_those_peft_saves(
    toy: PreTrainedModel, use_dora: bool, tmp_path: Path
) -> None:
    model = adapted(toy, use_dora=use_dora)
    model.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    sent = dict(AdapterWeights(model).tensors("float32"))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert any(".visual." in name for name in sent)
    assert not any(tensor.requires_grad for tensor in sent.values())


@pytest.mark.req("SYNC-01")
def test_the_manifest_is_what_is_sent_in_the_engines_type(toy: PreTrainedModel) -> None:
    weights = AdapterWeights(adapted(toy))
    for dtype in ("float32", "bfloat16"):
        declared = [(m.name, m.dtype, m.shape) for m in weights.metadata(dtype)]
        sent = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in weights.tensors(dtype)
        ]
        assert declared == sent


@pytest.mark.req("SYNC-01", "SYNC-06")
@pytest.mark.parametrize("use_dora", [False, True])
def test_its_base_is_what_the_model_was_before_it_named_as_in_a_full_push(
    toy: PreTrainedModel, use_dora: bool
) -> None:
    before = {name: weight.detach().clone() for name, weight in toy.named_parameters()}
    model = adapted(toy, use_dora=use_dora, init_lora_weights=False)
    base = AdapterWeights(model).base
    held = dict(base.tensors("float32"))
    assert held.keys() == before.keys()
    assert all(torch.equal(held[name], weight) for name, weight in before.items())
    for dtype in ("float32", "bfloat16"):
        assert base.metadata(dtype) == MergedWeights(model).metadata(dtype)
        assert {str(tensor.dtype) for _, tensor in base.tensors(dtype)} == {f"torch.{dtype}"}


@pytest.mark.req("SYNC-01")
def test_the_model_in_training_is_left_alone(toy: PreTrainedModel) -> None:
    model = adapted(toy)
    before = list(snapshot(model))
    weights = AdapterWeights(model)
    assert weights.adapter.r == 4
    for dtype in ("float32", "bfloat16"):
        assert len(weights.metadata(dtype)) == len(list(weights.tensors(dtype)))
    for (name, then, trained), (same, now, still) in zip(before, snapshot(model), strict=True):
        assert (name, trained) == (same, still)
        assert torch.equal(then, now)


@pytest.mark.req("SYNC-01")
def test_what_the_engines_have_to_know_of_it(toy: PreTrainedModel) -> None:
    model = adapted(toy, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "qkv"])
    assert AdapterWeights(model).adapter == AdapterMeta(
        r=4, lora_alpha=12, target_modules=["q_proj", "qkv"], use_dora=False, use_rslora=True
    )
    sibling = build_toy_model(toy_config(make_toy_tokenizer(), tie=True), seed=0)
    assert AdapterWeights(adapted(sibling, use_dora=True)).adapter.use_dora


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"modules_to_save": ["merger"]}, "merger.*is trained in addition to the adapter"),
        ({"bias": "all"}, "bias is trained in addition to the adapter"),
        ({"rank_pattern": {"q_proj": 2}}, "several"),
        ({"alpha_pattern": {"q_proj": 2}}, "several"),
    ],
    ids=["modules_to_save", "bias", "rank_pattern", "alpha_pattern"],
)
def test_an_adapter_that_is_not_all_is_refused(
    toy: PreTrainedModel, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunError, match=reason):
        _ = AdapterWeights(adapted(toy, **config)).adapter


@pytest.mark.req("SYNC-01")
def test_a_weight_trained_beside_the_adapter_or_a_second_adapter_is_noticed(
    toy: PreTrainedModel,
) -> None:
    model = adapted(toy)
    embedding = toy.get_input_embeddings().weight
    embedding.requires_grad_(True)
    with pytest.raises(RunError, match="embed_tokens"):
        list(AdapterWeights(model).tensors("float32"))
    embedding.requires_grad_(False)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(RunError, match="second"):
        _ = AdapterWeights(model).adapter
