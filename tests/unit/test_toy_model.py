"""The toy model, a whole Qwen3-VL checkpoint, and coordinate tokens added to a checkpoint."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    Qwen3Config,
)

from learner.models.coord_tokens import NOISE, describe_expanded, expand_vocab, vocab_modules
from learner.models.toy import make_model, make_text_tokenizer, make_toy_tokenizer
from learner.stages.tokens import CoordVocab
from shared_contracts.errors import ContractError
from tests.unit.stock_checkpoints import make_stock


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "model"
    make_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_toy_tokenizer()


def test_the_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again", seed=0)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()


# --- coordinate tokens for a checkpoint without them ------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("plain") / "tied", tie=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("plain") / "untied", tie=False)


def load(path: Path) -> tuple[PreTrainedModel, Any]:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path)
    return model, AutoProcessor.from_pretrained(path).tokenizer


def text_logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[40, 50, 60]])).logits
    return logits[..., :length]


@pytest.mark.parametrize("tie", [None, False])
def test_what_the_model_says_about_old_tokens_does_not_change(
    tied: Path, tmp_path: Path, tie: bool | None
) -> None:
    expand_vocab(tied, tmp_path / "out", seed=0, tie=tie)
    before, tokenizer = load(tied)
    after, _ = load(tmp_path / "out")
    assert after.dtype == before.dtype == torch.bfloat16
    length = len(tokenizer)
    # More rows in the head may be multiplied by another kernel, which rounds otherwise.
    torch.testing.assert_close(text_logits(after, length), text_logits(before, length))


def test_new_rows_are_the_mean_of_the_old_ones_and_small_noise(
    untied: Path, tmp_path: Path
) -> None:
    expand_vocab(untied, tmp_path / "out", seed=0, tie=None)
    model, tokenizer = load(tmp_path / "out")
    first = CoordVocab.from_tokenizer(tokenizer).ids[0]
    for module in vocab_modules(model):
        weight = module.weight.detach().float()
        old, new = weight[:first], weight[first:]
        assert torch.allclose(new.mean(dim=0), old.mean(dim=0), atol=1e-3)
        noise = new - new.mean(dim=0)
        assert (noise.std() / old.std()).item() == pytest.approx(NOISE, rel=0.05)
        assert (noise[1:] - noise[:-1]).norm(dim=1).max() < 0.3 * noise.norm(dim=1).mean()


def test_untying_copies_the_embedding_into_a_head_of_its_own(tied: Path, tmp_path: Path) -> None:
    expand_vocab(tied, tmp_path / "out", seed=0, tie=False)
    embedding, head = vocab_modules(load(tmp_path / "out")[0])
    assert embedding.weight is not head.weight
    assert torch.equal(embedding.weight, head.weight)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


@pytest.mark.parametrize("rows", [None, 384], ids=["exact", "padded"])
def test_rows_are_padded_as_before_and_described_alike(tmp_path: Path, rows: int | None) -> None:
    plain = make_stock(tmp_path / "plain", tie=True, rows=rows)
    expand_vocab(plain, tmp_path / "out", seed=0, tie=None)
    model, tokenizer = load(tmp_path / "out")
    weight = vocab_modules(model)[0].weight.detach().float()
    padded, tokens = len(weight), len(tokenizer)
    assert padded == (tokens if rows is None else -(-tokens // 128) * 128)
    assert model.config.get_text_config().vocab_size == padded
    assert rows is None or weight[tokens:].std(dim=0).max() == 0
    describe_expanded(plain, tmp_path / "described")
    assert not list((tmp_path / "described").glob("*.safetensors"))
    whole, described = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "described")
    )
    assert described["text_config"]["vocab_size"] == whole["text_config"]["vocab_size"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (
            tmp_path / "described" / name
        ).read_bytes()


def without_im_end(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|im_end|>", "<|stop|>"))


def without_images(folder: Path) -> None:
    shutil.rmtree(folder)
    make_text_tokenizer().save_pretrained(folder)
    Qwen3Config().save_pretrained(folder)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 100)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config"),
        (cut("config.json"), "its config"),
        (cut("tokenizer.json"), "its tokenizer"),
        (cut("model.safetensors"), "its weights"),
        (without_im_end, "has no <|im_end|>"),
        (without_images, "a model of text alone"),
    ],
)
def test_a_damaged_source_is_refused(
    tied: Path, tmp_path: Path, spoil: Callable[[Path], object], found: str
) -> None:
    source = shutil.copytree(tied, tmp_path / "source")
    spoil(source)
    with pytest.raises(ContractError, match=re.escape(found)) as caught:
        expand_vocab(source, tmp_path / "out", seed=0, tie=None)
    assert caught.value.where == str(source)
    assert not (tmp_path / "out").exists()


def test_coordinate_tokens_twice_and_tying_of_a_head_are_refused(
    checkpoint: Path, untied: Path, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="has 1000 coordinate tokens already"):
        expand_vocab(checkpoint, tmp_path / "out", seed=0, tie=None)
    with pytest.raises(ContractError, match="head has weights of its own"):
        expand_vocab(untied, tmp_path / "out", seed=0, tie=True)
