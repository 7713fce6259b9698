"""The formats that are read beside the data file, and which of them a file or folder has.

detect_format    by what the file or folder holds
read_other       -> `CocoFile`
"""

from pathlib import Path
from typing import Literal

from learner.data.boxes import Corners, Scale
from learner.data.coco import CocoFile, read_coco
from learner.data.conversations import read_conversations, records
from learner.data.images import Watch
from learner.data.jsonl import brief
from learner.data.voc import images_of, read_voc
from learner.data.yolo import read_yolo
from shared_contracts.errors import ContractError

Format = Literal["jsonl", "coco", "lvis", "yolo", "voc", "ms-swift", "sharegpt", "qwen"]
# They differ in what a record calls its turns and boxes; one reader takes all of them.
CONVERSATIONS: tuple[Format, ...] = ("ms-swift", "sharegpt", "qwen")
_DO = "Name the format with --from, and see docs/data.md for what each looks like"


def detect_format(path: Path) -> Format:
    """Return the format of a file or folder by what it holds; raises ContractError if by none."""
    if path.is_dir():
        if (path / "data.yaml").is_file():
            return "yolo"
        if any(path.glob("Annotations/*.xml")) or any(path.glob("*.xml")):
            return "voc"
        raise ContractError(str(path), "the folder has neither data.yaml nor XML files", _DO)
    if path.suffix in (".yaml", ".yml"):
        return "yolo"
    if path.suffix == ".json":
        text = _read(path)
        if '"category_id"' in text or '"categories"' in text:
            return "lvis" if '"neg_category_ids"' in text else "coco"
    where, record = next(records(path), (str(path), {}))
    if isinstance(record.get("objects"), dict):
        return "ms-swift"
    if record.keys() & {"messages", "conversations"}:
        return "sharegpt"
    objects = record.get("objects")
    described = isinstance(objects, list) and any(
        "desc" in o for o in objects if isinstance(o, dict)
    )
    if described or record.keys() & {"width", "height"}:
        return "jsonl"
    if record.keys() & {"image", "images"}:
        return "qwen"
    found = f"the first record has the keys {brief(sorted(record))}, which are of no known format"
    raise ContractError(where, found, _DO)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(str(path), f"it cannot be read ({error})", "Save it again") from error


def read_other(
    source: Path,
    form: Format,
    watch: Watch,
    images: Path | None = None,
    split: str | None = None,
    scale: Scale | None = None,
    corners: Corners | None = None,
) -> tuple[CocoFile, Path]:
    """Return what a file or folder holds, and the folder that its image names start at.

    images: that folder, if it is stated. split: of yolo and voc. scale, corners: of conversations.
    """
    if form == "yolo":
        return read_yolo(source, split, watch), source if source.is_dir() else source.parent
    if form == "voc":
        folder = images or images_of(source)
        return read_voc(source, split, folder), folder
    folder = images or source.parent
    if form in CONVERSATIONS:
        return read_conversations(source, folder, scale, corners, watch), folder
    return read_coco(source, lvis=form == "lvis"), folder
