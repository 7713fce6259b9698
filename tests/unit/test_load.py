"""`load_model`: what is trained in which types, and what is refused by name, without weights."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from learner.config.schema import Config, LoraTuner
from learner.data.checkpoint import Checkpoint
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.gpus import gpu_named
from learner.models.layers import PatchProduct, use_product
from learner.models.load import load_model, on_meta
from learner.operate.estimate import estimate
from shared_contracts.errors import ContractError
from tests.unit.loaded_models import load_small
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
TRAINED, FROZEN = (True, torch.float32), (False, torch.bfloat16)


@pytest.mark.parametrize(
    ("tuner", "types"), [({"train_type": "full"}, {TRAINED}), (LORA, {TRAINED, FROZEN})]
)
def test_trained_weights_are_float32_and_frozen_ones_have_the_configured_type(
    config_of: ConfigOf, tuner: object, types: object
) -> None:
    model = load_model(config_of(model={"torch_dtype": "bfloat16"}, tuner=tuner)).model
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == types


# --- Refusals -----------------------------------------------------------------------------


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def without_processor(folder: Path) -> None:
    for file in folder.glob("*processor*"):
        file.unlink()


@pytest.fixture
def config(toy_checkpoint: Path, config_of: ConfigOf, tmp_path: Path) -> Config:
    """The config of a run of a copied toy model."""
    copied = shutil.copytree(toy_checkpoint, tmp_path / "model")
    return config_of(model={"model": str(copied)})


@pytest.mark.req("FAM-01")
def test_a_model_of_another_family_is_refused_with_the_known_ones(config: Config) -> None:
    (config.model.model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for read in (lambda: load_model(config), lambda: Checkpoint(config.model.model).image_rule):
        with pytest.raises(ContractError, match=r"model_type is llama.*Use one of qwen2_vl, qwen2"):
            read()


@pytest.mark.parametrize("spoil", [without_weights, torn, without_processor])
def test_an_incomplete_checkpoint_is_refused(config: Config, spoil: Callable[[Path], None]) -> None:
    spoil(config.model.model)
    with refused("model.model", f"{config.model.model} cannot be loaded"):
        load_model(config)


def untied_above(folder: Path) -> None:
    """Untie the head on top; `text_config` still says that it is tied."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["text_config"]["tie_word_embeddings"]
    file.write_text(json.dumps({**config, "tie_word_embeddings": False}))


def other_tensors(folder: Path) -> None:
    """Every kind of fault: four are missing, one is unknown, one has another shape."""
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if not k.endswith("mlp.down_proj.weight")}
    changed = {"model.language_model.norm.weight": torch.ones(3), "model.extra": torch.ones(1)}
    save_file({**kept, **changed}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (untied_above, ["1 in no file, first lm_head.weight"]),
        (
            other_tensors,
            [
                "4 in no file, first model.language_model.layers.0.mlp.down_proj.weight, ",
                "1 not of the model, first model.extra",
                "1 of another shape, first model.language_model.norm.weight [3], not [128]",
            ],
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(
    config: Config, spoil: Callable[[Path], None], found: list[str]
) -> None:
    load_model(config)
    spoil(config.model.model)
    with pytest.raises(ContractError, match="do not fit its config") as caught:
        load_model(config)
    assert caught.value.where == "model.model"
    assert str(config.model.model) in caught.value.found
    for each in found:
        assert each in caught.value.found
    assert "layers.3" not in caught.value.found


def test_a_head_of_its_own_below_a_config_that_ties_it_is_refused(config: Config) -> None:
    """transformers would load it, and vLLM would not; an equal copy is no fault."""
    file = config.model.model / "model.safetensors"
    weights = load_file(file)
    head = weights["model.language_model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
    load_model(config)
    head[0] += 1
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
    with pytest.raises(ContractError, match=r"lm_head\.weight that differs from the embedding"):
        load_model(config)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_one_tied_end_is_refused(config: Config, tmp_path: Path, target: str) -> None:
    """Its merge would change both ends: another model than the one that was trained."""
    whole = AutoModelForImageTextToText.from_pretrained(config.model.model)
    adapted = get_peft_model(whole, LoraConfig(r=2, target_modules=[target]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    model = config.model.model_copy(update={"model": tmp_path / "adapter"})
    with pytest.raises(ContractError, match="changes embedding or head, which share a weight"):
        load_model(config.model_copy(update={"model": model}))


def test_rows_of_a_head_that_is_tied_above_alone_are_those_of_the_embedding(config: Config) -> None:
    """transformers reads this at the top level, not in `text_config`."""
    file = config.model.model / "config.json"
    whole = json.loads(file.read_text())
    whole["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(whole))
    tuner = LoraTuner(train_type="lora", lora_rank=2, lora_alpha=2, train_coordinate_rows=True)
    model = load_model(config.model_copy(update={"tuner": tuner})).model
    rows = [n for n, p in model.named_parameters() if "trainable_tokens" in n and p.requires_grad]
    assert len(rows) == 1
    assert "embed_tokens" in rows[0]


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        (["q_porj"], "the model has no module q_porj"),
        (["q_proj", "v_porj"], "the model has no module v_porj"),
        (["language_model"], "peft cannot adapt them"),
    ],
)
def test_unknown_target_modules_are_refused(config: Config, modules: list[str], found: str) -> None:
    tuner = LoraTuner(train_type="lora", lora_rank=2, lora_alpha=2, target_modules=modules)
    with refused("tuner.target_modules", found):
        load_model(config.model_copy(update={"tuner": tuner}))


def without_head(model: Any) -> None:
    del model.lm_head


def biased_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)


def half_of_the_vocabulary(model: Any) -> None:
    head = model.lm_head
    model.lm_head = nn.Linear(head.in_features, head.out_features // 2, bias=False)


def flat_patches(model: Any) -> None:
    model.model.visual.patch_embed.proj = nn.Linear(8, 8)


def padded_patches(model: Any) -> None:
    model.model.visual.patch_embed.proj.padding = (0, 1, 1)


def other_name(model: Any) -> None:
    patches = model.model.visual.patch_embed
    patches.projection = patches.proj
    del patches.proj


@contextmanager
def registered(change: Callable[[Any], None]) -> Iterator[None]:
    """Within the block transformers makes models of another class for a Qwen3-VL."""

    class Changed(Qwen3VLForConditionalGeneration):
        def __init__(self, config: Qwen3VLConfig) -> None:
            super().__init__(config)  # type: ignore[no-untyped-call]
            change(self)

    Changed.config_class = Qwen3VLConfig
    AutoModelForImageTextToText.register(Qwen3VLConfig, Changed, exist_ok=True)
    try:
        yield
    finally:
        del AutoModelForImageTextToText._model_mapping._extra_content[Qwen3VLConfig]


@pytest.mark.req("FULL-02", "FULL-04")
@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(change, found, id=change.__name__)
        for change, found in [
            (without_head, "it has no lm_head"),
            (biased_head, r"its lm_head is Linear.*no linear layer without a bias"),
            (half_of_the_vocabulary, r"a weight of 671 x \d+, and its config has"),
            (flat_patches, r"patch_embed\.proj is Linear.*, and no Conv3d"),
            (padded_patches, r"patch_embed\.proj is Conv3d.*overlap or are padded"),
            (other_name, "its vision tower has no patch_embed"),
        ]
    ],
)
def test_a_model_of_unknown_parts_is_refused_before_weights_are_read(
    config: Config, toy_data: ToyData, change: Callable[[Any], None], found: str
) -> None:
    """Reading them would be another error."""
    (config.model.model / "model.safetensors").unlink()
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    with registered(change):
        for start in (
            lambda: load_model(config),
            lambda: estimate(config, samples, gpu_named("H100"), 1),
        ):
            with pytest.raises(ContractError, match=found) as caught:
                start()
            assert caught.value.where == "model.model"
            assert caught.value.do == "Use a model of the Qwen-VL family"
    assert on_meta(config)
    with pytest.raises(ContractError, match="cannot be loaded"):
        load_model(config)


# --- the patch embedding ----------------------------------------------------------------


NAME = "patch_embed.proj"


def plain(checkpoint: Path) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    return model


@pytest.mark.req("FULL-04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_equal_those_of_the_convolution(toy_checkpoint: Path, dtype: torch.dtype) -> None:
    conv = plain(toy_checkpoint).model.visual.patch_embed.to(dtype)
    product = copy.deepcopy(conv)
    holder = nn.Module()
    holder.patch_embed = product
    use_product(holder, NAME)
    assert isinstance(product.proj, PatchProduct)
    patches = torch.randn(50, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, found = conv(patches), product(patches)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(found, wanted, atol=close, rtol=close)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs in zip(product.parameters(), conv.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= close * theirs.grad.norm()


@pytest.mark.req("FULL-04")
def test_a_loaded_model_has_it_and_keeps_the_names_of_its_weights(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    model = load_small(toy_checkpoint, toy_data, tmp_path).model
    assert model.state_dict().keys() == plain(toy_checkpoint).state_dict().keys()
    own = [name for name, module in model.named_modules() if isinstance(module, PatchProduct)]
    assert own == ["model.visual.patch_embed.proj"]
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
