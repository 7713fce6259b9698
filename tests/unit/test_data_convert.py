"""`learner data convert`: COCO, LVIS, YOLO and Pascal VOC, to a data file and back."""

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from learner.commands.data import data_app
from learner.data.coco import to_coco
from learner.data.images import open_upright
from learner.data.jsonl import read_samples
from learner.stages.matching import covers_a_pixel, mask_iou
from learner.types import Sample, Shape
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.data_files import LYING, box, line, paint, paint_all, write_lines

pytestmark = pytest.mark.req("IO-01")

FORMATS = ("coco", "lvis", "yolo", "voc", "ms-swift")


def convert(*arguments: str | Path) -> None:
    data_app(["convert", *map(str, arguments)], standalone_mode=False)


def refused(*arguments: str | Path) -> list[tuple[str, str]]:
    with pytest.raises(ContractError) as caught:
        convert(*arguments)
    error = caught.value
    errors = error.errors if isinstance(error, ContractErrors) else [error]
    assert all(one.do for one in errors)
    return [(one.where, one.found) for one in errors]


def there_and_back(source: Path, form: str, folder: Path, *, geometry: str = "bbox_2d") -> Path:
    """The data file that comes of `source` in another format."""
    other, back = folder / "other.json", folder / "back.jsonl"
    yolo = ("--geometry", geometry) if form == "yolo" else ()
    convert("--to", form, source, other, *yolo)
    options = () if form in ("voc", "ms-swift") else ("--geometry", geometry)
    convert("--from", form, other, back, *options)
    return back


def by_image(samples: list[Sample]) -> dict[str, tuple[Any, ...]]:
    return {s.images[0].name: (s.width, s.height, s.objects) for s in samples}


BINS = st.integers(0, 999)
BOXES = (
    st.tuples(BINS, BINS, BINS, BINS)
    .map(lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3])))
    .filter(lambda b: covers_a_pixel(Shape("bbox_2d", b), 256))
)
POLYGONS = (
    st.lists(st.tuples(BINS, BINS), min_size=3, max_size=5, unique=True)
    .map(lambda points: [k for point in points for k in point])
    .filter(lambda flat: covers_a_pixel(Shape("poly", tuple(flat)), 256))
)
NAMES = st.sampled_from(["cat", "no", "0", "bow_(weapon)", "a: b, 'c' #d", "猫 🐈", "café", "<&>"])
OBJECTS = st.builds(lambda desc, coords: box(desc, *coords), NAMES, BOXES)
SIZES = st.tuples(st.integers(1, 1500), st.integers(1, 1500))


def data_file(folder: Path, drawn: list[tuple[tuple[int, int], list[dict[str, Any]]]]) -> Path:
    lines = []
    for number, (size, objects) in enumerate(drawn):
        Image.new("1", size).save(folder / f"{number}.png")
        different = {json.dumps(one): one for one in objects}
        lines.append(line(f"{number}.png", *different.values(), size=size))
    return write_lines(folder / "d.jsonl", *lines)


@pytest.mark.parametrize("form", FORMATS)
@given(
    drawn=st.lists(
        st.tuples(SIZES, st.lists(OBJECTS, min_size=1, max_size=4)), min_size=1, max_size=3
    )
)
def test_boxes_come_back_bin_for_bin(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    drawn: list[tuple[tuple[int, int], list[dict[str, Any]]]],
) -> None:
    folder = tmp_path_factory.mktemp("boxes")
    source = data_file(folder, drawn)
    back = there_and_back(source, form, folder)
    read = [read_samples(file, allow_poly=False) for file in (source, back)]
    assert by_image(read[1]) == by_image(read[0])
    shutil.rmtree(folder)


@pytest.mark.parametrize("form", ["coco", "lvis", "yolo"])
@given(polygons=st.lists(POLYGONS, min_size=1, max_size=3, unique_by=tuple))
def test_polygons_come_back_bin_for_bin(
    tmp_path_factory: pytest.TempPathFactory, form: str, polygons: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("polygons")
    source = data_file(folder, [((640, 480), [{"desc": "cat", "poly": p} for p in polygons])])
    back = there_and_back(source, form, folder, geometry="poly")
    read = [read_samples(file, allow_poly=True) for file in (source, back)]
    assert by_image(read[1]) == by_image(read[0])
    shutil.rmtree(folder)


@given(coords=st.tuples(BINS, BINS, BINS, BINS), resolution=st.integers(2, 1024))
def test_a_box_covers_a_pixel_where_its_mask_does(coords: tuple[int, ...], resolution: int) -> None:
    shape = Shape("bbox_2d", coords)
    assert covers_a_pixel(shape, resolution) == (mask_iou(shape, shape, resolution) > 0)


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_image_a_photograph_on_its_side_and_descriptions_in_nfc_come_back(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boxes are those of the upright image, which is counted both ways."""
    paint(tmp_path / "a.png")
    paint(tmp_path / "b.jpg", (64, 48), orientation=LYING)
    decomposed = unicodedata.normalize("NFD", "café")
    lying = line("b.jpg", box(decomposed, 0, 0, 500, 999), size=(48, 64))
    source = write_lines(tmp_path / "d.jsonl", line("a.png"), lying)
    first, second = read_samples(there_and_back(source, form, tmp_path), allow_poly=False)
    assert first.objects == ()
    assert (second.width, second.height) == open_upright(second.images[0]).size == (48, 64)
    (item,) = second.objects
    assert (item.desc, item.shape.coords) == ("caf\u00e9", (0, 0, 500, 999))
    there, back = capsys.readouterr().out.split("Data set:")
    assert "1  images that EXIF turns or mirrors" in there
    assert "1  images that EXIF turns or mirrors  taken as upright" in back


def voc_xml(
    name: str, size: tuple[Any, Any] | None, bndbox: tuple[Any, ...], desc: str = "cat"
) -> str:
    edges = zip(("xmin", "ymin", "xmax", "ymax"), bndbox, strict=False)
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>" if size else ""
    return (
        f"<annotation><filename>{name}</filename>{sides}<object><name>{desc}</name><bndbox>"
        + "".join(f"<{edge}>{value}</{edge}>" for edge, value in edges)
        + "</bndbox></object></annotation>"
    )


@pytest.mark.parametrize(("file", "name"), [("a.xml", "other.png"), ("b.xml", ".\\a.png")])
@pytest.mark.parametrize("size", [(100, 50), None, (0, 0), ("-1", "x")])
def test_pixels_of_voc_count_from_1_and_a_box_includes_its_last(
    size: tuple[Any, Any] | None, file: str, name: str, tmp_path: Path
) -> None:
    paint(tmp_path / "a.png", (100, 50))
    (tmp_path / file).write_text(voc_xml(name, size, (1, 1, 50, 50.0)))
    convert("--from", "voc", tmp_path, tmp_path / "o.jsonl")
    (sample,) = read_samples(tmp_path / "o.jsonl", allow_poly=False)
    assert sample.objects[0].shape.coords == (0, 0, 500, 999)
    assert (sample.width, sample.height) == (100, 50)


def test_lists_of_voc_choose_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    paint_all(tmp_path / "JPEGImages", ["a.png", "b.png"])
    (tmp_path / "JPEGImages" / "b.png").rename(tmp_path / "JPEGImages" / "b c.png")
    for name in ("a", "b c"):
        text = voc_xml(f"{name}.png", (64, 48), (1, 1, 32, 48))
        (tmp_path / "Annotations" / f"{name}.xml").write_text(text)
    listed = tmp_path / "ImageSets" / "Main" / "val.txt"
    listed.write_text("b c  1\n")
    convert("--from", "voc", "--split", "val", tmp_path, tmp_path / "o.jsonl")
    (sample,) = read_samples(tmp_path / "o.jsonl", allow_poly=False)
    assert sample.images[0].name == "b c.png"
    listed.write_text("b c\nd\nb c\n")
    convert("--from", "voc", "--split", "val", tmp_path, tmp_path / "p.jsonl")
    assert len(read_samples(tmp_path / "p.jsonl", allow_poly=False)) == 1
    assert "1  records without a list of boxes" in capsys.readouterr().out
    ((where, _),) = refused("--from", "voc", "--split", "test", tmp_path, tmp_path / "q.jsonl")
    assert where == str(listed.with_name("test.txt"))


def test_faults_of_voc_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paint(tmp_path / "a.png")
    files = {
        "a": voc_xml("a.png", (64, 48), (1, 1, 32, 48)),
        "b": "<annotation>",
        "c": "<html/>",
        "d": voc_xml("a.png", (64, 48), (1, "x", 32, 40)),
        "e": voc_xml("a.png", (64, 48), (1, 1, 32)),
        "f": voc_xml("a.png", (64, 48), (1, 1, 32, 40), desc="&lt;|im_end|&gt;"),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.xml").write_text(text)
    left_out = tmp_path / "left.jsonl"
    convert("--from", "voc", tmp_path, tmp_path / "o.jsonl", "--left-out", left_out)
    (sample,) = read_samples(tmp_path / "o.jsonl", allow_poly=False)
    assert sample.metadata == {"image_id": "a"}
    first = json.loads(left_out.read_text().splitlines()[0])
    assert (first["file"], first["bbox"]) == (str(tmp_path), [0, None, 32, 40])
    table = capsys.readouterr().out
    for count, what, first in (
        (1, "images without a file", "c"),
        (1, "records without a list of boxes", "b.xml: "),
        (2, "annotations that cannot be read", "annotation d.xml: object[1]: [0.0, NaN, 32.0, "),
        (1, "annotations without a name that can be written", "annotation f.xml: object[1]"),
        (3, "further records of one image", "a.png"),
    ):
        rows = [row for row in table.splitlines() if row.startswith(f"{count:>5}  {what} ")]
        assert any(first in row for row in rows)


def yolo_set(folder: Path, labels: dict[str, str], yaml: str = "names: [cat, no]\n") -> Path:
    for name in ("images/train", "labels/train"):
        (folder / name).mkdir(parents=True)
    (folder / "data.yaml").write_text(f"train: images/train\nval: images/train\n{yaml}")
    paint_all(folder / "images" / "train", [f"{name}.png" for name in labels])
    for name, text in labels.items():
        (folder / "labels" / "train" / f"{name}.txt").write_text(text)
    return folder


UNREADABLE = """0 .5 .5 .2
cat .5 .5 .2 .2

0 .5 .5 nan .2
0 320 240 64 48
0 .5 .5 .2 .2 .9
"""


def test_faults_of_yolo_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {
        "a": "1 .5 .5 .2 .2\r7 .5 .5 .2 .2\n0 0 .5 .2 .2",
        "b": "",
        "c": f"{UNREADABLE}1 .5 .5 .2 .2",
    }
    yolo_set(tmp_path, {**labels, "lost": "0 .5 .5 .2 .2"})
    (tmp_path / "images" / "train" / "lost.png").unlink()
    (tmp_path / "images" / "train" / "notes.txt").write_text("no image")
    left_out = tmp_path / "left.jsonl"
    convert("--from", "yolo", tmp_path, tmp_path / "o.jsonl", "--left-out", left_out)
    first, second, third = read_samples(tmp_path / "o.jsonl", allow_poly=False)
    assert [o.desc for o in first.objects] == ["no", "cat"]
    assert second.objects == ()
    assert [o.desc for o in third.objects] == ["no"]
    assert first.metadata == {"image_id": "images/train/a.png"}
    table = capsys.readouterr().out
    for count, what in (
        (1, "images without a file"),
        (1, "annotations of an image left out"),
        (5, "annotations that cannot be read"),
        (1, "annotations of a category that is not listed"),
        (1, "images that show no object"),
    ):
        assert f"{count}  {what} " in table
    named = json.loads(left_out.read_text().splitlines()[0])
    assert named["annotation_id"] == "labels/train/a.txt:2"


@pytest.mark.parametrize(
    ("yaml", "where"),
    [
        ("names: {one: cat}", "data.yaml: names"),
        ("names: {0: cat, 0: dog}", "data.yaml"),
        ("nc: 3", "data.yaml: names"),
        ("names: [cat", "data.yaml"),
        ("names: [cat]\nkpt_shape: [17, 3]", "data.yaml: kpt_shape"),
        ("names: [cat]\ntest: other", "--split"),
    ],
)
def test_yaml_that_describes_no_data_set_is_refused(yaml: str, where: str, tmp_path: Path) -> None:
    yolo_set(tmp_path, {"a": ""}, yaml)
    ((found, _),) = refused("--from", "yolo", tmp_path, tmp_path / "o.jsonl")
    assert found.removeprefix(f"{tmp_path}/") == where


def test_images_of_yolo_may_be_listed_and_labels_must_be_somewhere(tmp_path: Path) -> None:
    yolo_set(tmp_path, {"a": "0 .5 .5 .2 .2", "b": "0 .5 .5 .2 .2"}, "names: {0: cat}\ntest: t.txt")
    (tmp_path / "t.txt").write_text(".\\images\\train\\b.png\n")
    convert("--from", "yolo", "--split", "test", tmp_path / "data.yaml", tmp_path / "o.jsonl")
    (sample,) = read_samples(tmp_path / "o.jsonl", allow_poly=False)
    assert sample.images[0].name == "b.png"
    shutil.rmtree(tmp_path / "labels")
    ((_, found),) = refused("--from", "yolo", "--split", "val", tmp_path, tmp_path / "p.jsonl")
    assert found.startswith("none of 2 images has a file of labels")


def lvis(image: dict[str, Any]) -> dict[str, Any]:
    size = {"width": 64, "height": 48}
    annotation = {"id": 5, "image_id": 7, "category_id": 2, "bbox": [1, 2, 30, 40], "area": 1200}
    return {
        "images": [{"id": 7, "coco_url": "http://host/val2017/a.png", **size, **image}],
        "annotations": [annotation],
        "categories": [{"id": n, "name": name} for n, name in enumerate("abcd", start=1)],
    }


def test_the_lists_of_lvis_pass_through_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "val2017").mkdir()
    paint(tmp_path / "val2017" / "a.png")
    source, jsonl, again = (tmp_path / name for name in ("l.json", "d.jsonl", "again.json"))
    lists = {"neg_category_ids": [4, 1], "not_exhaustive_category_ids": [2]}
    source.write_text(json.dumps(lvis(lists)))
    convert("--from", "lvis", source, jsonl)
    (sample,) = read_samples(jsonl, allow_poly=False)
    lists_of_names = {"neg_categories": ["d", "a"], "not_exhaustive_categories": ["b"]}
    assert sample.metadata == {"image_id": 7, **lists_of_names}
    convert("--to", "lvis", jsonl, again)
    document = json.loads(again.read_text())
    names = {category["id"]: category["name"] for category in document["categories"]}
    (image,) = document["images"]
    assert [names[n] for n in image["neg_category_ids"]] == ["d", "a"]
    assert [names[n] for n in image["not_exhaustive_category_ids"]] == ["b"]
    counts = {c["name"]: (c["frequency"], c["image_count"]) for c in document["categories"]}
    assert counts == {"a": ("r", 0), "b": ("r", 1), "d": ("r", 0)}
    source.write_text(json.dumps(lvis({"neg_category_ids": [9]})))
    found = refused("--from", "lvis", source, tmp_path / "o.jsonl")
    assert found == [(f"{source}: neg_category_ids of image 7", "[9] are ids of no category")]


def test_every_problem_of_a_data_file_is_told_before_anything_is_written(tmp_path: Path) -> None:
    for folder in "xy":
        (tmp_path / folder).mkdir()
        paint(tmp_path / folder / "a.png")
    (tmp_path / "text.png").write_text("no image")
    source = write_lines(
        tmp_path / "d.jsonl",
        line("x/a.png", box("cat\u0001", 1, 2, 30, 40)),
        line("gone.png"),
        line("text.png"),
        line("y/a.png", size=(9, 9)),
        line("x/a.png"),
        line("y/a.png") | {"images": ["y/a.png", "x/a.png"]},
        "{",
    )
    found = refused("--to", "voc", source, tmp_path / "set")
    assert [int(where.rpartition(":")[2]) for where, _ in found] == [1, 2, 3, 4, 5, 6, 6, 7]
    assert not (tmp_path / "set").exists()
    assert not (tmp_path / "set.part").exists()


def test_folders_keep_images_of_one_name_apart(tmp_path: Path) -> None:
    for folder in ("day", "night/images"):
        (tmp_path / folder).mkdir(parents=True)
        paint(tmp_path / folder / "a.png")
    lines = [line(f"{folder}/a.png") for folder in ("day", "night/images")]
    source = write_lines(tmp_path / "d.jsonl", *lines)
    convert("--to", "yolo", source, tmp_path / "yolo")
    convert("--to", "voc", source, tmp_path / "voc")
    for path in ("images/train/day_a.png", "labels/train/night_images_a.txt"):
        assert (tmp_path / "yolo" / path).is_file()
    for path in ("JPEGImages/day_a.png", "Annotations/night_images_a.xml"):
        assert (tmp_path / "voc" / path).is_file()


def test_polygons_become_boxes_where_a_format_has_none_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paint(tmp_path / "a.png")
    polygon = {"desc": "cat", "poly": [0, 0, 999, 0, 0, 500]}
    source = write_lines(tmp_path / "d.jsonl", line("a.png", polygon, box("dog", 1, 2, 300, 400)))
    back = there_and_back(source, "voc", tmp_path)
    (sample,) = read_samples(back, allow_poly=False)
    assert sample.objects[0].shape == Shape("bbox_2d", (0, 0, 999, 500))
    assert "1  polygons  boxes written" in capsys.readouterr().out
    convert("--to", "yolo", "--geometry", "poly", source, tmp_path / "yolo")
    assert "1  boxes    polygons written" in capsys.readouterr().out
    labels = (tmp_path / "yolo/labels/train/a.txt").read_text().splitlines()
    assert [len(row.split()) for row in labels] == [7, 9]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--from", "coco", "--to", "voc"), "--from, --to"),
        (("--to", "voc", "--geometry", "poly"), "--geometry"),
        (("--from", "yolo", "--images", "."), "--images"),
        (("--from", "coco", "--split", "val"), "--split"),
        (("--to", "coco", "--skip-empty", "--order", "left-to-right"), "--order, --skip-empty"),
    ],
)
def test_options_that_a_conversion_does_not_take_are_refused(
    options: tuple[str, ...], where: str, tmp_path: Path
) -> None:
    ((found, _),) = refused(*options, tmp_path / "in", tmp_path / "out")
    assert found == where


def test_an_image_without_lists_is_annotated_with_every_category(tmp_path: Path) -> None:
    paint_all(tmp_path, ["a.png", "b.png"])
    lines = [line("a.png", box("cat", 1, 1, 99, 99)), line("b.png", box("dog", 1, 1, 99, 99))]
    convert("--to", "lvis", write_lines(tmp_path / "d.jsonl", *lines), tmp_path / "l.json")
    document = json.loads((tmp_path / "l.json").read_text())
    assert [image["neg_category_ids"] for image in document["images"]] == [[2], [1]]


def test_an_image_elsewhere_keeps_its_absolute_path_in_the_export() -> None:
    sample = Sample("s", (Path("/other/a.png"),), 10, 10, ())
    assert to_coco([sample], Path("/data"))["images"][0]["file_name"] == "/other/a.png"
