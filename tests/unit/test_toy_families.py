"""Toys of the model families: a pack, its images, its cost and its checkpoints."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.models.attention import PACKED
from learner.models.load import LoadedModel, read_model
from learner.models.packed_forward import check_packing
from learner.models.packs import make_pack
from learner.models.toy import ToyFamily, make_model
from learner.operate.step_cost import longest_pack, step_costs
from learner.training.channels import recipe_of
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.fake_step import fake_steps, step_model
from tests.unit.loaded_models import load_small
from tests.unit.packed_logits import packed_logits
from tests.unit.small_run import run_quietly, small_config, small_mapping
from tests.unit.toy_learner import ToyLearner

pytestmark = pytest.mark.req("FAM-01")

FAMILIES: tuple[ToyFamily, ...] = get_args(ToyFamily)
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("toys") / request.param
    make_model(path, seed=0, family=request.param)
    return path


@pytest.fixture
def load(checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Load:
    """The toy by a small run's config with these sections."""
    return partial(load_small, checkpoint, toy_data, tmp_path)


@pytest.mark.req("PACK-04", "FULL-01")
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@torch.no_grad()
def test_packed_equals_separate_and_plain_transformers(
    load: Load, checkpoint: Path, samples: list[Sample], attention: str
) -> None:
    loaded = load(model={"attn_implementation": attention})
    loaded.model.eval()
    check_packing(loaded.model)
    segments = ToyLearner(loaded).channel_a.segments(samples)
    plain = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    plain.load_state_dict(loaded.model.state_dict())
    wanted = []
    for segment in segments:
        pack = make_pack([segment])
        own: Any = plain(
            input_ids=pack.input_ids,
            mm_token_type_ids=pack.mm_token_types,
            pixel_values=pack.pixel_values,
            image_grid_thw=pack.image_grid_thw,
            use_cache=False,
        )
        wanted.append(own.logits[0])
        assert torch.allclose(packed_logits(loaded.model, pack), wanted[-1], atol=1e-4)
    for order in ([0, 1, 2, 3], [2, 1, 3, 0], [1, 1, 0, 2]):
        packed = packed_logits(loaded.model, make_pack([segments[i] for i in order]))
        assert torch.allclose(packed, torch.cat([wanted[i] for i in order]), atol=1e-4), order


@pytest.mark.req("FULL-01")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_lone_images(load: Load, samples: list[Sample], again: bool) -> None:
    learner = ToyLearner(load(model={"gradient_checkpointing": again}))
    pack, model = learner.pack(samples), learner.model
    found = learner.gradients(learner.loss(pack))
    assert isinstance(model, torch.nn.Module)
    whole: Any = model
    whole.set_attn_implementation({"text_config": PACKED, "vision_config": "sdpa"})
    wanted = learner.gradients(learner.loss(pack))
    assert all(gradient.any() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-5), name


@pytest.mark.req("PACK-04")
def test_wrong_windows_are_noticed(load: Load, checkpoint: Path, samples: list[Sample]) -> None:
    if checkpoint.name != "qwen2_5_vl":
        pytest.skip("it has no windows")
    loaded = load()
    tower: Any = loaded.inner.visual

    def lose(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        windows = kwargs["windows"]
        return args, {**kwargs, "windows": type(windows).of(windows.on_host[[0, -1]])}

    check_packing(loaded.model)
    for block in tower.blocks:
        block.register_forward_pre_hook(lose, with_kwargs=True)
    with pytest.raises(ContractError, match=r"training\.packing"):
        check_packing(loaded.model)


def test_all_linear_adapts_the_language_model(load: Load) -> None:
    tuner = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "train_coordinate_rows": False}
    loaded = load(tuner=tuner)
    trained = {n.split(".lora_")[0] for n, p in loaded.model.named_parameters() if p.requires_grad}
    wanted, text = {"q_proj", "k_proj", "v_proj", "o_proj"}, loaded.inner.config.get_text_config()
    if not hasattr(text, "num_experts") or hasattr(text, "shared_expert_intermediate_size"):
        wanted |= {"gate_proj", "up_proj", "down_proj"}
    if loaded.family.linear_attention is not None:
        wanted |= {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    assert {name.rpartition(".")[2] for name in trained} == wanted
    assert all("language_model" in name for name in trained)


@pytest.mark.req("FULL-05", "FULL-09")
def test_a_pack_is_as_much_as_its_operations(
    checkpoint: Path, toy_data: ToyData, tmp_path: Path, samples: list[Sample]
) -> None:
    config = parse_config(small_mapping(checkpoint, toy_data, tmp_path / "run"))
    loaded = step_model(config)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe.channel_a.segments(samples))
    found = step_costs(config, loaded, samples)["A"]
    counted = fake_steps(config, loaded, recipe, pack, ["A"])["A"].flops
    assert recipe.flops(loaded.model, pack, "A") == pytest.approx(counted, rel=0.05)
    assert found.flops == pytest.approx(counted, rel=0.02)


@pytest.mark.req("RUN-01")
@pytest.mark.slow
@pytest.mark.nightly  # the layout of each family's checkpoint is tested below
def test_a_run_resumes_bit_for_bit(checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> None:
    """The file has other names or another layout than the model."""
    training = {"save_steps": 2, "max_steps": 3, "resume": "auto"}
    config = small_config(checkpoint, toy_data, tmp_path / "run", training=training)
    last = run_quietly(config) / "checkpoint-3"
    wanted = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    run_quietly(config)
    found = load_file(last / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.req("RUN-02")
def test_published_layout_of_experts_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """Qwen3.5 is published with one tensor for all experts, as the model has it."""
    if checkpoint.name != "qwen3_5_moe":
        pytest.skip("it has no experts, or saves them as published")
    shutil.copytree(checkpoint, tmp_path / "fused")
    model = read_model(checkpoint, torch.float32)
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert sum(".mlp.experts." in name for name in named) == 2 * 4
    save_file(named, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    read = dict(read_model(tmp_path / "fused", torch.float32).named_parameters())
    assert all(torch.equal(read[name], weight) for name, weight in named.items())


@pytest.mark.req("RUN-02")
def test_experts_are_saved_as_engines_read_them(checkpoint: Path, tmp_path: Path) -> None:
    if checkpoint.name != "qwen3_vl_moe":
        pytest.skip("it has no experts")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    stored = load_file(checkpoint / "model.safetensors")
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    held = dict(model.named_parameters())
    fused = [name for name in stored if ".mlp.experts." in name]
    assert len(fused) == 2 * 4
    for name in fused:
        assert torch.equal(stored[name], held[name].transpose(1, 2))
        assert torch.equal(stored[name], again[name])
