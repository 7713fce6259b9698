"""The toy model: a whole Qwen3-VL checkpoint that plain transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)
from typer.testing import CliRunner

from learner.commands.toy import toy_app
from learner.data.toy import PROMPT
from learner.data.toy_scenes import DESCRIPTIONS, IMAGE_SIDE
from learner.models.coord_tokens import smooth_rows, vocab_modules
from learner.models.toy import make_model, make_toy_tokenizer
from learner.stages.formats.coord_json import serialize_append, serialize_objects
from learner.stages.tokens import CoordVocab
from learner.types import GroundTruthObject, Shape


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "model"
    make_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_toy_tokenizer()


def conversation(image: Image.Image) -> list[dict[str, object]]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": PROMPT}]
    return [{"role": "user", "content": content}]


def two_objects() -> list[GroundTruthObject]:
    shape = Shape("bbox_2d", (12, 34, 56, 999))
    return [GroundTruthObject("red triangle", shape), GroundTruthObject("blue triangle", shape)]


def test_plain_transformers_loads_it_and_generates(checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint)
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    assert model.config.architectures == ["Qwen3VLForConditionalGeneration"]
    assert model.dtype == torch.float32
    inputs = processor.apply_chat_template(
        conversation(Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "red")),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] == inputs["input_ids"].shape[1] + 3


def test_an_image_keeps_its_size_and_takes_sixteen_tokens(checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint)
    text = processor.apply_chat_template(
        conversation(Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE))), add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        f"{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE))
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 8]]
    image_token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (inputs["input_ids"] == image_token).sum() == 16


def test_the_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again", seed=0)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize("tie", [True, False])
def test_the_head_is_tied_or_not_as_asked(tmp_path: Path, tie: bool) -> None:
    make_model(tmp_path / "model", seed=0, tie=tie)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    embedding, head = vocab_modules(model)
    assert (embedding.weight is head.weight) == tie
    assert json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"] == tie


def test_each_coordinate_is_one_token_that_decodes_to_itself(
    tokenizer: Any,
) -> None:
    vocab = CoordVocab.from_tokenizer(tokenizer)
    assert tokenizer.encode("<|coord_0|><|coord_999|>", add_special_tokens=False) == [
        vocab.ids[0],
        vocab.ids[999],
    ]
    assert vocab.end_id == tokenizer.eos_token_id


def test_answers_survive_the_tokenizer(tokenizer: Any) -> None:
    text = serialize_objects(two_objects(), "desc_first") + "<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    odd = 'naïve "猫" \\ 🙀\n\t{}'
    assert tokenizer.decode(tokenizer.encode(odd, add_special_tokens=False)) == odd


@pytest.mark.parametrize("desc", DESCRIPTIONS)
def test_a_description_is_one_token_a_word(tokenizer: Any, desc: str) -> None:
    assert len(tokenizer.encode(desc, add_special_tokens=False)) == 2


def test_an_entry_ends_where_a_token_ends(tokenizer: Any) -> None:
    one = serialize_objects(two_objects()[:1], "desc_first").removesuffix("}")
    rest = serialize_append(one, two_objects()[1:], 2, "desc_first")
    whole = tokenizer.encode(one + rest, add_special_tokens=False)
    apart = [tokenizer.encode(part, add_special_tokens=False) for part in (one, rest)]
    assert whole == [*apart[0], *apart[1]]


def test_coordinate_rows_change_slowly_with_the_bin() -> None:
    rows = smooth_rows(32, torch.Generator().manual_seed(0))
    assert rows.shape == (1000, 32)
    assert rows.std() == pytest.approx(1.0, abs=1e-4)
    assert (rows[1:] - rows[:-1]).norm(dim=1).max() < 0.05 * (rows[500] - rows[0]).norm()
    assert len(rows.unique(dim=0)) == 1000


def test_the_command_makes_data_and_model(tmp_path: Path) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    runner = CliRunner()
    made = runner.invoke(toy_app, ["make-data", "--out", str(data), "--train", "2", "--val", "1"])
    assert made.exit_code == 0, made.output
    assert len((data / "train.jsonl").read_text().splitlines()) == 2
    made = runner.invoke(toy_app, ["make-model", "--out", str(model), "--untie"])
    assert made.exit_code == 0, made.output
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is False
