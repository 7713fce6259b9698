"""Conversations with boxes, a line or an entry of a JSON list each.

    ms-swift          {"messages": [...], "images": ["a.png"], "objects": {"ref": ["cat"],
                       "bbox": [[1, 2, 3, 4]], "bbox_type": "real"}}
    ShareGPT, Qwen    {"conversations": [{"from": "human", ...}, {"from": "gpt", "value":
                       "[{'bbox_2d': [1, 2, 3, 4], 'label': 'cat'}]"}], "image": "a.png"}
    answers alone     {"image": "a.png", "objects": [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]}

read_conversations    -> `CocoFile`; records of one image are put together
write_swift           samples -> grounding data of ms-swift
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from learner.data.account import Account, LeftOut, Rule
from learner.data.boxes import UNKNOWN, Corners, Numbers, Scale, Size, read_boxes
from learner.data.coco import CocoAnnotation, CocoCategory, CocoFile, CocoImage, pixel_xywh
from learner.data.images import Look, Watch, look_at_all, look_at_header
from learner.data.jsonl import BadLine, brief, is_description, parse_line, raw_lines, strict_json
from learner.runs.atomic_files import publish_text
from learner.types import Sample, normalized
from shared_contracts.errors import ContractError

_LISTS = ("objects", "annotations", "detections", "boxes")
_BOXES = ("bbox_2d", "bbox", "box")
_NAMES = ("label", "ref", "desc", "name", "category", "phrase", "caption")
_ANSWERS = ("assistant", "gpt", "model")
_PLACEHOLDER = re.compile(r"<ref-object>|<bbox>")
_PROMPT = "<image>Detect all objects. Answer with a JSON list of bbox_2d and label."


class Found(NamedTuple):
    """A box of a record: its image, name and numbers as they are written. scale: as stated."""

    where: str
    image: str
    name: Any
    numbers: Any
    scale: Scale | None


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and record of each line of JSONL, or of each entry of a JSON list."""
    lines = raw_lines(path)
    first = next(lines)
    if not first.lstrip().startswith(b"["):
        for number, raw in enumerate(chain([first], lines), start=1):
            try:
                yield f"{path.name}:{number}", parse_line(raw)
            except BadLine as bad:
                raise ContractError(f"{path}:{number}", bad.found, bad.do) from bad
        return
    try:
        entries = strict_json(b"\n".join([first, *lines]).decode())
    except UnicodeDecodeError as error:
        raise ContractError(str(path), f"it is not UTF-8 ({error})", "Save it as UTF-8") from error
    except BadLine as bad:
        raise ContractError(str(path), bad.found, "Write a JSON list, or JSONL") from bad
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            do = "Name a list of conversations"
            raise ContractError(f"{path}: [{index}]", f"is {brief(entry)}", do)
        yield f"{path.name}[{index}]", entry


def read_conversations(
    path: Path, images: Path, scale: Scale | None, corners: Corners | None, watch: Watch
) -> CocoFile:
    """Read conversations. images: the folder that names of images start at.

    scale, corners: of all boxes; None: as a record states it (ms-swift's `bbox_type`), or found
    from all boxes of the file.

    Raises ContractError for a file that cannot be read, and a scale that cannot be found.
    """
    account, found, names = Account(), list[Found](), dict[str, None]()
    for where, record in records(path):
        named = list(_images(record))
        boxes = _objects(where, record, named)
        if boxes is None or not named:
            account.note(Rule.NO_BOXES, where)
            continue
        for image in named:
            if image in names:
                account.note(Rule.REPEATED_IMAGE, where)
            names[image] = None
        found += boxes
    looks = watch(look_at_all([images / name for name in names], look_at_header), len(names))
    sizes = {
        name: look.size if isinstance(look, Look) else UNKNOWN  # it is left out
        for name, (_, look) in zip(names, looks, strict=True)
    }
    usable = [each for each in found if _is_usable(each, account)]
    pixels, evidence = _in_pixels(usable, sizes, scale, corners, str(path))
    named = [normalized(each.name) for each in usable]
    annotations = [
        CocoAnnotation(id=each.where, image_id=each.image, category_id=name, bbox=box)
        for each, name, box in zip(usable, named, pixels, strict=True)
    ]
    return CocoFile(
        images=tuple(
            CocoImage(id=name, file_name=name, width=width, height=height)
            for name, (width, height) in sizes.items()
        ),
        annotations=tuple(annotations),
        categories=tuple(CocoCategory(id=name, name=name) for name in dict.fromkeys(named)),
        account=account,
        evidence=evidence,
    )


def _is_usable(each: Found, account: Account) -> bool:
    numbers, rule = each.numbers, None
    if not (isinstance(numbers, list) and len(numbers) == 4 and all(map(_is_number, numbers))):
        rule = Rule.UNUSABLE
    elif not is_description(each.name):
        rule = Rule.NO_NAME
    if rule is not None:
        account.note(rule, each.where)
        account.left_out.append(LeftOut(each.where, each.image, each.image, numbers, rule))
    return rule is None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9


def _in_pixels(
    found: Sequence[Found],
    sizes: dict[str, Size],
    scale: Scale | None,
    corners: Corners | None,
    where: str,
) -> tuple[list[Numbers], str]:
    """The boxes in pixels; those of one stated scale are read together."""
    pixels, evidence = dict[int, Numbers](), list[str]()
    for stated in dict.fromkeys(scale or each.scale for each in found):
        places = [i for i, each in enumerate(found) if (scale or each.scale) == stated]
        numbers: list[Any] = [tuple(found[i].numbers) for i in places]
        of_images = [sizes[found[i].image] for i in places]
        boxes = read_boxes(numbers, of_images, stated, corners, where)
        pixels |= zip(places, boxes.pixels, strict=True)
        evidence.append(f"{len(places)} boxes: {boxes.evidence}")
    return [pixels[i] for i in range(len(found))], "; ".join(evidence)


def _images(record: dict[str, Any]) -> Iterator[str]:
    """Names of the images of a record, also of those inside of messages."""
    given = record.get("images", record.get("image"))
    listed = given if isinstance(given, list) else [given]
    if given is None:
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


def _objects(where: str, record: dict[str, Any], images: list[str]) -> list[Found] | None:
    """The boxes of a record; None if it has no list of them."""
    objects = record.get("objects")
    if isinstance(objects, dict):
        return _swift_objects(where, record, objects, images)
    lists = [record[key] for key in _LISTS if isinstance(record.get(key), list)]
    if not lists:
        answers = [
            _text(turn) for turn in _turns(record) if turn.get("role", turn.get("from")) in _ANSWERS
        ]
        lists = [entries for answer in answers if (entries := _answered(answer)) is not None]
    if not lists or len(images) != 1:  # of several images, an answer does not say which
        return None
    entries = [entry for each in lists for entry in each]
    return [
        Found(f"{where}[{i}]", images[0], _first(entry, _NAMES), _first(entry, _BOXES), None)
        for i, entry in enumerate(entries)
    ]


def _first(entry: Any, keys: Sequence[str]) -> Any:
    found = [entry[key] for key in keys if key in entry] if isinstance(entry, dict) else []
    return found[0] if found else None


def _answered(answer: str) -> list[Any] | None:
    """The list of boxes in an answer, with or without a fence around it; None without one."""
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
    where: str, record: dict[str, Any], objects: dict[str, Any], images: list[str]
) -> list[Found] | None:
    """Boxes of ms-swift; as many names as boxes, or the name before each `<bbox>`."""
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
    of_image = objects.get("image_id") or [0] * len(boxes)
    stated: dict[Any, Scale] = {"real": "pixels", "norm1": "0..1"}
    scale = stated.get(objects.get("bbox_type"))
    found = []
    for i, (ref, box) in enumerate(zip(refs, boxes, strict=True)):
        number = of_image[i] if isinstance(of_image, list) and i < len(of_image) else 0
        if type(number) is int and 0 <= number < len(images):
            found.append(Found(f"{where}[{i}]", images[number], ref, box, scale))
    return found


def write_swift(samples: Sequence[Sample], image_root: Path, out: Path) -> None:
    """Publish grounding data of ms-swift; polygons become the boxes around them."""
    root, lines = image_root.absolute(), list[str]()
    for sample in samples:
        (image,) = sample.images
        boxes = []
        for item in sample.objects:
            x, y, width, height = pixel_xywh(item.shape, sample.width, sample.height)
            boxes.append([round(v, 4) for v in (x, y, x + width, y + height)])
        answer = ", ".join(['{"bbox_2d": <bbox>, "label": "<ref-object>"}'] * len(boxes))
        record = {
            "messages": [
                {"role": "user", "content": _PROMPT},
                {"role": "assistant", "content": f"[{answer}]"},
            ],
            "images": [str(image.relative_to(root) if image.is_relative_to(root) else image)],
            "objects": {
                "ref": [item.desc for item in sample.objects],
                "bbox": boxes,
                "bbox_type": "real",
            },
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, "".join(lines))
