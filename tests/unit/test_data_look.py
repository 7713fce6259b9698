"""What `learner data look` counts, its page of samples, and tokens counted without torch."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor

from learner.data.checkpoint import Checkpoint, SampleLengths, TokenLimits
from learner.data.jsonl import read_samples
from learner.data.look import choose_samples, colour_of, picture_name, stats_tables, write_page
from learner.data.toy import PROMPT, ToyData
from learner.models.families.qwen_vl import QwenImageRule
from learner.models.load import read_processor
from learner.models.prompts import PromptEncoder
from learner.stages.targets import build_ground_truth_target
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.data_files import LYING, box, lengths_of, line, paint, paint_all, write_lines
from tests.unit.refusals import refused


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Ten lines; the second image is stored lying."""
    paint_all(tmp_path, [f"{n}.png" for n in range(10)])
    paint(tmp_path / "lying.jpg", (64, 48), orientation=LYING)
    lines = [line(f"{n}.png", box(f"cat <{n}>", 10, 10, 500, 500)) for n in range(10)]
    lines[1] = line("lying.jpg", box("dog \ue000", 10, 10, 500, 500), size=(48, 64))
    return read_samples(write_lines(tmp_path / "train.jsonl", *lines), allow_poly=True)


def names(samples: list[Sample]) -> list[int]:
    return [int(sample.sample_id.rpartition(":")[2]) for sample in samples]


def test_a_seed_chooses_the_same_samples_in_the_order_of_the_file(samples: list[Sample]) -> None:
    chosen = names(choose_samples(samples, None, 4, seed=1))
    assert chosen == names(choose_samples(samples, None, 4, seed=1)) == sorted(set(chosen))
    assert len({tuple(names(choose_samples(samples, None, 4, seed))) for seed in range(9)}) > 1
    assert names(choose_samples(samples, None, 99, seed=0)) == list(range(1, 11))


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images += [value or "" for key, value in attrs if key == "src"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_folder_of_pictures_has_a_page_that_needs_no_network(
    samples: list[Sample], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    odd = replace(samples[0], sample_id="a#b?c%20 d.jsonl:1")
    write_page([odd, *samples[1:3]], out)
    pictures = ["a#b?c%20 d-00001.png", "train-00002.png", "train-00003.png"]
    assert {path.name for path in out.iterdir()} == {"index.html", *pictures}
    text = (out / "index.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert list(map(unquote, page.images)) == pictures
    assert not set(page.images[0]) & set("#? "), "links are quoted"
    assert "cat <0> " in page.texts
    assert "dog \ue000 " in page.texts
    assert page.texts.count("1") == 3, "a label for each object"
    corners = "10 10 500 10 500 500 10 500"
    assert text.count(f'<polygon points="{corners}" stroke="black"') == 3
    assert f'<polygon points="{corners}" stroke="{colour_of("cat <0>")}"' in text
    assert not re.search(r"https?:|<script|<link", text)
    with Image.open(out / picture_name(samples[1])) as picture:
        assert picture.width / picture.height == 48 / 64, "upright, as the model sees it"


def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_written(
    samples: list[Sample], tmp_path: Path
) -> None:
    samples[2].images[0].write_text("no image")
    with refused(samples[2].sample_id):
        write_page(samples, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.part"))


SMALL = box("ball", 0, 0, 499, 499)  # about 32 x 24 of 64 x 48 pixels
LARGE = box("bus", 0, 0, 999, 999)


@pytest.fixture
def measured(tmp_path: Path) -> list[Sample]:
    """Samples of 0, 1 and 3 objects, one of them a polygon; the last image is large."""
    paint_all(tmp_path, ["a.png", "b.png", "c.png"])
    leaf = {"desc": "leaf [red]", "poly": [0, 0, 999, 0, 999, 333]}
    path = write_lines(
        tmp_path / "d.jsonl",
        line("a.png"),
        line("b.png", SMALL),
        line("c.png", LARGE, SMALL, leaf, size=(640, 480)),
    )
    return read_samples(path, allow_poly=True)


def printed(
    samples: list[Sample], lengths: SampleLengths | None = None, top: int = 20
) -> dict[str, list[list[str]]]:
    """Rows of words of each table, the first is the head; by title, or by number without one."""
    tables = {
        table.title or str(number): [table.columns, *table.rows]
        for number, table in enumerate(stats_tables(samples, lengths, top), start=1)
    }
    return {title: [" ".join(map(str, r)).split() for r in rows] for title, rows in tables.items()}


def test_objects_descriptions_and_image_sizes_are_counted(measured: list[Sample]) -> None:
    tables = printed(measured)
    assert tables["1"][1] == ["3", "3", "4", "3", "1", "1", "(33.3%)"]
    assert tables["3 descriptions"][1:] == [
        ["2", "50.0%", "ball"],
        ["1", "25.0%", "bus"],
        ["1", "25.0%", "leaf", "[red]"],
    ]
    assert tables["2 image sizes"][1] == ["2", "66.7%", "64x48"]
    first = printed(measured, top=1)["3 descriptions"]
    assert first[1:] == [["2", "50.0%", "ball"], ["2", "50.0%", "(2", "others)"]]


def test_tokens_are_compared_with_limits(scenes: list[Sample], toy_checkpoint: Path) -> None:
    free = lengths_of(toy_checkpoint, TokenLimits(1, None))
    targets = [free.target(sample) for sample in scenes]
    pack = max(free.prompt(sample) + free.target(sample) for sample in scenes)
    shortest, longest = min(targets), max(targets)
    over = sum(target > shortest for target in targets)
    assert 0 < over < 24

    rows = printed(scenes, lengths_of(toy_checkpoint, TokenLimits(shortest, pack)))[
        "Tokens of a sample"
    ]
    assert rows[1][0] == "target"
    assert rows[1][3:] == [str(longest), str(shortest), str(over), f"({over / 24:.1%})"]
    assert rows[4][:3] == ["prompt", "and", "target"]
    assert rows[4][-2:] == [str(pack), "0"]


SYSTEM = "Answer in JSON."


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
    lengths = lengths_of(toy_checkpoint, TokenLimits(1, None), PROMPT, SYSTEM)
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
