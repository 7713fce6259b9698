"""Pictures of samples: the objects where they are, every label to be read."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image, ImageColor

from learner.data.jsonl import read_samples
from learner.data.preview import (
    LEAST,
    MOST,
    PALETTE,
    Box,
    choose,
    choose_lines,
    colour_of,
    draw,
    drawable,
    picture_name,
    place_labels,
    undrawable,
    write_preview,
)
from learner.stages.coords import decode_bin
from learner.types import GroundTruthObject, Sample, Shape
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.data_files import LYING, box, line, paint, paint_all, write_lines

GREY = (128, 128, 128)


def sample_of(*objects: GroundTruthObject) -> Sample:
    return Sample("d.jsonl:1", (), 640, 480, objects)


def cat(*coords: int, desc: str = "cat") -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("bbox_2d" if len(coords) == 4 else "poly", coords))


def drawn(*objects: GroundTruthObject, size: tuple[int, int] = (640, 480)) -> Image.Image:
    return draw(sample_of(*objects), Image.new("RGB", size, GREY))


def is_outlined(picture: Image.Image, x: int, y: int, desc: str = "cat") -> bool:
    """The colour of the description at this point, given in bins."""
    at = (
        round(decode_bin(x) * (picture.width - 1)),
        round(decode_bin(y) * (picture.height - 1)),
    )
    return picture.getpixel(at) == ImageColor.getrgb(colour_of(desc))


def test_a_box_is_outlined_where_it_is() -> None:
    picture = drawn(cat(200, 300, 600, 900))
    for x, y in ((200, 600), (600, 600), (400, 900), (500, 300)):
        assert is_outlined(picture, x, y)
    for x, y in ((400, 600), (100, 600), (700, 600)):
        at = (round(x / 999 * picture.width), round(y / 999 * picture.height))
        assert picture.getpixel(at) == GREY


def test_a_polygon_is_outlined_and_closed() -> None:
    picture = drawn(cat(100, 500, 500, 100, 900, 500, 500, 900))
    for x, y in ((300, 300), (700, 300), (700, 700), (300, 700)):
        assert is_outlined(picture, x, y)


@pytest.mark.parametrize(
    ("size", "longest"),
    [((64, 48), LEAST), ((1000, 1300), 1300), ((4000, 3000), MOST), ((1, 1), LEAST)],
)
def test_lines_and_labels_are_as_large_on_all_images(size: tuple[int, int], longest: int) -> None:
    picture = drawn(cat(200, 300, 600, 900), size=size)
    assert max(picture.size) == longest
    assert picture.width / picture.height == pytest.approx(size[0] / size[1], rel=0.01)


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def crowd(count: int) -> list[GroundTruthObject]:
    """Boxes on a grid, several of them around one spot."""
    grid = [
        cat(90 * i + 5, 160 * j + 5, 90 * i + 90, 160 * j + 150)
        for j in range(6)
        for i in (0, 2, 4, 6, 8)
    ]
    return grid[:count]


def test_thirty_labels_hide_none_of_each_other() -> None:
    labels = [label.box for label in place_labels(crowd(30), (1600, 900))]
    assert len(labels) == 30
    assert not any(overlap(a, b) for i, a in enumerate(labels) for b in labels[:i])


def test_labels_of_objects_in_one_spot_make_room_for_each_other() -> None:
    labels = [label.box for label in place_labels([cat(400, 400, 500, 500)] * 8, (1600, 900))]
    assert not any(overlap(a, b) for i, a in enumerate(labels) for b in labels[:i])


@pytest.mark.parametrize("corner", [(0, 0, 5, 5), (990, 0, 999, 5), (0, 990, 5, 999)])
def test_labels_stay_in_the_picture(corner: tuple[int, int, int, int]) -> None:
    long = cat(*corner, desc="a very long description of something small")
    ((x1, y1, x2, y2),) = [label.box for label in place_labels([long], (960, 720))]
    assert 0 <= x1 < x2 <= 960
    assert 0 <= y1 < y2 <= 720


@pytest.mark.parametrize(
    "coords", [(10, 2, 60, 20), (0, 0, 8, 8), (980, 985, 999, 999), (300, 400, 310, 410)]
)
def test_a_small_object_is_not_hidden_by_its_own_label(coords: tuple[int, ...]) -> None:
    x1, y1, x2, y2 = coords
    picture = drawn(cat(*coords, desc="a small cat"))
    across, down = (x1 + x2) // 2, (y1 + y2) // 2
    for x, y in ((x1, down), (x2, down), (across, y1), (across, y2)):
        assert is_outlined(picture, x, y, "a small cat")


def test_a_label_leaves_the_small_objects_beside_it_to_be_seen() -> None:
    picture = drawn(cat(400, 370, 410, 385), cat(400, 400, 600, 600))
    for x, y in ((400, 370), (410, 370), (400, 385), (410, 385)):
        assert is_outlined(picture, x, y)


def test_a_label_is_cut_to_the_width_of_the_picture() -> None:
    long = cat(100, 100, 900, 900, desc="a very long description of something")
    (label,) = place_labels([long], (200, 1000))
    assert label.text.startswith("1 a very long")
    assert label.text.endswith("…")
    assert 0 <= label.box[0] < label.box[2] < 200
    (number,) = place_labels([long], (12, 960))
    assert number.text == "1…"


def test_labels_number_the_objects_as_they_are_listed() -> None:
    labels = place_labels([cat(0, 0, 9, 9), cat(500, 500, 600, 600, desc="dog")], (960, 720))
    assert [label.text for label in labels] == ["1 cat", "2 dog"]


def test_a_description_keeps_its_colour() -> None:
    assert colour_of("cat") == colour_of("cat")
    assert {colour_of(f"thing {n}") for n in range(100)} == set(PALETTE)


def test_labels_stand_out_from_their_plates() -> None:
    """A contrast of 4.5 and more, as WCAG asks for text of this size."""

    def luminance(colour: str) -> float:
        rgb = np.array(ImageColor.getrgb(colour)[:3]) / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    for plate, ink in PALETTE.items():
        light, dark = sorted((luminance(plate), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, plate


def test_what_no_font_holds_is_spelt() -> None:
    assert drawable("a кошка") == drawable("a кошка")
    assert drawable("a кошка").missing == frozenset()
    private = drawable("x \U000f0000 y \ue000")
    assert private.text == "x \\U000f0000 y \\ue000"
    assert private.missing == {"\U000f0000", "\ue000"}
    assert drawable("a\nb\u200d\ufe0f").text == "a b"


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
    chosen = names(choose(samples, 4, seed=1))
    assert chosen == names(choose(samples, 4, seed=1)) == sorted(set(chosen))
    assert len({tuple(names(choose(samples, 4, seed))) for seed in range(9)}) > 1
    assert names(choose(samples, 99, seed=0)) == list(range(1, 11))


def test_lines_are_chosen_as_they_are_asked_for(samples: list[Sample]) -> None:
    assert names(choose_lines(samples, [7, 2])) == [7, 2]
    with pytest.raises(ContractErrors) as caught:
        choose_lines(samples, [0, 2, 11])
    assert [e.found for e in caught.value.errors] == ["there is no line 0", "there is no line 11"]


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
    write_preview(samples[:3], out)
    pictures = [f"train-0000{n}.png" for n in (1, 2, 3)]
    assert sorted(path.name for path in out.iterdir()) == ["index.html", *pictures]
    text = (out / "index.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert page.images == pictures
    assert "cat <0> " in page.texts
    assert "dog \ue000 " in page.texts
    assert not re.search(r"https?:|<script|<link", text)


def test_an_image_of_another_size_than_its_line_is_told(
    samples: list[Sample], tmp_path: Path
) -> None:
    lying = replace(samples[1], width=64, height=48)
    told = write_preview([samples[0], lying], tmp_path / "out")
    (sentence,) = told.values()
    assert list(told) == [lying.sample_id]
    assert sentence.startswith("width x height is 64x48, and image ")
    assert sentence.endswith("48x64 pixels once it is turned upright as its EXIF orientation says")
    page = _Page((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert page.texts.count(sentence) == 1


def test_links_of_the_page_are_quoted(samples: list[Sample], tmp_path: Path) -> None:
    odd = replace(samples[0], sample_id="a#b?c%20 d.jsonl:1")
    write_preview([odd], tmp_path / "out")
    (source,) = _Page((tmp_path / "out" / "index.html").read_text()).images
    assert (tmp_path / "out" / unquote(source)).is_file()
    assert not set(source) & set("#? ")


def test_an_image_is_drawn_upright_as_the_model_sees_it(
    samples: list[Sample], tmp_path: Path
) -> None:
    write_preview([samples[1]], tmp_path / "out")
    with Image.open(tmp_path / "out" / picture_name(samples[1])) as picture:
        assert picture.width / picture.height == 48 / 64


def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_written(
    samples: list[Sample], tmp_path: Path
) -> None:
    samples[2].images[0].write_text("no image")
    with pytest.raises(ContractError) as caught:
        write_preview(samples, tmp_path / "out")
    assert caught.value.where == samples[2].sample_id
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.part"))


def test_characters_without_a_font_are_told(samples: list[Sample]) -> None:
    assert undrawable(samples) == {"\ue000"}
    assert undrawable(samples[2:]) == frozenset()
