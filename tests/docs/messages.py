"""The messages that docs/troubleshooting.md quotes, and where in the code they come from.

Most messages are f-strings: what is matched is their constant parts, in order.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shared_contracts.errors import PROBLEM_TITLES
from tests.docs import documents
from tests.docs.documents import ROOT, Block

PAGE = "docs/troubleshooting.md"
PACKAGES = ("learner", "rollout_server", "shared_contracts")
# Messages of programs that are not ours, by what they begin with.
FOREIGN = (
    "torch.OutOfMemoryError: CUDA out of memory.",
    "Connection refused",
    "[Errno 111] Connection refused",
)
# What carries the message of something else: a phase of a push, a call.
WRAPPERS = (
    re.compile(r"(?P<said>weight sync failed at the \w+ \(\S+\) in phase \w+: )"),
    re.compile(r"(?P<said>rollout server \S+ is lost: )"),
    re.compile(r"(?P<said>)(?:GET|POST) \S+(?: \S+)?: "),
)
PROBLEM = re.compile(r"(?P<title>[A-Z][^:()]*) \((?P<status>\d{3})\)(?:: |$)")
# Files whose remedies the errors of others end in.
SHARED_REMEDIES = {"rollout_server/settings/repeat_config.py"}
# Of a quoted line, how much has to be constant in the code.
LEAST_SHARE = 0.2
LEAST_LETTERS = 8


@dataclass(frozen=True)
class Template:
    """A string of the code. parts: its constant parts, blanks of any length made one."""

    file: str
    parts: tuple[str, ...]

    def explains(self, line: str) -> bool:
        """Whether `line` has all parts in order, and they are enough of it."""
        held = sum(len(part.strip()) for part in self.parts)
        if " " in line and not any(" " in part.strip() for part in self.parts):
            return False
        if held < min(LEAST_LETTERS, len(line)) or held < LEAST_SHARE * len(line):
            return False
        start = 0
        for part in self.parts:
            at = line.find(part, start)
            if at < 0:
                return False
            start = at + len(part)
        return True


def quoted() -> list[Block]:
    """Every block of the page that shows a message."""
    if PAGE not in documents.paths():
        return []
    return [b for b in documents.read(PAGE).blocks if b.language in ("", "text")]


def lines_of(block: Block) -> list[tuple[str, str]]:
    """(`error`, `found`, `do` or ``, the rest) of each line."""
    found = []
    for line in filter(None, block.text.splitlines()):
        kind = re.match(r"(?:error|  found|  do): ", line)
        found.append((kind[0].strip(" :") if kind else "", line[kind.end() :] if kind else line))
    return found


def unexplained(block: Block, templates: list[Template]) -> list[str]:
    """Lines that no string of the code makes; of three-part errors, those of one file."""
    lines = [(kind, text) for kind, text in lines_of(block) if not _is_foreign(text)]
    texts = [text for kind, text in lines if not _is_place(kind, text, lines)]
    said_parts = [part for text in texts for part in _parts(text)]
    missing = [p for p in said_parts if not any(t.explains(p) for t in templates)]
    said = [text for kind, text in lines if kind in ("found", "do")]
    if missing or len(said) < 2:
        return missing
    files = {t.file for t in templates if t.explains(said[0])} | SHARED_REMEDIES
    if not any(t.file in files and t.explains(said[1]) for t in templates):
        return [f"{said[0]!r} and {said[1]!r} are of different files"]
    return []


def _parts(text: str) -> list[str]:
    """What a line says, and what it passes on: of a phase, a call, or a problem with its title."""
    for wrapper in WRAPPERS:
        if outer := wrapper.match(text):
            said = outer["said"]
            return [*([said] if said else []), *_parts(text[outer.end() :])]
    if problem := PROBLEM.match(text):
        known = PROBLEM_TITLES.values()
        if (int(problem["status"]), problem["title"]) not in known:
            return [f"{problem['title']} ({problem['status']})"]
        return _parts(text[problem.end() :])
    return [text] if text and not text.startswith(FOREIGN) else []


def _is_place(kind: str, text: str, lines: list[tuple[str, str]]) -> bool:
    """Whether it is the first line of three: a path, a key or a route, which no code spells."""
    return kind == "error" and len(lines) > 1 and " is " not in text


def _is_foreign(text: str) -> bool:
    return text.startswith(FOREIGN)


@cache
def templates() -> list[Template]:
    """Every string of the packages that a message may be."""
    found: list[Template] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += of_source(str(path.relative_to(ROOT)), path.read_text())
    script = (ROOT / "scripts" / "setup").read_text()
    return found + [Template("scripts/setup", _split(part)) for part in re.split("[\"'\n]", script)]


def of_source(file: str, source: str) -> Iterator[Template]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Template(file, _split(node.value))
        elif isinstance(node, ast.JoinedStr):
            constants = [v.value for v in node.values if isinstance(v, ast.Constant)]
            yield Template(file, tuple(str(constant) for constant in constants))


def _split(text: str) -> tuple[str, ...]:
    """The constant parts of a string that may be the format of a log."""
    parts = re.split(r"%(?:\.\d)?[sdgrf]|\$\w+", text.strip())
    return tuple(part for part in parts if part.strip())
