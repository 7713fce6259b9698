"""The crowded world: many shapes that overlap and repeat, listed in no order (WORLD-01)."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from learner.commands.data import toy_app
from learner.data.jsonl import read_samples
from learner.data.toy import (
    CROWDED_SIDE,
    DESCRIPTIONS,
    FEWEST,
    FEWEST_DISTINCT,
    LARGEST,
    MOST,
    MOST_KINDS,
    SMALLEST,
    Box,
    Scene,
    make_crowded_scene,
    make_data,
    make_distinct_scene,
)
from shared_contracts.errors import ContractError

pytestmark = pytest.mark.req("WORLD-01")


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [make_crowded_scene(np.random.default_rng(seed)) for seed in range(100)]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_scenes_have_many_objects_of_few_kinds_and_many_sizes_that_overlap(
    scenes: list[Scene],
) -> None:
    counts = {len(objects) for _, objects in scenes}
    assert (min(counts), max(counts)) == (FEWEST, MOST)
    kinds = [{o.desc for o in objects} for _, objects in scenes]
    assert max(map(len, kinds)) <= MOST_KINDS < FEWEST, "one of them repeats"
    longer = [max(o.box[2] - o.box[0], o.box[3] - o.box[1]) for _, all_ in scenes for o in all_]
    assert (min(longer), max(longer)) == (SMALLEST, LARGEST)
    assert min(np.histogram(longer, [SMALLEST, 12, 24, 48, LARGEST])[0]) >= 0.1 * len(longer)
    pairs = [pair for _, objects in scenes for pair in combinations(objects, 2)]
    of_one_kind = [a.desc == b.desc for a, b in pairs if overlap(a.box, b.box)]
    assert len(of_one_kind) > 3 * len(scenes)
    assert sum(of_one_kind) > len(scenes)


def test_a_distinct_scene_has_one_object_of_each_of_its_kinds() -> None:
    distinct = [make_distinct_scene(np.random.default_rng(seed)) for seed in range(50)]
    counts = {len(objects) for _, objects in distinct}
    assert counts == {*range(FEWEST_DISTINCT, len(DESCRIPTIONS) + 1)}
    for image, objects in distinct:
        assert image.size == (CROWDED_SIDE, CROWDED_SIDE)
        assert len({o.desc for o in objects}) == len(objects)


def test_a_box_is_that_of_what_is_seen(scenes: list[Scene]) -> None:
    """Each side of a box touches a pixel of the object's colour or outline."""
    for image, objects in scenes:
        pixels = np.asarray(image)
        grey = (pixels == pixels[..., :1]).all(axis=-1)
        shown = ~grey | (pixels == 0).all(axis=-1)
        for o in objects:
            x1, y1, x2, y2 = o.box
            inside = shown[y1:y2, x1:x2]
            assert all(e.any() for e in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))


def test_the_same_seed_gives_the_same_bytes_and_more_scenes_keep_the_first(tmp_path: Path) -> None:
    few = make_data(tmp_path / "few", 3, 2, seed=1, world="crowded")
    more = make_data(tmp_path / "more", 4, 2, seed=1, world="crowded")
    assert more.train_jsonl.read_bytes().startswith(few.train_jsonl.read_bytes())
    assert more.val_jsonl.read_bytes() == few.val_jsonl.read_bytes()
    name = "images/train/00002.png"
    assert (tmp_path / "few" / name).read_bytes() == (tmp_path / "more" / name).read_bytes()
    (first, *_) = read_samples(few.train_jsonl, allow_poly=False)
    assert (first.width, first.height) == (CROWDED_SIDE, CROWDED_SIDE)


def test_unlabelled_objects_are_drawn_and_left_out_of_the_training_lines_alone(
    tmp_path: Path,
) -> None:
    options = ["--train", "40", "--val", "5", "--world", "crowded"]
    for name, share in (("all", "0"), ("some", "0.3")):
        argv = ["make-data", "--out", str(tmp_path / name), *options, "--unlabelled", share]
        toy_app(argv, standalone_mode=False)

    def objects(name: str, split: str) -> list[list[dict[str, object]]]:
        lines = (tmp_path / name / f"{split}.jsonl").read_text().splitlines()
        return [json.loads(line)["objects"] for line in lines]

    assert objects("some", "val") == objects("all", "val")
    image = "images/train/00000.png"
    assert (tmp_path / "some" / image).read_bytes() == (tmp_path / "all" / image).read_bytes()
    whole, left = objects("all", "train"), objects("some", "train")
    for before, after in zip(whole, left, strict=True):
        assert [o for o in before if o in after] == after, "the order stays"
        assert after
    left_out = 1 - sum(map(len, left)) / sum(map(len, whole))
    assert 0.25 < left_out < 0.35


def test_polygons_whose_parts_are_hidden_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="parts of triangles are hidden"):
        make_data(tmp_path / "out", 1, 1, 0, world="crowded", polygons=True)
    assert not (tmp_path / "out").exists()
