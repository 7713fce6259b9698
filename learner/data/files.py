"""Text, JSON and JSONL files of data, the problems that name a line of one, and their formats."""

import codecs
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Literal

from learner.runs.atomic_files import publish_text
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import shown

OutFormat = Literal["jsonl", "coco", "lvis", "yolo", "voc", "ms-swift"]
Format = Literal[OutFormat, "sharegpt", "qwen"]
DATA_YAML = "data.yaml"
# Keys of a record of Qwen with its boxes, and of a box with its description.
LISTS = ("objects", "annotations", "detections", "boxes")
NAMES = ("label", "ref", "desc", "name", "category", "phrase", "caption")
_DO = "Name the format with --from, and see docs/data.md for what each looks like"
MAX_SHOWN_ERRORS = 20
_ONE_OBJECT = "Write one JSON object a line, with each key once."
_SHOWN = 80


class DataProblem(ContractError):
    """A problem of one line of a data file; `where` is `file:line`.

    kind: the name that summaries count it under. warning: the line is still valid.
    """

    def __init__(
        self, kind: str, where: str, found: str, do: str, *, warning: bool = False
    ) -> None:
        super().__init__(where, found, do)
        self.kind = kind
        self.warning = warning


def capped(where: str, errors: Sequence[ContractError]) -> ContractErrors:
    """Return the first errors, and the number of the others as one more error."""
    hidden = len(errors) - MAX_SHOWN_ERRORS
    if hidden <= 0:
        return ContractErrors([*errors])
    found = f"{hidden} more problems ({len(errors)} in all)"
    more = ContractError(where, found, "Correct these first, then run the command again.")
    return ContractErrors([*errors[:MAX_SHOWN_ERRORS], more])


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without line ends.

    Raises ContractError for a missing, unreadable or empty file.
    """
    with _opened(path, "Name a data file, such as JSONL with one sample a line.") as file:
        for number, raw in enumerate(file):
            line = raw if number else raw.removeprefix(codecs.BOM_UTF8)
            yield line.removesuffix(b"\n").removesuffix(b"\r")
        if not file.tell():
            raise ContractError(str(path), "the file has no samples", _ONE_OBJECT)


def read_text(path: Path, do: str) -> str:
    """Return the text of a UTF-8 file, with newlines as the ends of all lines.

    Raises ContractError with the remedy `do`.
    """
    with _opened(path, do) as file:
        return TextIOWrapper(file, encoding="utf-8-sig").read()


@contextmanager
def _opened(path: Path, do: str) -> Iterator[BinaryIO]:
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, do)
    try:
        with path.open("rb") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(str(path), f"it cannot be read ({error})", do) from error


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path, jsonl_text(records))


def jsonl_text(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def parse_line(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of one line; raises `DataProblem`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of the line is not UTF-8"
        raise DataProblem("not UTF-8", where, found, "Save the file as UTF-8.") from error
    if not text.strip():
        raise DataProblem("empty line", where, "the line is empty", "Remove it.")
    record = parse_json(text, where)
    if not isinstance(record, dict):
        found = f"{shown(record)} is no JSON object"
        raise DataProblem("not a JSON object", where, found, _ONE_OBJECT)
    return record


def parse_json(text: str, where: str, do: str = _ONE_OBJECT) -> Any:
    """Return the value of JSON text; raises `DataProblem`, also for keys that are given twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (RecursionError, ValueError) as error:
        start = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN])
        raise DataProblem("not JSON", where, f"not JSON ({error}): {start}", do) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        [(key, times)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} is given {times} times in one object")
    return record


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, record) for each line of JSONL, or entry of a JSON list or lone object.

    Blank lines are skipped. An entry that is no object has an empty record.
    """
    first = next((raw.strip() for raw in raw_lines(path) if raw.strip()), b"")
    if first.startswith(b"[") or first == b"{":  # one JSON value over several lines
        do = "Write a JSON list, or JSONL."
        value = parse_json(read_text(path, do), str(path), do)
        for index, entry in enumerate(value if isinstance(value, list) else [value]):
            yield f"{path.name}[{index}]", entry if isinstance(entry, dict) else {}
    else:
        for number, raw in enumerate(raw_lines(path), start=1):
            if raw.strip():
                yield f"{path.name}:{number}", parse_line(raw, f"{path}:{number}")


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
