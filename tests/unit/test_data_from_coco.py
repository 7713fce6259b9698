"""COCO instances become a data file; what cannot be taken over is counted by a rule."""

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

from learner.data.account import Rule
from learner.data.check import check_files
from learner.data.coco import CocoFile, read_coco, to_coco
from learner.data.conversion import Conversion, Order, Wanted, convert, write_records
from learner.data.images import Looks
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.stages.coords import decode_bin
from learner.types import GeometryKind, GroundTruthObject, Sample, Shape
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.data_files import LYING, covers_a_pixel, paint, paint_all

pytestmark = pytest.mark.req("DATA-01", "DATA-02")

SIZE = (640, 480)
OF_ANNOTATIONS = (
    Rule.UNKNOWN_IMAGE,
    Rule.OF_IMAGE_LEFT_OUT,
    Rule.CROWD,
    Rule.UNKNOWN_CATEGORY,
    Rule.NO_AREA,
    Rule.OUTSIDE,
    Rule.THIN,
    Rule.DUPLICATE,
)


def unwatched(looks: Looks, count: int) -> Looks:
    return looks


def image(number: int, name: str = "a.png", size: tuple[int, int] = SIZE) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": size[0], "height": size[1], "license": 3}


def cat(*bbox: float | str, **changes: Any) -> dict[str, Any]:
    """An annotation of a cat in image 1."""
    return {"id": 7, "image_id": 1, "category_id": 18, "bbox": bbox, **changes}


def coco(annotations: list[dict[str, Any]], images: list[dict[str, Any]] | None = None) -> CocoFile:
    return CocoFile.model_validate(
        {
            "images": [image(1)] if images is None else images,
            "annotations": annotations,
            "categories": [{"id": 17, "name": "dog"}, {"id": 18, "name": "cat"}],
        }
    )


def read(folder: Path, *annotations: Any, images: Any = None) -> CocoFile:
    path = folder / "instances.json"
    categories = [{"id": 18, "name": "cat"}]
    document = {"images": images or [image(1)], "annotations": annotations}
    path.write_text(json.dumps(document | {"categories": categories}))
    return read_coco(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    Image.new("1", SIZE).save(folder / "a.png")  # decoded in no time
    return folder


def converted(
    folder: Path,
    file: CocoFile,
    geometry: GeometryKind = "bbox_2d",
    order: Order = "file",
    skip_empty: bool = False,
) -> Conversion:
    wanted = Wanted(folder, folder / "out.jsonl", geometry, order, skip_empty, covers_a_pixel)
    return convert(file, wanted, unwatched)


def geometries(conversion: Conversion) -> list[list[int]]:
    """Coordinates of the objects of the one record."""
    (record,) = conversion.records
    return [next(value for key, value in o.items() if key != "desc") for o in record["objects"]]


def test_an_annotation_becomes_an_object(folder: Path) -> None:
    conversion = converted(folder, coco([cat(64, 48, 320, 240)]))
    assert conversion.records == [
        {
            "images": ["a.png"],
            "width": 640,
            "height": 480,
            "objects": [{"desc": "cat", "bbox_2d": [100, 100, 599, 599]}],
            "metadata": {"image_id": 1},
        }
    ]
    assert not conversion.counts


@pytest.mark.parametrize(
    ("annotation", "rule"),
    [
        (cat(1, 1, 50, 50, iscrowd=1), Rule.CROWD),
        (cat(1, 1, 50, 50, category_id=99), Rule.UNKNOWN_CATEGORY),
        (cat(1, 1, 50, 50, image_id=99), Rule.UNKNOWN_IMAGE),
        (cat(1, 1, 0, 50), Rule.NO_AREA),
        (cat(1, 1, 50, -50), Rule.NO_AREA),
        (cat(640, 1, 50, 50), Rule.OUTSIDE),
        (cat(1, -90, 50, 90), Rule.OUTSIDE),
        (cat(1e308, 1e308, 1e308, 1e308), Rule.OUTSIDE),
        (cat(100, 100, 0.2, 50), Rule.THIN),
        (cat(100, 100, 50, 0.1), Rule.THIN),
    ],
)
def test_an_annotation_that_shows_no_object_is_left_out(
    folder: Path, annotation: dict[str, Any], rule: Rule
) -> None:
    conversion = converted(folder, coco([cat(64, 48, 320, 240), annotation]))
    assert geometries(conversion) == [[100, 100, 599, 599]]
    assert conversion.counts == {rule: 1}
    assert conversion.first == {rule: "annotation 7"}


def test_a_box_partly_outside_is_clipped_and_rounding_is_not_counted(folder: Path) -> None:
    conversion = converted(folder, coco([cat(-64, 48, 128, 999)]))
    assert geometries(conversion) == [[0, 100, 100, 999]]
    assert conversion.counts == {Rule.CLIPPED: 1}
    rounded = converted(folder, coco([cat(0.005 - 0.01, 0, 640.009, 480.004)]))
    assert geometries(rounded) == [[0, 0, 999, 999]]
    assert not rounded.counts


@pytest.mark.req("RES-20")
def test_two_forms_of_a_name_are_one_description(folder: Path) -> None:
    forms = [unicodedata.normalize(form, "café") for form in ("NFD", "NFC")]
    file = CocoFile.model_validate(
        {
            "images": [image(1)],
            "annotations": [cat(64, 48, 320, 240), cat(64, 48, 320, 240, id=8, category_id=17)],
            "categories": [{"id": 17, "name": forms[0]}, {"id": 18, "name": forms[1]}],
        }
    )
    conversion = converted(folder, file)
    (record,) = conversion.records
    assert [o["desc"] for o in record["objects"]] == ["caf\u00e9"]
    assert conversion.counts == {Rule.DUPLICATE: 1}


def test_an_annotation_like_another_in_every_bin_is_left_out(folder: Path) -> None:
    other = cat(64, 48, 320, 240, category_id=17)
    near = cat(63.99, 48, 320, 240, id=8)
    conversion = converted(folder, coco([cat(64, 48, 320, 240), other, near]))
    (record,) = conversion.records
    assert [o["desc"] for o in record["objects"]] == ["cat", "dog"]
    assert (conversion.counts, conversion.first) == (
        {Rule.DUPLICATE: 1},
        {Rule.DUPLICATE: "annotation 8"},
    )


def test_what_is_left_out_is_neither_clipped_nor_a_box_taken(folder: Path) -> None:
    whole = cat(-64, 48, 128, 240, segmentation=None)
    lost = [whole, cat(1, 1, 0, 9, segmentation=None)]
    conversion = converted(folder, coco([whole, *lost]), "poly")
    assert conversion.counts == {
        Rule.CLIPPED: 1,
        Rule.NO_SEGMENTATION: 1,
        Rule.DUPLICATE: 1,
        Rule.NO_AREA: 1,
    }


def test_an_image_whose_annotations_were_all_left_out_does_not_become_a_negative(
    folder: Path,
) -> None:
    images = [image(1), image(2)]
    conversion = converted(folder, coco([cat(9, 9, 90, 90, iscrowd=1)], images))
    assert [record["metadata"]["image_id"] for record in conversion.records] == [2]
    assert conversion.counts == {Rule.CROWD: 1, Rule.ALL_LEFT_OUT: 1, Rule.EMPTY_IMAGE: 1}
    assert conversion.first[Rule.ALL_LEFT_OUT] == "a.png"


def test_annotations_of_which_no_object_comes_are_refused(folder: Path, tmp_path: Path) -> None:
    conversion = converted(folder, coco([cat(9, 9, 90, 90, image_id="1")]))
    assert len(conversion.records) == 1
    with pytest.raises(ContractError, match="no object came of 1 annotations"):
        write_records(conversion, 1, tmp_path / "o.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_images_that_no_run_could_read_are_left_out_with_their_annotations(
    tmp_path: Path,
) -> None:
    paint(tmp_path / "good.png", SIZE)
    paint(tmp_path / "small.png", (64, 48))
    (tmp_path / "text.png").write_text("no image")
    images = [image(n, f"{name}.png") for n, name in enumerate(["gone", "small", "text", "good"])]
    annotations = [cat(64, 48, 320, 240, image_id=n) for n in (0, 0, 1, 2, 3)]
    conversion = converted(tmp_path, coco(annotations, images))
    assert [record["images"] for record in conversion.records] == [["good.png"]]
    assert conversion.counts == {
        Rule.MISSING_IMAGE: 1,
        Rule.OTHER_SIZE: 1,
        Rule.UNREADABLE_IMAGE: 1,
        Rule.OF_IMAGE_LEFT_OUT: 4,
    }
    assert conversion.first[Rule.OTHER_SIZE] == "small.png"


def test_a_file_name_no_system_has_is_of_a_missing_image(folder: Path) -> None:
    conversion = converted(folder, coco([], [image(1, "a\0.png"), image(2)]))
    assert conversion.counts[Rule.MISSING_IMAGE] == 1


def test_the_annotated_size_is_that_of_the_upright_image(tmp_path: Path) -> None:
    paint(tmp_path / "a.jpg", (64, 48), orientation=LYING)
    upright, stored = (
        converted(tmp_path, coco([], [image(1, "a.jpg", size)])) for size in ((48, 64), (64, 48))
    )
    assert len(upright.records) == 1
    assert stored.counts == {Rule.OTHER_SIZE: 1}


def test_an_image_without_objects_is_kept_unless_it_is_to_be_skipped(folder: Path) -> None:
    kept = converted(folder, coco([]))
    assert [record["objects"] for record in kept.records] == [[]]
    assert kept.counts == {Rule.EMPTY_IMAGE: 1}
    skipped = converted(folder, coco([]), skip_empty=True)
    assert skipped.records == []
    assert skipped.counts == {Rule.SKIPPED_IMAGE: 1}


@pytest.mark.parametrize(
    ("order", "descriptions"),
    [("file", [0, 1, 2]), ("left-to-right", [1, 2, 0]), ("top-to-bottom", [2, 0, 1])],
)
def test_objects_come_in_the_order_asked_for(
    folder: Path, order: Order, descriptions: list[int]
) -> None:
    boxes = [cat(300, 200, 9, 9), cat(10, 300, 9, 9), cat(100, 20, 9, 9)]
    plain = geometries(converted(folder, coco(boxes)))
    ordered = geometries(converted(folder, coco(boxes), order=order))
    assert ordered == [plain[index] for index in descriptions]


TRIANGLE = [64.0, 48.0, 384.0, 48.0, 64.0, 288.0]


def with_polygon(segmentation: Any) -> CocoFile:
    return coco([cat(64, 48, 320, 240, segmentation=segmentation)])


def test_the_one_polygon_of_an_object_is_taken(folder: Path) -> None:
    conversion = converted(folder, with_polygon([TRIANGLE]), "poly")
    (record,) = conversion.records
    assert record["objects"] == [{"desc": "cat", "poly": [100, 100, 599, 100, 100, 599]}]
    assert not conversion.counts


def test_repeated_points_of_a_polygon_are_one_and_those_outside_are_moved(folder: Path) -> None:
    points = [-64.0, 48.0, 384.0, 48.0, 383.9, 48.1, 64.0, 999.0, -64.0, 48.0]
    conversion = converted(folder, with_polygon([points]), "poly")
    assert geometries(conversion) == [[599, 100, 100, 999, 0, 100]]
    assert conversion.counts == {Rule.CLIPPED: 1}


@pytest.mark.parametrize(
    ("segmentation", "rule"),
    [
        (None, Rule.NO_SEGMENTATION),
        ([], Rule.NO_SEGMENTATION),
        ({"counts": "abc", "size": [480, 640]}, Rule.RUN_LENGTH),
        ([TRIANGLE, TRIANGLE], Rule.SEVERAL_POLYGONS),
        ([TRIANGLE[:5]], Rule.BAD_POLYGON),
        ([TRIANGLE[:4]], Rule.BAD_POLYGON),
        ([[*TRIANGLE, "1", "2"]], Rule.BAD_POLYGON),
        ([[*TRIANGLE, float("nan"), 2.0]], Rule.BAD_POLYGON),
        ([[*TRIANGLE, 10**400, 2]], Rule.BAD_POLYGON),
        (["polygon"], Rule.BAD_POLYGON),
        (3, Rule.BAD_POLYGON),
        ([[10.0, 10.0, 200.0, 10.0, 300.0, 10.0]], Rule.THIN_POLYGON),
        ([[10.0, 10.0, 10.1, 10.0, 10.0, 10.1]], Rule.THIN_POLYGON),
        ([[-10.0, 10.0, -20.0, 10.0, -15.0, 200.0]], Rule.THIN_POLYGON),
    ],
)
def test_the_box_is_taken_where_there_is_no_one_polygon(
    folder: Path, segmentation: Any, rule: Rule
) -> None:
    conversion = converted(folder, with_polygon(segmentation), "poly")
    (record,) = conversion.records
    assert record["objects"] == [{"desc": "cat", "bbox_2d": [100, 100, 599, 599]}]
    assert conversion.counts == {rule: 1}


def objects_of(samples: list[Sample]) -> list[tuple[GroundTruthObject, ...]]:
    return [sample.objects for sample in samples]


def test_an_exported_file_comes_back_bin_for_bin(toy_data: ToyData, tmp_path: Path) -> None:
    for jsonl, exported in (
        (toy_data.train_jsonl, toy_data.coco_train),
        (toy_data.val_jsonl, toy_data.coco_val),
    ):
        out = tmp_path / jsonl.name
        wanted = Wanted(
            jsonl.parent, out, "bbox_2d", "file", skip_empty=False, covers_a_pixel=covers_a_pixel
        )
        conversion = convert(read_coco(exported), wanted, unwatched)
        assert not conversion.counts
        write_records(conversion, conversion.objects, out)
        samples, again = (read_samples(path, allow_poly=False) for path in (jsonl, out))
        assert objects_of(again) == objects_of(samples)
        assert [s.images[0].resolve() for s in again] == [s.images[0].resolve() for s in samples]
        assert_same_boxes(COCO(str(exported)), again)
        (report,) = check_files(
            [out], allow_poly=False, lengths=None, covers_a_pixel=covers_a_pixel, watch=unwatched
        )
        assert report.findings == []


def test_an_export_into_a_relative_folder_names_its_images_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = make_data(Path("toy"), train=1, val=1, seed=0)
    (image,) = read_coco(toy.coco_val).images
    assert image.file_name == "images/val/00000.png"


def assert_same_boxes(reference: Any, samples: list[Sample]) -> None:
    """pycocotools reads the same boxes, within half a bin."""
    for sample in samples:
        annotations = reference.imgToAnns[sample.metadata["image_id"]]
        assert len(annotations) == len(sample.objects)
        for annotation, item in zip(annotations, sample.objects, strict=True):
            assert reference.cats[annotation["category_id"]]["name"] == item.desc
            assert_within_half_a_bin(annotation["bbox"], item.shape, (sample.width, sample.height))


def assert_within_half_a_bin(bbox: Any, shape: Shape, size: tuple[int, int]) -> None:
    x, y, width, height = bbox
    corners = (x, y, x + width, y + height)
    for corner, k, side in zip(corners, shape.coords, size * 2, strict=True):
        assert abs(corner / side - decode_bin(k)) <= 0.5 / 999 + 1e-9


BINS = st.integers(0, 999)
BOXES = st.tuples(BINS, BINS, BINS, BINS).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@given(boxes=st.lists(BOXES, max_size=3, unique=True))
def test_any_boxes_come_back_bin_for_bin(folder: Path, boxes: list[tuple[int, ...]]) -> None:
    objects = tuple(GroundTruthObject("cat", Shape("bbox_2d", box)) for box in boxes)
    sample = Sample("s:1", (folder / "a.png",), *SIZE, objects)
    document = json.loads(json.dumps(to_coco([sample], folder)))
    conversion = converted(folder, CocoFile.model_validate(document))
    kept = [list(o.shape.coords) for o in objects if covers_a_pixel(o.shape)]
    assert conversion.records == [] if objects and not kept else geometries(conversion) == kept
    left_out = conversion.counts[Rule.NO_AREA] + conversion.counts[Rule.THIN]
    assert left_out == len(objects) - len(kept)


EDGES = st.floats(-200, 800) | st.sampled_from([-1e308, 0.0, 640.0, 480.0, 1e308])
POLYGONS = st.lists(EDGES, max_size=9)
ANNOTATIONS = st.builds(
    lambda bbox, image_id, category_id, iscrowd, segmentation: cat(
        *bbox,
        image_id=image_id,
        category_id=category_id,
        iscrowd=iscrowd,
        segmentation=segmentation,
    ),
    st.tuples(EDGES, EDGES, EDGES, EDGES),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.sampled_from([17, 18, 18, 99]),
    st.sampled_from([0, 0, 0, 1]),
    st.none() | st.just({"counts": [1]}) | st.lists(POLYGONS, max_size=2),
)


@given(annotations=st.lists(ANNOTATIONS, max_size=4), geometry=st.sampled_from(["bbox_2d", "poly"]))
def test_every_annotation_is_an_object_or_counted_and_the_file_is_valid(
    folder: Path, annotations: list[dict[str, Any]], geometry: GeometryKind
) -> None:
    file = coco(annotations, [image(1), image(2, "gone.png")])
    conversion = converted(folder, file, geometry)
    left_out = sum(conversion.counts[rule] for rule in OF_ANNOTATIONS)
    assert conversion.objects + left_out == len(annotations)
    assert len(conversion.left_out) == left_out
    if not conversion.objects:
        return
    write_records(conversion, len(annotations), folder / "out.jsonl")
    (sample,) = read_samples(folder / "out.jsonl", allow_poly=geometry == "poly")
    assert all(covers_a_pixel(o.shape) for o in sample.objects)


@given(bbox=st.tuples(st.floats(0, 639), st.floats(0, 479), st.floats(1, 640), st.floats(1, 480)))
def test_a_box_moves_by_half_a_bin_at_most(
    folder: Path, bbox: tuple[float, float, float, float]
) -> None:
    x, y, width, height = bbox
    inside = (x, y, min(width, 640 - x), min(height, 480 - y))
    conversion = converted(folder, coco([cat(*inside)]))
    for coords in geometries(conversion) if conversion.records else []:
        assert_within_half_a_bin(inside, Shape("bbox_2d", tuple(coords)), SIZE)


def test_image_paths_start_at_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "lists").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos" / "a")
    paint_all(tmp_path / "photos", ["a/x.png"])
    file = coco([], [image(1, "x.png", (64, 48))])
    for out, path in (
        (tmp_path / "lists" / "o.jsonl", "../photos/a/x.png"),
        (tmp_path / "link" / "o.jsonl", "x.png"),
    ):
        wanted = Wanted(
            tmp_path / "link",
            out,
            "bbox_2d",
            "file",
            skip_empty=False,
            covers_a_pixel=covers_a_pixel,
        )
        conversion = convert(file, wanted, unwatched)
        assert conversion.records[0]["images"] == [path]
        write_records(conversion, conversion.objects, out)
        assert read_samples(out, allow_poly=False)


def test_nothing_is_written_where_no_image_is_left(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no image is left"):
        write_records(Conversion(), 0, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


GOOD = {"images": [image(1)], "annotations": [cat(1, 2, 3, 4)], "categories": []}


@pytest.mark.parametrize(
    ("document", "wheres"),
    [
        ([], [""]),
        ({}, [": images", ": annotations", ": categories"]),
        (
            {**GOOD, "images": [{"id": 1, "width": 0, "height": 5}]},
            [": images[0].file_name", ": images[0].width"],
        ),
        ({**GOOD, "images": [image(1) | {"width": math.nan}]}, [": images[0].width"]),
        ({**GOOD, "images": [image(1), image(1)]}, [": images[1].id"]),
        ({**GOOD, "categories": [{"id": 1, "name": " "}]}, [": categories[0].name"]),
        ({**GOOD, "categories": [{"id": 1, "name": "<|im_end|>"}]}, [": categories[0].name"]),
    ],
)
def test_what_is_no_coco_file_is_told_in_three_parts(
    tmp_path: Path, document: Any, wheres: list[str]
) -> None:
    path = tmp_path / "coco.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ContractErrors) as caught:
        read_coco(path)
    assert [error.where for error in caught.value.errors] == [f"{path}{w}" for w in wheres]
    assert all(error.found and error.do for error in caught.value.errors)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"9" * 5_000])
def test_what_is_no_json_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "coco.json"
    path.write_bytes(content)
    with pytest.raises(ContractError, match="not JSON") as caught:
        read_coco(path)
    assert caught.value.where == str(path)


@pytest.mark.req("IO-01")
@pytest.mark.parametrize(
    ("document", "found"),
    [
        ([{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}], "of results"),
        ({**GOOD, "annotations": [{"segments_info": [], "image_id": 1}]}, "panoptic"),
    ],
)
def test_other_files_of_coco_are_named(tmp_path: Path, document: Any, found: str) -> None:
    path = tmp_path / "coco.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=found):
        read_coco(path)


COLUMNS = [480 * 64 + 48, *[240, 240] * 319, 240, 480 * 256 + 192]
RLE = {"size": [480, 640], "counts": COLUMNS}


@pytest.mark.req("IO-01")
@pytest.mark.parametrize(
    "segmentation",
    [
        [[64, 48, 384, 48, 384, 288, 64, 288]],
        [[64, 48, 100, 48, 64, 90], [384, 288, 300, 288, 300, 200]],
        RLE,
        RLE | {"counts": mask.frPyObjects(RLE, 480, 640)["counts"].decode()},
    ],
)
def test_an_annotation_without_a_box_has_that_of_its_mask(
    folder: Path, tmp_path: Path, segmentation: Any
) -> None:
    conversion = converted(folder, read(tmp_path, cat(segmentation=segmentation)))
    assert geometries(conversion) == [[100, 100, 599, 599]]
    assert conversion.counts == {Rule.NO_BOX: 1}


@pytest.mark.req("IO-01")
@pytest.mark.parametrize(
    "wrong",
    [
        cat(1, 2, 3, "xxx", id=8),
        cat(1, 2, 3, id=8),
        cat(1, 2, 3, math.nan, id=8),
        cat(id=8),
        cat(id=8, segmentation={"size": [480, 640], "counts": [1, 2, 3]}),
        cat(id=8, segmentation={"size": [0, 640], "counts": "abc"}),
        {"id": 8, "bbox": [1, 2, 3, 4]},
        {"id": 8, "segmentation": [[64, 48, 384, 48, 384, 288]]},
        17,
    ],
)
def test_an_unusable_annotation_is_left_out_and_the_others_are_kept(
    folder: Path, tmp_path: Path, wrong: Any
) -> None:
    conversion = converted(folder, read(tmp_path, cat(64, 48, 320, 240), wrong))
    assert geometries(conversion) == [[100, 100, 599, 599]]
    assert conversion.counts == {Rule.UNUSABLE: 1}
    assert conversion.first[Rule.UNUSABLE].startswith(
        "annotation 17" if wrong == 17 else "annotation 8: "
    )
    (left,) = conversion.left_out
    assert left.annotation_id == (None if wrong == 17 else 8)
    assert left.reason == Rule.UNUSABLE


@pytest.mark.req("IO-01")
def test_two_records_of_one_image_are_one_sample(folder: Path, tmp_path: Path) -> None:
    """Ids given twice are counted; names of Windows have other separators."""
    annotations = [cat(64, 48, 320, 240), cat(0, 0, 64, 48, image_id=2)]
    images = [image(1), image(2, ".\\a.png")]
    conversion = converted(folder, read(tmp_path, *annotations, images=images))
    assert geometries(conversion) == [[100, 100, 599, 599], [0, 0, 100, 100]]
    assert conversion.counts == {Rule.REPEATED_IMAGE: 1, Rule.REPEATED_ID: 1}


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coco.json"
    path.write_text('{"annotations": [1], "annotations": []}')
    with pytest.raises(ContractError, match='the key "annotations" is given 2 times'):
        read_coco(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no such file"):
        read_coco(tmp_path / "coco.json")


def test_ids_may_be_text(folder: Path) -> None:
    file = {
        "images": [image(1) | {"id": "img"}],
        "annotations": [cat(64, 48, 320, 240, image_id="img", category_id="c")],
        "categories": [{"id": "c", "name": "cat"}],
    }
    conversion = converted(folder, CocoFile.model_validate(file))
    assert conversion.objects == 1
    assert conversion.records[0]["metadata"] == {"image_id": "img"}
