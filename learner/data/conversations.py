"""Conversations with boxes: JSONL, or a JSON list.

    ms-swift          {"messages": [...], "images": ["a.png"], "objects": {"ref": ["cat"],
                       "bbox": [[1, 2, 3, 4]], "bbox_type": "real"}}
    ShareGPT, Qwen    {"conversations": [{"from": "human", ...}, {"from": "gpt", "value":
                       "[{'bbox_2d': [1, 2, 3, 4], 'label': 'cat'}]"}], "image": "a.png"}
    answers alone     {"image": "a.png", "objects": [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]}

Their conversion puts records of one image together.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from learner.data.coco import image_name, pixel_xywh
from learner.data.files import LISTS, NAMES, jsonl_text, records
from learner.data.records import Account, Annotation, Rule, Scale, Source, SourceImage
from learner.types import Sample

_BOXES = ("bbox_2d", "bbox", "box")
_ANSWERS = ("assistant", "gpt", "model")
_SWIFT_SCALES: dict[Any, Scale] = {"real": "pixels", "norm1": "0..1"}
_PLACEHOLDER = re.compile(r"<ref-object>|<bbox>")
_PROMPT = "<image>Detect all objects. Answer with a JSON list of bbox_2d and label."

# Index among the record's images, name and numbers as in the file, scale if it is stated.
_Box = tuple[int, Any, Any, Scale | None]


def read_conversations(path: Path, folder: Path) -> Source:
    """Read conversations. folder: base of image names.

    Only ms-swift's `bbox_type` states the scale.
    """
    account, pictures = Account(), list[SourceImage]()
    for where, record in records(path):
        images = [SourceImage(name, name, None) for name in _images(record)]
        boxes = _objects(record, len(images)) if images else None
        if boxes is None:
            account.note(Rule.NO_BOXES, where)
            continue
        pictures += images
        for index, (at, name, numbers, stated) in enumerate(boxes):
            place = f"{where}[{index}]"
            one = Annotation.read(place, images[at].id, name, numbers, scale=stated)
            images[at].annotations.append(one)
    return Source(folder, pictures, account)


def _images(record: dict[str, Any]) -> Iterator[str]:
    """Yield the image names of a record; without `images` or `image`, those of its messages."""
    value = record.get("images", record.get("image"))
    listed = value if isinstance(value, list) else [value]
    if value is None:
        turns = (turn.get("content") for turn in _turns(record))
        parts = [part for content in turns if isinstance(content, list) for part in content]
        listed = [part.get("image") for part in parts if isinstance(part, dict)]
    for each in listed:
        name = each.get("path") if isinstance(each, dict) else each
        if isinstance(name, str) and name.strip():
            yield name.removeprefix("file://").replace("\\", "/")


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    turns = record.get("messages", record.get("conversations"))
    return [each for each in turns if isinstance(each, dict)] if isinstance(turns, list) else []


def _text(turn: dict[str, Any]) -> str:
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _objects(record: dict[str, Any], images: int) -> list[_Box] | None:
    """Return the boxes of a record with `images` images; None without a list of boxes."""
    objects = record.get("objects")
    if isinstance(objects, dict):
        return _swift_objects(record, objects, images)
    lists = [record[key] for key in LISTS if isinstance(record.get(key), list)]
    if not lists:
        answers = [
            _text(turn) for turn in _turns(record) if turn.get("role", turn.get("from")) in _ANSWERS
        ]
        lists = [entries for answer in answers if (entries := _answer_boxes(answer)) is not None]
    if not lists or images != 1:  # an answer does not name one of several images
        return None
    entries = [entry for each in lists for entry in each]
    return [(0, _first(entry, NAMES), _first(entry, _BOXES), None) for entry in entries]


def _first(entry: Any, keys: Sequence[str]) -> Any:
    keys = [key for key in keys if key in entry] if isinstance(entry, dict) else []
    return entry[keys[0]] if keys else None


def _answer_boxes(answer: str) -> list[Any] | None:
    """Return the JSON list of boxes in an answer, fenced or not; None without one."""
    start = min((at for at in map(answer.find, "[{") if at >= 0), default=-1)
    if start < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(answer, start)
    except (ValueError, RecursionError):
        return None
    entries = value if isinstance(value, list) else [value]
    known = all(_first(entry, _BOXES) is not None for entry in entries)
    return entries if known else None


def _swift_objects(
    record: dict[str, Any], objects: dict[str, Any], images: int
) -> list[_Box] | None:
    """Return boxes of ms-swift; names are one per box, or that before each `<bbox>`."""
    refs, boxes = objects.get("ref") or [], objects.get("bbox")
    if not isinstance(refs, list) or not isinstance(boxes, list):
        return None
    if len(refs) != len(boxes):
        named, used = list[Any](), 0
        marks = [m[0] for turn in _turns(record) for m in _PLACEHOLDER.finditer(_text(turn))]
        for mark in marks:
            used += mark == "<ref-object>"
            if mark == "<bbox>":
                named.append(refs[used - 1] if 0 < used <= len(refs) else None)
        refs = named if len(named) == len(boxes) else [None] * len(boxes)
    of_image = objects.get("image_id") or ([0] * len(boxes) if images == 1 else [])
    if not (
        isinstance(of_image, list)
        and len(of_image) == len(boxes)
        and all(type(image) is int and 0 <= image < images for image in of_image)
    ):
        return None
    scale = _SWIFT_SCALES.get(objects.get("bbox_type"))
    return [(image, ref, box, scale) for image, ref, box in zip(of_image, refs, boxes, strict=True)]


def swift_text(samples: Sequence[Sample], image_root: Path) -> str:
    """Return grounding data of ms-swift as JSONL; polygons become their bounding boxes."""
    lines = []
    for sample in samples:
        boxes = []
        for item in sample.objects:
            x, y, width, height = pixel_xywh(item.shape, sample.width, sample.height)
            boxes.append([round(v, 4) for v in (x, y, x + width, y + height)])
        answer = ", ".join(['{"bbox_2d": <bbox>, "label": "<ref-object>"}'] * len(boxes))
        turns = {"user": _PROMPT, "assistant": f"[{answer}]"}
        refs = [item.desc for item in sample.objects]
        record = {
            "messages": [{"role": role, "content": text} for role, text in turns.items()],
            "images": [image_name(sample.images[0], image_root)],
            "objects": {"ref": refs, "bbox": boxes, "bbox_type": "real"},
        }
        lines.append(record)
    return jsonl_text(lines)
