"""No step of a shipped profile makes a tensor of L x L, of L x V, or of more logits than a chunk.

Each profile with the widths of the 4B model and 2 layers, on fake tensors. L: tokens of a pack.
V: the vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.models.load import LoadedModel
from learner.models.packs import Pack, make_pack
from learner.operate.step_cost import longest_pack
from learner.stages.formats.coord_json import serialize_objects
from learner.training.channels import Recipe, recipe_of
from learner.types import Channel, Sample
from tests.unit.fake_step import FakeStep, fake_steps, step_model
from tests.unit.full_size_models import (
    CHUNK,
    VOCABULARY,
    WIDTHS,
    large,
    make_full_size,
    make_samples,
)
from tests.unit.small_run import rollout

pytestmark = [pytest.mark.slow, pytest.mark.req("FULL-01", "FULL-02")]

CONFIGS = Path(__file__).parents[2] / "configs"
# One of each recipe and way of training; the other profiles have the same steps.
NAMES = ("prod/default", "gpu/4b_lora", "gpu/4b_full_fsdp2")
PROFILES = [CONFIGS / "stage2_two_channel" / f"{name}.yaml" for name in NAMES]
PROFILES.append(CONFIGS / "stage2_rollout_aligned" / "prod" / "default.yaml")
# Its steps are those of the default one, with a few rows more.
LATER = CONFIGS / "stage2_two_channel" / "prod" / "clean_prefix.yaml"
WIDTH = WIDTHS["4b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_full_size(tmp_path_factory.mktemp("models") / "4b", "4b", layers=2)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return make_samples(tmp_path_factory.mktemp("samples"), 8, side=256)


def profile(path: Path, model: Path, /, **changes: Any) -> Config:
    return parse_config(merge(merge(load_mapping(path), {"model": {"model": str(model)}}), changes))


def cost_of(config: Config, channel: Channel, samples: list[Sample]) -> FakeStep:
    loaded = step_model(config)
    recipe = recipe_of(config, loaded)
    if channel == "A":
        pack, _ = longest_pack(config, recipe.channel_a.segments(samples))
    else:
        pack = corrected(config, loaded, recipe, samples)
    processes = 2 if config.training.data_parallel == "fsdp2" else 1
    return fake_steps(config, loaded, recipe, pack, [channel], processes)[channel]


def corrected(config: Config, loaded: LoadedModel, recipe: Recipe, samples: list[Sample]) -> Pack:
    """A pack as full as possible. Its answers lack an object, and repeat another."""
    segments, length = [], 0
    for sample in samples:
        _, *most = sample.objects
        answer = loaded.tokenizer.encode(
            serialize_objects((*most, most[0]), config.custom.object_field_order),
            add_special_tokens=False,
        )
        prompt = recipe.channel_a.segments([sample])[0].prompt.ids.tolist()
        made, _ = recipe.channel_b.segments([sample], [rollout(prompt, answer)])
        if length + sum(map(len, made)) <= config.global_max_length:
            segments += made
            length += sum(map(len, made))
    return make_pack(segments)


@pytest.mark.parametrize(
    "path",
    [*PROFILES, pytest.param(LATER, marks=pytest.mark.nightly)],
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_no_tensor_of_a_step_is_as_large_as_a_mask_or_as_whole_logits(
    path: Path, model: Path, samples: list[Sample]
) -> None:
    config = profile(path, model)
    for channel in _channels(config):
        cost = cost_of(config, channel, samples)
        assert cost.tokens > CHUNK
        assert any(cost.tokens in shape for shape in cost.shapes)
        assert any(shape[-1] == VOCABULARY and shape[-2] > 1 for shape in cost.shapes if shape[1:])
        assert list(large(cost.shapes, cost.tokens, WIDTH)) == []


def _channels(config: Config) -> list[Channel]:
    """Channels that the steps of the profile have."""
    possible: list[tuple[Channel, bool]] = [("A", config.b_ratio < 1), ("B", config.b_ratio > 0)]
    return [channel for channel, runs in possible if runs]


def test_a_mask_of_sdpa_is_found(model: Path, samples: list[Sample]) -> None:
    own = {"model": str(model), "attn_implementation": "sdpa"}
    config = profile(CONFIGS / "stage2_two_channel" / "gpu" / "4b_lora.yaml", model, model=own)
    cost = cost_of(config, "A", samples)
    found = {shape[-2:] for shape in large(cost.shapes, cost.tokens, WIDTH)}
    assert found == {(cost.tokens, cost.tokens)}
