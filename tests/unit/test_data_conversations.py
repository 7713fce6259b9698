"""Conversations with boxes become a data file: ms-swift, ShareGPT, Qwen's cookbook."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.data.conversations import read_conversations
from learner.data.conversion import Conversion, convert
from learner.data.files import Format, detect_format
from learner.data.jsonl import read_samples
from learner.data.records import Corners, Rule, Scale, find_reading
from shared_contracts.errors import ContractError
from tests.unit.data_files import box, line, paint, write_lines
from tests.unit.refusals import refused

pytestmark = pytest.mark.req("IO-01", "DATA-01")

SIZE = (640, 480)
CAT, DOG = [64, 48, 384, 288], [320, 240, 640, 480]
CAT_BINS, DOG_BINS = [100, 100, 599, 599], [500, 500, 999, 999]
ANSWER = json.dumps([{"bbox_2d": CAT, "label": "cat"}, {"bbox_2d": DOG, "label": "dog"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    for name in ("a.png", "b.png"):
        paint(folder / name, SIZE)
    return folder


def asked(answer: str, role: str = "role", content: str = "content") -> list[dict[str, str]]:
    user, assistant = ("user", "assistant") if role == "role" else ("human", "gpt")
    return [{role: user, content: "<image>Detect."}, {role: assistant, content: answer}]


def swift(refs: list[str], boxes: list[Any], **more: Any) -> dict[str, Any]:
    answer = "".join(f"<ref-object>{'<bbox>' * (len(boxes) // len(refs))}" for _ in refs)
    return {
        "messages": asked(answer),
        "images": ["a.png"],
        "objects": {"ref": refs, "bbox": boxes, **more},
    }


def converted(
    folder: Path, *records: Any, scale: Scale | None = None, corners: Corners | None = None
) -> Conversion:
    file = write_lines(folder / "data.jsonl", *records)
    read = read_conversations(file, folder)
    return convert(read, folder / "out.jsonl", scale=scale, corners=corners)


def objects(conversion: Conversion) -> list[tuple[str, list[int]]]:
    return [(o["desc"], o["bbox_2d"]) for record in conversion.records for o in record["objects"]]


FENCED = f"Here they are:\n```json\n{ANSWER}\n```\nThat is all."
PARTS = [
    {"role": "user", "content": [{"type": "image", "image": "file://a.png"}]},
    {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
]


@pytest.mark.parametrize(
    ("record", "form"),
    [
        (swift(["cat", "dog"], [CAT, DOG], bbox_type="real"), "ms-swift"),
        (swift(["cat", "dog"], [CAT, DOG], bbox_type="real", image_id=[0, 0]), "ms-swift"),
        (
            swift(["cat", "dog"], [[0.1, 0.1, 0.6, 0.6], [0.5, 0.5, 1, 1]], bbox_type="norm1"),
            "ms-swift",
        ),
        ({"messages": asked(ANSWER), "images": ["a.png"]}, "sharegpt"),
        ({"messages": asked(FENCED), "images": [{"path": "a.png"}]}, "sharegpt"),
        ({"conversations": asked(ANSWER, "from", "value"), "image": "a.png"}, "sharegpt"),
        ({"messages": PARTS}, "sharegpt"),
        ({"image": ".\\a.png", "objects": json.loads(ANSWER)}, "qwen"),
        ({"image": "a.png", "width": 640, "height": 480, "boxes": json.loads(ANSWER)}, "qwen"),
    ],
)
def test_each_form_gives_equal_objects(folder: Path, record: dict[str, Any], form: Format) -> None:
    conversion = converted(folder, record, scale=None if form == "ms-swift" else "pixels")
    assert objects(conversion) == [("cat", CAT_BINS), ("dog", DOG_BINS)]
    (sample,) = conversion.records
    assert (sample["images"], sample["width"], sample["height"]) == (["a.png"], *SIZE)
    assert not conversion.account.counts
    assert detect_format(folder / "data.jsonl") == form
    listed = folder / "list.json"
    for content in ([record], record):  # a list, and one object
        listed.write_text(json.dumps(content, indent=1))
        assert detect_format(listed) == form
        assert len(read_conversations(listed, folder).pictures) == 1
        with pytest.raises(ContractError, match=f"this is {form}.*`learner data convert "):
            read_samples(listed, allow_poly=True)


def test_a_scale_of_the_user_counts_more_than_that_of_a_record(folder: Path) -> None:
    parts = [[0.1, 0.1, 0.6, 0.6], [0.5, 0.5, 1, 1]]
    record = swift(["cat", "dog"], parts, bbox_type="real")
    assert objects(converted(folder, record, scale="0..1")) == [
        ("cat", CAT_BINS),
        ("dog", DOG_BINS),
    ]


def test_blank_lines_are_no_records(folder: Path) -> None:
    good = {"image": "a.png", "objects": [{"bbox_2d": CAT, "label": "cat"}]}
    assert objects(converted(folder, good, "", " ", scale="pixels")) == [("cat", CAT_BINS)]


def test_boxes_of_several_images_and_several_questions_of_one_are_put_together(
    folder: Path,
) -> None:
    """One name of ms-swift is that of all boxes behind it."""
    both = swift(["cat"], [CAT, DOG], bbox_type="real", image_id=[0, 1])
    both["images"] = ["a.png", "b.png"]
    again = {"messages": asked(json.dumps({"bbox_2d": DOG, "label": "cup"})), "images": ["./a.png"]}
    conversion = converted(folder, both, again, scale="pixels")
    assert [[o["desc"] for o in r["objects"]] for r in conversion.records] == [
        ["cat", "cup"],
        ["cat"],
    ]
    assert conversion.account.counts == {Rule.REPEATED_IMAGE: 1}


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({"messages": asked("There is a cat."), "images": ["a.png"]}, Rule.NO_BOXES),
        ({"messages": asked("[{"), "images": ["a.png"]}, Rule.NO_BOXES),
        ({"messages": asked(ANSWER), "images": ["a.png", "b.png"]}, Rule.NO_BOXES),
        ({"messages": asked(ANSWER)}, Rule.NO_BOXES),
        (swift(["cat"], [CAT]) | {"images": ["a.png", "b.png"]}, Rule.NO_BOXES),
        (swift(["cat", "dog"], [CAT]), Rule.NO_NAME),
        ({"image": "a.png", "objects": [{"bbox_2d": CAT}]}, Rule.NO_NAME),
        ({"image": "a.png", "objects": [{"bbox_2d": CAT, "label": "<|im_end|>"}]}, Rule.NO_NAME),
        ({"image": "a.png", "objects": [{"bbox_2d": CAT[:3], "label": "cat"}]}, Rule.UNUSABLE),
        ({"image": "a.png", "objects": ["cat"]}, Rule.UNUSABLE),
        ({"image": "c.png", "objects": []}, Rule.MISSING_IMAGE),
    ],
)
def test_what_cannot_be_used_is_counted_and_the_rest_is_kept(
    folder: Path, record: dict[str, Any], rule: Rule
) -> None:
    good = {"image": "b.png", "objects": [{"bbox_2d": CAT, "label": "cat"}]}
    conversion = converted(folder, good, record, scale="pixels")
    assert objects(conversion)[:1] == [("cat", CAT_BINS)]
    assert conversion.account.counts[rule] == 1
    assert len(objects(conversion)) == 1


SMALL, LARGE = (300, 200), (3000, 2000)


@pytest.mark.parametrize(
    ("boxes", "size", "evidence"),
    [
        ([[0.1, 0.2, 0.5, 1.0]] * 3, SMALL, "0..1 (no number of 12 is above 1)"),
        ([[0, 20, 500, 999]] * 9, SMALL, "0..999 (no number of 36 is above 999)"),
        ([[0, 20, 500, 1000]] * 9, SMALL, "9 of 36 are 1,000: this is Qwen3-VL's scale"),
        ([[0, 20, 500, 900]] * 9, LARGE, "0..1000 (no number of 36 is above 900: 0..999 is poss"),
        ([[10, 20, 290, 190]] * 9, SMALL, "pixels (9 of 9 lie in their images as pixels)"),
        ([[10, 20, 2900, 1900]] * 9, LARGE, "pixels (18 of 36 numbers are above 1,000)"),
        ([[200, 100, 90, 50]] * 9, SMALL, "xywh (as two corners, 9 of 9 would be reversed"),
        ([[200, 100, 90, 50]] + [[10, 20, 290, 190]] * 20, SMALL, "xyxy (the third number is"),
    ],
)
def test_scale_and_order_are_found_from_all_boxes(
    boxes: list[Any], size: tuple[int, int], evidence: str
) -> None:
    found = find_reading([(tuple(one), size) for one in boxes])
    assert evidence in found.evidence


def test_boxes_of_images_that_cannot_be_read_are_no_evidence(folder: Path) -> None:
    """They leave an image of an unknown size by chance."""
    missing = [
        {"image": f"gone{n}.png", "objects": [{"bbox_2d": [300, 200, 500, 400], "label": "cat"}]}
        for n in range(9)
    ]
    inside = {"image": "a.png", "objects": [{"bbox_2d": CAT, "label": "cat"}] * 9}
    conversion = converted(folder, inside, *missing)
    assert objects(conversion) == [("cat", CAT_BINS)]


def test_a_scale_that_cannot_be_found_is_asked_for(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", (1000, 1000))
    record = {"image": "a.png", "objects": [{"bbox_2d": [1, 2, 300, 400], "label": "cat"}]}
    with refused("--scale", "1 boxes fit as pixels and as parts"):
        converted(tmp_path, record)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["data.jsonl", "out.jsonl"], "data.jsonl is jsonl, and OUT is to be jsonl"),
        (["unknown.jsonl", "out.jsonl"], "has the keys"),
        ([".", "out.jsonl"], "neither data.yaml nor XML files"),
        (["coco.json", "out", "--to", "yolo"], "this is coco. Convert it to jsonl first"),
        (["coco.json", "out.jsonl"], "it has no lists of images, annotations and categories"),
    ],
)
def test_a_format_that_is_not_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "a.png", SIZE)
    write_lines(tmp_path / "data.jsonl", line("a.png", box("cat", 1, 2, 300, 400), size=SIZE))
    write_lines(tmp_path / "unknown.jsonl", {"text": "a cat"})
    captions = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"caption": "a cat"}]}
    (tmp_path / "coco.json").write_text(json.dumps(captions, indent=1))
    with pytest.raises(ContractError, match=found):
        CliRunner().invoke(app, ["data", "convert", *arguments], catch_exceptions=False)


def test_the_suffix_of_a_data_file_is_free(tmp_path: Path) -> None:
    """Also if its metadata have a key of COCO."""
    line = {"images": ["a.png"], "width": 9, "height": 9, "objects": []}
    line["metadata"] = {"categories": 3}
    (tmp_path / "a.json").write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    assert detect_format(tmp_path / "a.json") == "jsonl"
