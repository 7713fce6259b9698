"""The toy model: a whole Qwen3-VL checkpoint that plain transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import (
    AutoProcessor,
)
from typer.testing import CliRunner

from learner.commands.toy import toy_app
from learner.data.toy import PROMPT
from learner.data.toy_scenes import IMAGE_SIDE
from learner.models.toy import make_model, make_toy_tokenizer


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


def test_the_command_makes_data_and_model(tmp_path: Path) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    runner = CliRunner()
    made = runner.invoke(toy_app, ["make-data", "--out", str(data), "--train", "2", "--val", "1"])
    assert made.exit_code == 0, made.output
    assert len((data / "train.jsonl").read_text().splitlines()) == 2
    made = runner.invoke(toy_app, ["make-model", "--out", str(model), "--untie"])
    assert made.exit_code == 0, made.output
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is False
