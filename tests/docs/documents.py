"""The documents as a program sees them: fenced blocks, inline code, links, headings."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block. document: path from the root; line: of its fence; language: may be ""."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def start(self) -> str:
        """Its first line that is not empty: what tables name it by, since lines move."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class Inline:
    """Inline code or the target of a link. line: where its paragraph begins."""

    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Document:
    """anchors: of its headings, as GitHub names them. generated: by a script, from code."""

    path: str
    blocks: list[Block]
    codes: list[Inline]
    links: list[Inline]
    anchors: set[str]
    generated: bool


def paths(root: Path = ROOT) -> list[str]:
    """Every document, from `root`."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "deploy").rglob("*.md")]
    return sorted(str(path.relative_to(root)) for path in found)


@cache
def read(path: str, root: Path = ROOT) -> Document:
    return parse(path, (root / path).read_text())


def parse(path: str, text: str) -> Document:
    """The document of a Markdown text."""
    document = Document(path, [], [], [], set(), "*Written by `scripts/" in text)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for place, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            document.blocks.append(Block(path, line, token.info.strip(), token.content))
        elif token.type == "inline":
            _read_inline(document, token, line)
            if tokens[place - 1].type == "heading_open":
                document.anchors.add(_anchor(token.content, document.anchors))
    return document


def documents() -> list[Document]:
    return [read(path) for path in paths()]


def blocks(*languages: str) -> list[Block]:
    """The fenced blocks of all documents in these languages."""
    return [b for document in documents() for b in document.blocks if b.language in languages]


def _read_inline(document: Document, token: Token, line: int) -> None:
    for child in token.children or ():
        if child.type == "code_inline":
            document.codes.append(Inline(document.path, line, child.content))
        elif child.type in ("link_open", "image"):
            target = child.attrGet("href" if child.type == "link_open" else "src")
            document.links.append(Inline(document.path, line, str(target)))


def _anchor(heading: str, taken: set[str]) -> str:
    """How GitHub names a heading: lower case, hyphens, and a number where it comes again."""
    words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    name, again = words, 0
    while name in taken:
        again += 1
        name = f"{words}-{again}"
    return name
