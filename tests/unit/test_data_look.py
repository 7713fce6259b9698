"""A page of samples: the objects where they are, each in the list beside it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

from learner.data.jsonl import read_samples
from learner.data.look import colour_of, picture_name, sample_subset, write_page
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.data_files import LYING, box, line, paint, paint_all, write_lines


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
    chosen = names(sample_subset(samples, 4, seed=1))
    assert chosen == names(sample_subset(samples, 4, seed=1)) == sorted(set(chosen))
    assert len({tuple(names(sample_subset(samples, 4, seed))) for seed in range(9)}) > 1
    assert names(sample_subset(samples, 99, seed=0)) == list(range(1, 11))


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
    with pytest.raises(ContractError) as caught:
        write_page(samples, tmp_path / "out")
    assert caught.value.where == samples[2].sample_id
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.part"))
