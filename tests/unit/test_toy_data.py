"""The toy scenes: the same each time, in the data format, boxes around what is drawn.

With polygons, corners of what is drawn, too.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from learner.data.jsonl import bounding_box, read_samples
from learner.data.toy import (
    DESCRIPTIONS,
    IMAGE_SIDE,
    MAX_OBJECTS,
    SceneObject,
    ToyData,
    make_data,
    make_scene,
)
from learner.stages.tokens import decode_bin
from shared_contracts.errors import ContractError


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    return make_data(tmp_path_factory.mktemp("toy") / "data", train=30, val=20, seed=0)


@pytest.fixture(scope="module")
def poly_toy(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    out = tmp_path_factory.mktemp("toy") / "poly"
    return make_data(out, train=30, val=20, seed=0, polygons=True)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_same_seed_gives_the_same_bytes(toy: ToyData, tmp_path: Path) -> None:
    make_data(tmp_path / "again", train=30, val=20, seed=0)
    assert contents(tmp_path / "again") == contents(toy.train_jsonl.parent)
    splits = (read_samples(each, allow_poly=False) for each in (toy.train_jsonl, toy.val_jsonl))
    train, val = ({sample.objects for sample in split} for split in splits)
    assert not train & val


@pytest.mark.req("DATA-01")
def test_the_files_are_in_the_data_format_with_paths_relative_to_them(toy: ToyData) -> None:
    samples = read_samples(toy.val_jsonl, allow_poly=False)
    assert len(samples) == 20
    assert all(1 <= len(s.objects) <= MAX_OBJECTS for s in samples)
    assert {o.desc for s in samples for o in s.objects} <= set(DESCRIPTIONS)
    first = json.loads(toy.val_jsonl.read_text().splitlines()[0])
    assert first["images"] == ["images/val/00000.png"]
    with Image.open(samples[0].images[0]) as image:
        assert image.size == (samples[0].width, samples[0].height)


def drawn_scenes() -> Iterator[tuple[npt.NDArray[np.bool_], list[SceneObject]]]:
    """Where 50 scenes have anything but background, and their objects."""
    for seed in range(50):
        image, objects = make_scene(np.random.default_rng(seed))
        pixels = np.asarray(image)
        yield (pixels != pixels[..., :1]).any(axis=-1), objects


def test_boxes_hold_exactly_the_drawn_pixels_and_come_from_the_left() -> None:
    for drawn, objects in drawn_scenes():
        assert [o.box for o in objects] == sorted(o.box for o in objects)
        for o in objects:
            x1, y1, x2, y2 = o.box
            inside = drawn[y1:y2, x1:x2]
            edges = (inside[0], inside[-1], inside[:, 0], inside[:, -1])
            assert all(edge.any() for edge in edges)
            drawn[y1:y2, x1:x2] = False
        assert not drawn.any()


@pytest.mark.req("DATA-01", "RES-02")
def test_with_polygons_a_triangle_is_its_corners_and_all_else_stays(
    toy: ToyData, poly_toy: ToyData
) -> None:
    images = [contents(t.train_jsonl.parent / "images") for t in (toy, poly_toy)]
    assert images[0] == images[1]
    boxes, shapes = (
        [o for s in read_samples(t.train_jsonl, allow_poly=True) for o in s.objects]
        for t in (toy, poly_toy)
    )
    assert [o.desc for o in shapes] == [o.desc for o in boxes]
    for box, item in zip(boxes, shapes, strict=True):
        if "triangle" in item.desc:
            assert (item.shape.kind, len(item.shape.coords)) == ("poly", 6)
            assert bounding_box(item.shape) == box.shape.coords
        else:
            assert item == box
    assert {o.shape.kind for o in shapes} == {"bbox_2d", "poly"}


def test_corners_enclose_what_is_drawn() -> None:
    for drawn, objects in drawn_scenes():
        for o in objects:
            x1, y1, x2, y2 = o.box
            mask = np.zeros_like(drawn)
            mask[y1:y2, x1:x2] = drawn[y1:y2, x1:x2]
            flat = o.corners or (x1, y1, x2, y1, x2, y2, x1, y2)
            code = coco_mask.frPyObjects([list(flat)], IMAGE_SIDE, IMAGE_SIDE)
            inside = coco_mask.decode(code)[..., 0].astype(bool)
            assert (inside & mask).sum() > 0.9 * (inside | mask).sum()


@pytest.mark.req("DATA-02", "IO-01")
def test_pycocotools_reads_the_export_of_boxes_and_polygons(poly_toy: ToyData) -> None:
    coco = COCO(str(poly_toy.coco_val))
    truths = [o for s in read_samples(poly_toy.val_jsonl, allow_poly=True) for o in s.objects]
    for annotation, item in zip(coco.loadAnns(coco.getAnnIds()), truths, strict=True):
        assert ("segmentation" in annotation) == (item.shape.kind == "poly")
        x, y, width, height = annotation["bbox"]
        corners = (n / IMAGE_SIDE for n in (x, y, x + width, y + height))
        assert [*corners] == pytest.approx([decode_bin(k) for k in bounding_box(item.shape)])
        assert coco.cats[annotation["category_id"]]["name"] == item.desc
        if item.shape.kind == "bbox_2d":
            continue
        assert annotation["area"] == pytest.approx(width * height / 2)
        assert coco.annToMask(annotation).sum() == pytest.approx(width * height / 2, rel=0.1)
        (flat,) = annotation["segmentation"]
        assert (min(flat[0::2]), min(flat[1::2])) == pytest.approx((x, y))


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ContractError, match="it has no name"):
        make_data(Path("."), train=1, val=1, seed=0)
    with pytest.raises(ContractError, match="not an empty directory"):
        make_data(tmp_path, train=1, val=1, seed=0)
    assert contents(tmp_path) == {"kept": b""}
