"""What `learner data look` counts."""

from pathlib import Path

import pytest

from learner.data.jsonl import read_samples
from learner.data.lengths import SampleLengths, TokenLimits
from learner.data.stats import stats_tables
from learner.data.toy import ToyData
from learner.types import Sample
from tests.unit.data_files import box, lengths_of, line, paint_all, write_lines

SMALL = box("ball", 0, 0, 499, 499)  # about 32 x 24 of 64 x 48 pixels
LARGE = box("bus", 0, 0, 999, 999)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
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
    return {
        title: [" ".join(map(str, row)).split() for row in rows] for title, rows in tables.items()
    }


def test_objects_descriptions_and_image_sizes_are_counted(samples: list[Sample]) -> None:
    tables = printed(samples)
    assert tables["1"][1] == ["3", "3", "4", "3", "1", "1", "(33.3%)"]
    assert tables["3 descriptions"][1:] == [
        ["2", "50.0%", "ball"],
        ["1", "25.0%", "bus"],
        ["1", "25.0%", "leaf", "[red]"],
    ]
    assert tables["2 image sizes"][1] == ["2", "66.7%", "64x48"]
    first = printed(samples, top=1)["3 descriptions"]
    assert first[1:] == [["2", "50.0%", "ball"], ["2", "50.0%", "(2", "others)"]]


def test_tokens_are_held_against_the_limits_of_a_run(
    toy_data: ToyData, toy_checkpoint: Path
) -> None:
    train = read_samples(toy_data.train_jsonl, allow_poly=False)
    free = lengths_of(toy_checkpoint, TokenLimits(1, None))
    targets = [free.target(sample) for sample in train]
    pack = max(free.prompt(sample) + free.target(sample) for sample in train)
    shortest, longest = min(targets), max(targets)
    over = sum(target > shortest for target in targets)
    assert 0 < over < 24

    rows = printed(train, lengths_of(toy_checkpoint, TokenLimits(shortest, pack)))[
        "Tokens of a sample"
    ]
    assert rows[1][0] == "target"
    assert rows[1][3:] == [str(longest), str(shortest), str(over), f"({over / 24:.1%})"]
    assert rows[4][:3] == ["prompt", "and", "target"]
    assert rows[4][-2:] == [str(pack), "0"]
