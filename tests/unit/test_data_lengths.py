"""Tokens of prompts and answers, counted without torch, against transformers and the trainer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoProcessor, Qwen2VLImageProcessor

from learner.data.checkpoint import Checkpoint, SampleLengths, TokenLimits
from learner.data.jsonl import read_samples
from learner.data.toy import PROMPT, ToyData
from learner.models.families.qwen_vl import QwenImageRule
from learner.models.load import read_processor
from learner.models.prompts import PromptEncoder
from learner.stages.targets import build_ground_truth_target
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.data_files import LYING, box, lengths_of, line, paint, write_lines

SYSTEM = "Answer in JSON."


def measured(checkpoint: Path) -> SampleLengths:
    """As a run with this prompt writes its samples."""
    return lengths_of(checkpoint, TokenLimits(1, None), PROMPT, SYSTEM)


@pytest.fixture
def many_sizes(tmp_path: Path) -> list[Sample]:
    """Samples of one and two images, one of them stored lying."""
    paint(tmp_path / "a.png", (64, 48))
    paint(tmp_path / "b.png", (301, 500))
    paint(tmp_path / "lying.jpg", (120, 40), orientation=LYING)
    cat, dog = box("cat", 1, 2, 3, 4), box("a große dog", 1, 2, 300, 400)
    path = write_lines(
        tmp_path / "d.jsonl",
        line("a.png", cat, dog),
        line("b.png", size=(301, 500)),
        line("lying.jpg", cat, size=(40, 120)),
        line("b.png", cat, size=(301, 500)) | {"images": ["b.png", "lying.jpg"]},
    )
    return read_samples(path, allow_poly=False)


def test_lengths_are_those_the_trainer_gets(
    toy_checkpoint: Path, toy_data: ToyData, many_sizes: list[Sample]
) -> None:
    processor = AutoProcessor.from_pretrained(toy_checkpoint)
    encode = PromptEncoder(processor, PROMPT, SYSTEM)
    lengths = measured(toy_checkpoint)
    for sample in [*many_sizes, *read_samples(toy_data.val_jsonl, allow_poly=False)]:
        target = build_ground_truth_target(sample.objects, processor.tokenizer, "desc_first")
        assert lengths.target(sample) == len(target.token_ids)
        assert lengths.prompt(sample) == len(encode(sample).ids)


SIDES = st.integers(1, 3000) | st.sampled_from([1, 27, 28, 29, 224, 448, 4032, 10_000])
RULES = st.sampled_from(
    [
        {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 10**6}},
        {
            "patch_size": 16,
            "merge_size": 2,
            "size": {"shortest_edge": 2**16, "longest_edge": 2**24},
        },
        {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 16384}},
        {"patch_size": 16, "merge_size": 1, "min_pixels": 1024, "max_pixels": 4096},
        {"max_pixels": 50176},
        {},
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processor")


@given(settings=RULES, width=SIDES, height=SIDES)
def test_image_tokens_are_those_of_the_processor(
    folder: Path, settings: dict[str, Any], width: int, height: int
) -> None:
    text = json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast", **settings})
    (folder / "preprocessor_config.json").write_text(text)
    rule = QwenImageRule.of_checkpoint(folder)
    processor = Qwen2VLImageProcessor(**settings)
    try:
        patches = processor.get_number_of_image_patches(height, width)
    except ValueError:  # over 200 times as long as wide
        assert rule.tokens(width, height) is None
    else:
        assert rule.tokens(width, height) == patches // settings.get("merge_size", 2) ** 2


def test_another_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"no preprocessor_config\.json"):
        QwenImageRule.of_checkpoint(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with pytest.raises(ContractError, match="CLIPImageProcessor"):
        QwenImageRule.of_checkpoint(tmp_path)
    size = '"size": {"shortest_edge": 9}'
    file.write_text(f'{{"image_processor_type": "Qwen2VLImageProcessor", {size}}}')
    with pytest.raises(ContractError, match="its sizes cannot be read"):
        QwenImageRule.of_checkpoint(tmp_path)
    file.write_text("[")
    with pytest.raises(ContractError, match="cannot be read"):
        QwenImageRule.of_checkpoint(tmp_path)


def test_the_chat_template_is_found_wherever_checkpoints_keep_it(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    template = Checkpoint(toy_checkpoint).chat_template()
    with pytest.raises(ContractError, match="no chat template"):
        Checkpoint(tmp_path).chat_template()
    for name in ("tokenizer_config.json", "chat_template.json"):
        (tmp_path / name).write_text(json.dumps({"chat_template": name + template}))
        assert Checkpoint(tmp_path).chat_template() == name + template
    shutil.copy(toy_checkpoint / "chat_template.jinja", tmp_path)
    assert Checkpoint(tmp_path).chat_template() == template


def test_a_template_beside_the_tokenizer_alone_is_the_processors(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(toy_checkpoint, tmp_path / "model")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ContractError, match="no chat template"):
        Checkpoint(copy).require_vocabulary()
    file, template = copy / "tokenizer_config.json", Checkpoint(toy_checkpoint).chat_template()
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    Checkpoint(copy).require_vocabulary()
    assert read_processor(copy).chat_template == template
