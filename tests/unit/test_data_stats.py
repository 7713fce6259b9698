"""What `learner data look` counts."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from learner.data.jsonl import read_samples
from learner.data.lengths import SampleLengths, TokenLimits
from learner.data.stats import DataStats, collect, stats_tables
from learner.data.toy import ToyData
from learner.stages.formats.coord_json import serialize_objects
from tests.unit.data_files import box, line, paint_all, write_lines

SMALL = box("ball", 0, 0, 499, 499)  # about 32 x 24 of 64 x 48 pixels
LARGE = box("bus", 0, 0, 999, 999)


@pytest.fixture
def stats(tmp_path: Path) -> DataStats:
    """Samples of 0, 1 and 3 objects, one of them a polygon; the last image is large."""
    paint_all(tmp_path, ["a.png", "b.png", "c.png"])
    leaf = {"desc": "leaf [red]", "poly": [0, 0, 999, 0, 999, 333]}
    path = write_lines(
        tmp_path / "d.jsonl",
        line("a.png"),
        line("b.png", SMALL),
        line("c.png", LARGE, SMALL, leaf, size=(640, 480)),
    )
    return collect(read_samples(path, allow_poly=True), None)


def printed(stats: DataStats, top: int = 20) -> dict[str, list[list[str]]]:
    """Rows of words of each table, the first is the head; by title, or by number without one."""
    shown = {}
    for number, (title, table) in enumerate(stats_tables(stats, top), start=1):
        text = io.StringIO()
        Console(file=text, width=120).print(table)
        shown[title or str(number)] = [row.split() for row in text.getvalue().splitlines()]
    return shown


def test_objects_are_counted_by_sample_description_and_geometry(stats: DataStats) -> None:
    assert stats.objects.tolist() == [0, 1, 3]
    assert stats.descriptions == {"ball": 2, "bus": 1, "leaf [red]": 1}
    assert stats.geometries == {"bbox_2d": 3, "poly": 1}
    assert stats.image_sizes == {(64, 48): 2, (640, 480): 1}
    assert stats.images == 3


def test_boxes_are_measured_in_pixels_and_a_polygon_by_its_bounding_box(stats: DataStats) -> None:
    half = 499 / 999
    expected = [(64 * half, 48 * half), (640, 480), (640 * half, 480 * half), (640, 160)]
    assert stats.sides == pytest.approx(np.array(expected))
    assert stats.centres[3] == pytest.approx((0.5, 1 / 6))
    assert stats.aspects == pytest.approx([4 / 3, 4 / 3, 4 / 3, 4])


def test_the_tables_say_so(stats: DataStats) -> None:
    tables = printed(stats)
    assert tables["1"][1] == ["3", "3", "4", "3", "1", "1", "(33.3%)"]
    assert tables["2"][1] == ["objects", "per", "sample", "0", "1", "1.33", "2.80", "3"]
    assert tables["3 descriptions"][1:] == [
        ["2", "50.0%", "ball"],
        ["1", "25.0%", "bus"],
        ["1", "25.0%", "leaf", "[red]"],
    ]
    sizes = tables["Sizes as COCO parts them, of boxes"]
    assert [row[:3] for row in sizes[1:]] == [
        ["1", "25.0%", "small"],
        ["0", "0.0%", "medium"],
        ["3", "75.0%", "large"],
    ]
    centres = tables["Centres of the boxes, by thirds of the image"]
    assert centres[1] == ["top", "50.0%", "25.0%", "0.0%"]
    assert centres[2] == ["middle", "0.0%", "25.0%", "0.0%"]
    assert tables["2 image sizes"][1] == ["2", "66.7%", "64x48"]


def test_descriptions_below_the_top_are_summed_up(stats: DataStats) -> None:
    rows = printed(stats, top=1)["3 descriptions"]
    assert rows[1:] == [["2", "50.0%", "ball"], ["2", "50.0%", "(2", "others)"]]


def toy_stats(toy_data: ToyData, lengths: SampleLengths) -> DataStats:
    return collect(read_samples(toy_data.train_jsonl, allow_poly=False), lengths)


def test_tokens_are_held_against_the_limits_of_a_run(
    toy_data: ToyData, toy_checkpoint: Path
) -> None:
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go"}]}]

    def limited(limits: TokenLimits) -> SampleLengths:
        return SampleLengths(
            toy_checkpoint, lambda o: serialize_objects(o, "desc_first"), lambda _: prompt, limits
        )

    tokens = toy_stats(toy_data, limited(TokenLimits(1, None))).tokens
    assert tokens is not None
    assert tokens.prompt is not None
    shortest, longest = int(tokens.target.min()), int(tokens.target.max())
    pack = int((tokens.prompt + tokens.target).max())
    over = int((tokens.target > shortest).sum())
    assert 0 < over < 24

    rows = printed(toy_stats(toy_data, limited(TokenLimits(shortest, pack))))["Tokens of a sample"]
    assert rows[1][0] == "target"
    assert rows[1][3:] == [str(longest), str(shortest), str(over), f"({over / 24:.1%})"]
    assert rows[4][:3] == ["prompt", "and", "target"]
    assert rows[4][-2:] == [str(pack), "0"]


def test_a_checkpoint_alone_gives_targets_and_images(
    toy_data: ToyData, toy_checkpoint: Path
) -> None:
    lengths = SampleLengths(toy_checkpoint, lambda o: serialize_objects(o, "desc_first"))
    rows = printed(toy_stats(toy_data, lengths))["Tokens of a sample"]
    assert [row[0] for row in rows] == ["p50", "target", "images"]
    assert rows[2] == ["images", "16", "16", "16", "-", "-"]


def test_data_without_objects_has_statistics_too(tmp_path: Path) -> None:
    paint_all(tmp_path, ["a.png"])
    path = write_lines(tmp_path / "d.jsonl", line("a.png"))
    stats = collect(read_samples(path, allow_poly=False), None)
    assert list(printed(stats)) == ["1", "2", "1 image sizes"]
