"""COCO instances become a data file; what cannot be taken over is counted by a rule."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask

from learner.data.coco import read_coco
from learner.data.conversion import Conversion, convert, read_other, write_records
from learner.data.jsonl import read_samples
from learner.data.records import Order, Rule, Scale
from learner.data.toy import make_data
from learner.stages.matching import covers_a_pixel
from learner.types import GeometryKind
from shared_contracts.errors import ContractError
from tests.unit.data_files import paint, paint_all
from tests.unit.refusals import refused

pytestmark = pytest.mark.req("DATA-01", "DATA-02", "IO-01")

SIZE = (640, 480)
NAN = math.nan
CATEGORIES = [{"id": 17, "name": "dog"}, {"id": 18, "name": "cat"}]


def image(number: int, name: str = "a.png", size: tuple[int, int] = SIZE) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": size[0], "height": size[1], "license": 3}


def cat(*bbox: float | str, **changes: Any) -> dict[str, Any]:
    return {"id": 7, "image_id": 1, "category_id": 18, "bbox": bbox, **changes}


GOOD = cat(64, 48, 320, 240, id=1)
BINS = [100, 100, 599, 599]


def written(folder: Path, document: Any) -> Path:
    path = folder / "instances.json"
    path.write_text(json.dumps(document))
    return path


def converted(
    folder: Path, *annotations: Any, images: Any = None, categories: Any = CATEGORIES, **wanted: Any
) -> Conversion:
    """Do what `learner data convert` does with a file beside the images."""
    listed = [image(1)] if images is None else images
    document = {"images": listed, "annotations": annotations, "categories": categories}
    source = read_coco(written(folder, document), folder)
    return convert(source, folder / "out.jsonl", **wanted)


def geometries(conversion: Conversion) -> list[list[int]]:
    """Coordinates of the objects of the one record."""
    (record,) = conversion.records
    return [next(value for key, value in o.items() if key != "desc") for o in record["objects"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    for name in ("a.png", "b.png"):
        Image.new("1", SIZE).save(folder / name)  # decoded in no time
    return folder


@pytest.mark.parametrize(
    ("annotation", "rule"),
    [
        (cat(1, 1, 50, 50, iscrowd=1), Rule.CROWD),
        (cat(1, 1, 50, 50, category_id=99), Rule.UNKNOWN_CATEGORY),
        (cat(1, 1, 50, 50, category_id=20.5), Rule.UNKNOWN_CATEGORY),
        (cat(1, 1, 50, 50, category_id=19), Rule.NO_NAME),
        (cat(1, 1, 50, 50, image_id=99), Rule.UNKNOWN_IMAGE),
        (cat(1, 1, 50, -50), Rule.NO_AREA),
        (cat(640, 1, 50, 50), Rule.OUTSIDE),
        (cat(1e308, 1e308, 1e308, 1e308), Rule.OUTSIDE),
        (cat(100, 100, 0.2, 50), Rule.THIN),
        (cat(63.99, 48, 320, 240), Rule.DUPLICATE),
        (cat(1, 2, 3, "xxx"), Rule.UNUSABLE),
        (cat(1, 2, 3, NAN), Rule.UNUSABLE),
        (cat(), Rule.UNUSABLE),
        (cat(segmentation={"size": [480, 640], "counts": [1, 2, 3]}), Rule.UNUSABLE),
        (17, Rule.UNUSABLE),
    ],
)
def test_an_annotation_that_shows_no_object_is_left_out(
    folder: Path, annotation: Any, rule: Rule
) -> None:
    categories = [*CATEGORIES, {"id": 19, "name": "<|im_end|>"}, {"id": 20.5, "name": "a"}]
    conversion = converted(folder, GOOD, annotation, categories=categories)
    assert geometries(conversion) == [BINS]
    assert conversion.account.counts == {rule: 1}
    assert annotation == 17 or conversion.account.first[rule].startswith("annotation 7")
    (left,) = conversion.account.left_out
    assert (left["annotation_id"], left["reason"]) == (None if annotation == 17 else 7, rule.what)


COLUMNS = [480 * 64 + 48, *[240, 240] * 319, 240, 480 * 256 + 192]
RLE = {"size": [480, 640], "counts": COLUMNS}
COMPRESSED = mask.frPyObjects(RLE, 480, 640)["counts"].decode()


@pytest.mark.parametrize(
    ("annotation", "bins", "rules"),
    [
        (cat(-64, 48, 128, 999), [0, 100, 100, 999], [Rule.CLIPPED]),
        (cat(0.005 - 0.01, 0, 640.009, 480.004), [0, 0, 999, 999], []),
        (cat(segmentation=[[64, 48, 384, 48, 384, 288, 64, 288]]), BINS, [Rule.NO_BOX]),
        (cat(segmentation=RLE), BINS, [Rule.NO_BOX]),
        (cat(segmentation=RLE | {"counts": COMPRESSED}), BINS, [Rule.NO_BOX]),
    ],
)
def test_a_box_is_clipped_or_that_of_the_mask(
    folder: Path, annotation: Any, bins: list[int], rules: list[Rule]
) -> None:
    conversion = converted(folder, annotation)
    assert geometries(conversion) == [bins]
    assert list(conversion.account.counts) == rules


@pytest.mark.parametrize(
    ("scale", "sides"), [(None, (1, 1)), ("0..1", SIZE), ("0..1000", (0.64, 0.48))]
)
def test_boxes_of_another_scale_and_order_are_read_if_they_are_stated(
    folder: Path, scale: Scale | None, sides: tuple[float, float]
) -> None:
    """Corners that are not stated are named; a mask is always in pixels."""
    corners = [64, 48, 384, 288], [320, 240, 640, 480], [0, 240, 320, 480], [320, 0, 640, 240]
    stated = [
        [x1 / sides[0], y1 / sides[1], x2 / sides[0], y2 / sides[1]] for x1, y1, x2, y2 in corners
    ]
    annotations = [cat(*box, id=n) for n, box in enumerate([*stated, stated[1]])]
    annotations[0] |= {"bbox": None, "segmentation": RLE}
    found = geometries(converted(folder, *annotations, scale=scale, corners="xyxy"))
    assert found == [BINS, [500, 500, 999, 999], [0, 500, 500, 999], [500, 0, 999, 500]]
    annotations[0] |= {"bbox": stated[0]}
    with refused("--boxes", "4 of 5 boxes leave their images, and as xyxy 0"):
        converted(folder, *annotations, scale=scale)
    assert converted(folder, *annotations, scale=scale, corners="xywh").objects == 4


def test_fractions_that_are_not_stated_are_named(folder: Path) -> None:
    with refused("--scale", "no number of 5 boxes is above 1", "--scale 0..1"):
        converted(folder, *[cat(0.1, 0.1, 0.5, 0.5 + n / 9) for n in range(5)])


def test_an_image_whose_annotations_were_all_left_out_does_not_become_a_negative(
    folder: Path,
) -> None:
    images = [image(1), image(2, "b.png")]
    conversion = converted(folder, cat(9, 9, 90, 90, iscrowd=1), images=images)
    assert [record["metadata"]["image_id"] for record in conversion.records] == [2]
    assert conversion.account.counts == {Rule.CROWD: 1, Rule.ALL_LEFT_OUT: 1, Rule.EMPTY_IMAGE: 1}
    assert conversion.account.first[Rule.ALL_LEFT_OUT] == "a.png"


def test_annotations_of_which_no_object_comes_are_refused(folder: Path, tmp_path: Path) -> None:
    conversion = converted(folder, cat(9, 9, 90, 90, image_id="1"))
    assert len(conversion.records) == 1
    with pytest.raises(ContractError, match="no object came of 1 annotations"):
        write_records(conversion, tmp_path / "o.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_images_that_no_run_could_read_are_left_out_with_their_annotations(tmp_path: Path) -> None:
    paint(tmp_path / "good.png", SIZE)
    paint(tmp_path / "small.png", (64, 48))
    (tmp_path / "text.png").write_text("no image")
    names = ["gone", "small", "text", "a\0", "good"]
    images = [image(n, f"{name}.png") for n, name in enumerate(names)]
    annotations = [cat(64, 48, 320, 240, image_id=n, id=i) for i, n in enumerate((0, 0, 1, 2, 4))]
    conversion = converted(tmp_path, *annotations, images=images)
    assert [record["images"] for record in conversion.records] == [["good.png"]]
    assert conversion.account.counts == {
        Rule.MISSING_IMAGE: 2,
        Rule.OTHER_SIZE: 1,
        Rule.UNREADABLE_IMAGE: 1,
        Rule.OF_IMAGE_LEFT_OUT: 4,
    }
    assert conversion.account.first[Rule.OTHER_SIZE] == "small.png"


def test_an_image_without_objects_is_kept_unless_it_is_to_be_skipped(folder: Path) -> None:
    kept = converted(folder)
    assert [record["objects"] for record in kept.records] == [[]]
    assert kept.account.counts == {Rule.EMPTY_IMAGE: 1}
    skipped = converted(folder, skip_empty=True)
    assert (skipped.records, skipped.account.counts) == ([], {Rule.SKIPPED_IMAGE: 1})
    with pytest.raises(ContractError, match="no image is left to write"):
        write_records(skipped, folder / "none.jsonl")


@pytest.mark.parametrize(
    ("order", "descriptions"),
    [("file", [0, 1, 2]), ("left-to-right", [1, 2, 0]), ("top-to-bottom", [2, 0, 1])],
)
def test_objects_have_the_requested_order(
    folder: Path, order: Order, descriptions: list[int]
) -> None:
    boxes = [cat(300, 200, 9, 9), cat(10, 300, 9, 9), cat(100, 20, 9, 9)]
    plain = geometries(converted(folder, *boxes))
    ordered = geometries(converted(folder, *boxes, order=order))
    assert ordered == [plain[index] for index in descriptions]


TRIANGLE = [64.0, 48.0, 384.0, 48.0, 64.0, 288.0]
ODD = [-64.0, 48.0, 384.0, 48.0, 383.9, 48.1, 64.0, 999.0, -64.0, 48.0]


@pytest.mark.parametrize(
    ("segmentation", "object", "rules"),
    [
        ([TRIANGLE], {"poly": [100, 100, 599, 100, 100, 599]}, []),
        # Repeated points are one, and those outside are moved.
        ([ODD], {"poly": [599, 100, 100, 999, 0, 100]}, [Rule.CLIPPED]),
        *(
            (segmentation, {"bbox_2d": BINS}, [Rule.NO_POLYGON])
            for segmentation in (
                None,
                [TRIANGLE, TRIANGLE],
                [TRIANGLE[:5]],
                [[*TRIANGLE, "1", "2"]],
                [[*TRIANGLE, 10**400, 2]],
                [[10.0, 10.0, 200.0, 10.0, 300.0, 10.0]],
                [[-10.0, 10.0, -20.0, 10.0, -15.0, 200.0]],
            )
        ),
    ],
)
def test_the_one_polygon_of_an_object_is_taken_or_its_box(
    folder: Path, segmentation: Any, object: dict[str, list[int]], rules: list[Rule]
) -> None:
    conversion = converted(folder, GOOD | {"segmentation": segmentation}, geometry="poly")
    (record,) = conversion.records
    assert record["objects"] == [{"desc": "cat", **object}]
    assert list(conversion.account.counts) == rules


def test_an_export_into_a_relative_folder_names_its_images_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = make_data(Path("toy"), train=1, val=1, seed=0)
    (picture,) = read_coco(toy.coco_val, Path()).pictures
    assert picture.name == "images/val/00000.png"


EDGES = st.floats(-200, 800) | st.sampled_from([-1e308, 0.0, 640.0, 480.0, 1e308])
ANNOTATIONS = st.builds(
    lambda bbox, **changes: cat(*bbox, **changes),
    st.tuples(EDGES, EDGES, EDGES, EDGES),
    image_id=st.sampled_from([1, 1, 1, 2, 3]),
    category_id=st.sampled_from([17, 18, 18, 99]),
    iscrowd=st.sampled_from([0, 0, 0, 1]),
    segmentation=st.none()
    | st.just({"counts": [1]})
    | st.lists(st.lists(EDGES, max_size=9), max_size=2),
)


@given(annotations=st.lists(ANNOTATIONS, max_size=4), geometry=st.sampled_from(["bbox_2d", "poly"]))
def test_every_annotation_is_an_object_or_counted_and_the_file_is_valid(
    folder: Path, annotations: list[dict[str, Any]], geometry: GeometryKind
) -> None:
    images = [image(1), image(2, "gone.png")]
    conversion = converted(folder, *annotations, images=images, geometry=geometry)
    account = conversion.account
    left_out = sum(
        count
        for rule, count in account.counts.items()
        if rule.what.startswith("annotations") and rule.done == "left out"
    )
    assert conversion.objects + left_out == len(annotations)
    assert len(account.left_out) == left_out
    if not conversion.objects:
        return
    write_records(conversion, folder / "out.jsonl")
    (sample,) = read_samples(folder / "out.jsonl", allow_poly=geometry == "poly")
    assert all(covers_a_pixel(o.shape, 256) for o in sample.objects)


def test_image_paths_start_at_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "lists").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "photos" / "a")
    paint_all(tmp_path / "photos", ["a/x.png"])
    document = {"images": [image(1, "x.png", (64, 48))], "annotations": [], "categories": []}
    listed = written(link, document)
    for out, path in (
        (tmp_path / "lists" / "o.jsonl", "../photos/a/x.png"),
        (link / "o.jsonl", "x.png"),
    ):
        conversion = convert(read_coco(listed, link), out)
        assert conversion.records[0]["images"] == [path]
        write_records(conversion, out)
        assert read_samples(out, allow_poly=False)


@pytest.mark.parametrize(
    ("file", "names"),
    [("instances_train2017.json", "{}.png"), ("lvis_v1_train.json", "train2017/{}.png")],
)
def test_images_are_found_in_the_layout_of_coco(tmp_path: Path, file: str, names: str) -> None:
    """Also if the first image is lost."""
    lists, photos = tmp_path / "annotations", tmp_path / "train2017"
    lists.mkdir()
    photos.mkdir()
    paint_all(photos, ["x.png"])
    lost = names.format("lost" * 99)  # too long for a file
    images = [image(1, lost, (64, 48)), image(2, names.format("x"), (64, 48))]
    document = {"images": images, "annotations": [], "categories": []}
    (lists / file).write_text(json.dumps(document))
    out = tmp_path / "own" / "data.jsonl"
    conversion = convert(read_other(lists / file, "coco"), out)
    assert [each["images"] for each in conversion.records] == [["../train2017/x.png"]]


EMPTY = {"images": [image(1)], "annotations": [], "categories": []}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{}", "it has no lists of images, annotations and categories"),
        (json.dumps([cat(1, 2, 3, 4, score=0.5)]), "a file of results"),
        (json.dumps({**EMPTY, "annotations": [{"segments_info": []}]}), "a panoptic file"),
        (json.dumps({**EMPTY, "images": [image(1), image(1, "b.png")]}), r"ids given twice: \[1\]"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "it cannot be read"),
        ('{"annotations": [1], "annotations": []}', 'the key "annotations" is given 2 times'),
        (None, "there is no such file"),
    ],
)
def test_other_files_than_coco_are_refused(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "coco.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    with pytest.raises(ContractError, match=found) as caught:
        read_coco(path, tmp_path)
    assert caught.value.where.startswith(str(path))
    assert caught.value.do


@pytest.mark.parametrize(
    "wrong", [17, {"id": 2}, {"file_name": "b.png"}, image(2, ""), image(2) | {"id": [2]}]
)
def test_an_unusable_image_record_is_left_out(folder: Path, wrong: Any) -> None:
    conversion = converted(folder, GOOD, images=[image(1), wrong])
    assert geometries(conversion) == [BINS]
    assert conversion.account.counts == {Rule.BAD_IMAGE: 1}


@pytest.mark.parametrize("size", [{}, {"width": 0, "height": 480}])
def test_a_size_that_is_not_stated_is_that_of_the_image(folder: Path, size: Any) -> None:
    conversion = converted(folder, GOOD, images=[{"id": 1, "file_name": "a.png", **size}])
    assert geometries(conversion) == [BINS]


def test_two_records_of_one_image_are_one_sample(folder: Path) -> None:
    """Ids given twice are counted; names of Windows have other separators; a size is stated once.

    A record of another size is left out.
    """
    small = {"image_id": 4, "bbox": [0, 0, 1, 1]}
    annotations = [GOOD, cat(0, 0, 64, 48, image_id=2, id=1), GOOD | {"id": 2} | small]
    images = [image(1, str(folder / "a.png")), image(2, ".\\a.png"), image(4, "a.png", (64, 48))]
    del images[0]["width"]
    for one, ids in zip(images, ([17], [17, 18], [17]), strict=True):
        one["neg_category_ids"] = ids
    conversion = converted(folder, *annotations, images=images)
    assert geometries(conversion) == [BINS, [0, 0, 100, 100]]
    assert conversion.records[0]["metadata"]["neg_categories"] == ["dog", "cat"]
    counts = {Rule.REPEATED_IMAGE: 1, Rule.REPEATED_ID: 1}
    left_out = {Rule.OTHER_SIZE: 1, Rule.OF_IMAGE_LEFT_OUT: 1}
    assert conversion.account.counts == counts | left_out
