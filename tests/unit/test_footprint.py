"""What a model takes of a server's memory, by its config alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.data.toy import ToyData
from learner.operate.estimate.sizes import read_sizes, serving
from learner.training.start_checks import (
    context_of_run,
    lengths_of_run,
    longest_prompt,
    read_inputs,
)
from shared_contracts.footprint import GIB, MIB, cache_elements, engine_share, run_context
from tests.unit.small_run import small_config

pytestmark = pytest.mark.req("FULL-06")

OF_4B = {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 2560}
OF_4B |= {"num_key_value_heads": 8, "head_dim": 128}


def test_the_cache_of_a_token_is_a_key_and_a_value_in_every_layer() -> None:
    assert 2 * cache_elements(OF_4B) == 144 * 1024
    assert 2 * cache_elements(OF_4B) * 262144 == 36 * GIB
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert cache_elements(plain) == 2 * 2 * 64
    with pytest.raises(LookupError):
        cache_elements({})


def described(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_context_is_rounded_up_and_no_longer_than_the_models(tmp_path: Path) -> None:
    model = described(tmp_path / "m", text_config={"max_position_embeddings": 4500})
    assert run_context(model, 1077, 3072) == 4352
    assert run_context(model, 1280, 3072) == 4352
    assert run_context(model, 1281, 3072) == 4500
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(model)})
    )
    assert run_context(adapter, 9000, 1) == 4500
    for unknown in (tmp_path / "none", described(tmp_path / "n"), described(tmp_path / "l", x=[])):
        assert run_context(unknown, 9000, 1) == 9216


@pytest.mark.parametrize(
    ("total", "largest", "share"),
    [
        (80 * GIB, 1.17 * GIB, 0.9),  # 8 GiB are left, and 4.5 needed
        (24 * GIB, 100 * MIB, 0.9),  # 2.1 GiB needed
        (24 * GIB, 0.73 * GIB, 0.86),  # 3.2
        (1 * GIB, 0.73 * GIB, 0.01),
    ],
)
def test_an_engine_leaves_room_for_a_push(total: float, largest: float, share: float) -> None:
    assert engine_share(total, largest) == share


def test_a_run_derives_its_context_from_its_longest_prompt(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    config = small_config(toy_checkpoint, toy_data, tmp_path)
    samples = read_inputs(config).train
    measure = lengths_of_run(config)
    longest = max(measure.prompt(sample) for sample in samples)
    assert longest_prompt(config, samples) == longest
    context = context_of_run(config, samples)
    assert longest + 16 <= context < longest + 16 + 256
    narrow = replace(samples[0], width=1, height=10**6)
    assert longest_prompt(config, [narrow, *samples]) == longest, "no model can be shown it"
    assert serving(config, read_sizes(config), longest, 1).context == context
    vllm = {"max_model_len": 99}
    stated = small_config(toy_checkpoint, toy_data, tmp_path, rollout_matching={"vllm": vllm})
    assert context_of_run(stated, samples) == 99
