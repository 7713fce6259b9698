"""The format of a file or folder, found from its content."""

import shlex
from pathlib import Path
from typing import Literal

from learner.data.files import read_text, records
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

OutFormat = Literal["jsonl", "coco", "lvis", "yolo", "voc", "ms-swift"]
Format = Literal[OutFormat, "sharegpt", "qwen"]
DATA_YAML = "data.yaml"
# Keys of a record of Qwen with its boxes, and of a box with its description.
LISTS = ("objects", "annotations", "detections", "boxes")
NAMES = ("label", "ref", "desc", "name", "category", "phrase", "caption")
_DO = "Name the format with --from, and see docs/data.md for what each looks like"


def detect_format(path: Path) -> Format:
    """Return the format of a file or folder by its content; raises ContractError if unknown."""
    if path.is_dir():
        if (path / DATA_YAML).is_file():
            return "yolo"
        if any(path.glob("Annotations/*.xml")) or any(path.glob("*.xml")):
            return "voc"
        raise ContractError(str(path), "the folder has neither data.yaml nor XML files", _DO)
    if path.suffix in (".yaml", ".yml"):
        return "yolo"
    if path.suffix == ".json":
        text = read_text(path, _DO)
        lines = '"objects":' in text.partition("\n")[0]  # of a data file, whatever its suffix
        if not lines and ('"category_id"' in text or '"categories"' in text):
            return "lvis" if '"neg_category_ids"' in text else "coco"
    where, record = next(records(path), (str(path), {}))
    lists = [record[key] for key in LISTS if isinstance(record.get(key), list)]
    keys = {key for each in lists for entry in each if isinstance(entry, dict) for key in entry}
    images = record["images"] if isinstance(record.get("images"), list) else []
    if any("file_name" in each for each in images if isinstance(each, dict)):
        return "coco"
    if isinstance(objects := record.get("objects"), dict) and "bbox" in objects:
        return "ms-swift"
    if record.keys() & {"messages", "conversations"}:
        return "sharegpt"
    described = "desc" in keys and "objects" in record
    if described or (record.keys() & {"width", "height"} and not keys & {*NAMES}):
        return "jsonl"
    if record.keys() & {"image", "images"} and record.keys() & {*LISTS}:
        return "qwen"
    found = f"the first record has the keys {shown(sorted(record))}, which are of no known format"
    raise ContractError(where, found, _DO)


def require_jsonl(path: Path) -> None:
    """Raise ContractError for a file of another format; faults of a data file are not looked for.

    The first record determines the format.
    """
    try:
        form = detect_format(path)
    except ContractError:  # `scan` names the fault
        return
    if form != "jsonl":
        do = f"Convert it to jsonl first: `learner data convert {shlex.quote(str(path))} OUT.jsonl`"
        raise ContractError(str(path), f"this is {form}", do)
