"""Another model family is one module and one line of the registry."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

from learner.config import parse_config
from learner.config.registry import MODEL_FAMILIES
from learner.data.jsonl import build_request
from learner.data.lengths import image_rule
from learner.models.load import LoadedModel, load_model
from learner.models.packing_check import check_packing
from learner.models.packs import make_pack
from learner.models.prompts import encode_request
from learner.models.toy import make_toy_tokenizer
from learner.rollout.hf import HfBackend
from learner.training.trainer import build_optimizer
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.config_faults import changed
from tests.unit.mixed_samples import mixed_samples
from tests.unit.packed_logits import packed_logits
from tests.unit.toy_learner import PROMPT, ToyLearner

SIDE, PATCH = 32, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of a tiny LLaVA, random weights."""
    tokenizer = make_toy_tokenizer()
    image: Any = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=Qwen2Config(**text), image_token_index=image)
    )
    out = tmp_path_factory.mktemp("llava")
    model.save_pretrained(out)
    side = {"height": SIDE, "width": SIDE}
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=side),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    ).save_pretrained(out)
    return out


@pytest.fixture
def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setitem(MODEL_FAMILIES, "llava", "tests.unit.throwaway_family:LLAVA")
    model = {"model": str(folder), "torch_dtype": "float32"}
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 2, "train_coordinate_rows": False}
    mapping = changed("model", model) | {"tuner": tuner}
    return load_model(parse_config(mapping))


@pytest.mark.req("ARCH-03", "PACK-04")
def test_a_registered_family_is_loaded_packed_and_forwarded(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    trained = {name for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("q_proj" in name or "v_proj" in name for name in trained)
    loaded.model.eval()
    check_packing(loaded.model, loaded.family)
    learner = ToyLearner(loaded)
    segments = learner.channel_a.segments(mixed_samples(tmp_path))
    assert any(segment.prompt.pixel_values is not None for segment in segments)
    pack = make_pack(segments)
    assert pack.position_ids.shape == (1, len(pack))
    with torch.no_grad():
        alone = [packed_logits(loaded.model, make_pack([segment])) for segment in segments]
        packed = packed_logits(loaded.model, pack)
    assert torch.allclose(packed, torch.cat(alone), atol=1e-4)


@pytest.mark.req("ARCH-03")
def test_a_registered_family_is_trained_and_answers(loaded: LoadedModel, tmp_path: Path) -> None:
    learner = ToyLearner(loaded)
    samples = mixed_samples(tmp_path)
    gradients = learner.gradients(learner.loss(learner.pack(samples)))
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())
    config = parse_config(changed("custom.extra", {}))
    optimizer = build_optimizer(loaded.model, config.training, loaded.family)
    assert {group["lr"] for group in optimizer.param_groups} == {config.training.learning_rate}
    requests = [build_request(sample, PROMPT, None) for sample in samples]
    backend = HfBackend(
        loaded.model.get_base_model(),  # type: ignore[operator]
        lambda request: encode_request(loaded.processor, request),
        loaded.processor.tokenizer,
        RepeatTerminateConfig(),
        decode_batch_size=1,
    )
    answers = backend.rollout(requests, RequestConfig(max_tokens=4, temperature=0.0))
    assert [0 < len(answer.response_token_ids) <= 4 for answer in answers] == [True] * len(samples)


@pytest.mark.req("ARCH-03")
def test_the_image_tokens_of_a_registered_family_are_its_own(
    loaded: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    rule = image_rule(folder)
    for sample in mixed_samples(tmp_path):
        prompt = encode_request(loaded.processor, build_request(sample, PROMPT, None))
        wanted = sum(rule.tokens(sample.width, sample.height) or 0 for _ in sample.images)
        assert int(prompt.mm_token_types.sum()) == wanted


@pytest.mark.req("ARCH-03")
def test_a_family_that_is_not_registered_is_refused(folder: Path) -> None:
    with pytest.raises(ContractError, match="its model_type is llava"):
        load_model(parse_config(changed("model.model", str(folder))))
    with pytest.raises(ContractError, match="Use one of qwen2_vl"):
        image_rule(folder)
