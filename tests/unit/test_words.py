"""Words: the product uses none that was retired, and docs/glossary.md explains the special ones."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs import documents

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared_contracts", "rollout_server", "learner")

# What is written in place of each retired word. A word is retired as a part of any identifier.
WORDS = {
    "collector": "staging",
    "cores": "openmp",
    "fence": "bounded",
    "fenced": "bounded",
    "fences": "numerics",
    "guest": "probe",
    "handout": "dispatch",
    "joint": "gather_with_deadline",
    "judged": "assessed",
    "lesson": "supervision",
    "lessons": "supervision",
    "opening": "update_admission",
    "race": "cancel_when",
    "reading": "logit_stats",
    "telling": "propagate_errors or reporting_waits",
    "tend": "heal",
    "tied": "die_with_parent",
    "upkeep": "leader or follower",
}
# Whole identifiers, where a part of them is a good word elsewhere: by kind, what is written now.
NAMES = {
    ("class", "Alone"): "SingleProcess",
    ("class", "Findings"): "CheckErrors",
    ("class", "Following"): "follower",
    ("class", "GateShut"): "stopped",
    ("class", "Judge"): "assess",
    ("class", "Member"): "server_handle",
    ("class", "PushedMember"): "server_handle",
    ("class", "Pushing"): "leader",
    ("class", "SignsOfLife"): "heartbeat",
    ("function", "all_of"): "gather_with_deadline",
    ("function", "in_step"): "synchronous_rollouts",
    ("function", "quiet"): "exclusive_access",
    ("function", "require_alone"): "exclusive_lease",
    ("function", "rollout_beside"): "asynchronous",
    ("function", "share"): "all_gather, rank_batch or fraction",
    ("function", "shut"): "stop",
    ("function", "unless"): "cancel_when",
    ("module", "alone"): "exclusive_lease",
    ("module", "in_step"): "synchronous_rollouts",
    ("module", "judge"): "assess",
    ("module", "kept_server"): "supervised_server",
    ("module", "life"): "heartbeat",
    ("module", "log_cut"): "truncate_logs",
    ("module", "member"): "server_handle",
    ("module", "overlap"): "prefetch",
    ("module", "placement"): "load_plan",
    ("module", "process_mark"): "process_identity",
    ("module", "publish"): "atomic_files",
    ("module", "updatable"): "engine_protocol",
}


class Identifier(NamedTuple):
    """kind: module, class, function or parameter; place: file and line."""

    kind: str
    name: str
    place: str

    @property
    def words(self) -> list[str]:
        """Its parts in small letters: `GateShut` and `_gate_shut` have gate and shut."""
        return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", self.name)]


def identifiers(path: Path, place: str) -> Iterator[Identifier]:
    """Names that a module gives: its own, of its folder, classes, functions and parameters."""
    yield Identifier("module", path.parent.name if path.stem == "__init__" else path.stem, place)
    for node in ast.walk(ast.parse(path.read_bytes(), filename=place)):
        if isinstance(node, ast.ClassDef):
            yield Identifier("class", node.name, f"{place}:{node.lineno}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Identifier("function", node.name, f"{place}:{node.lineno}")
        elif isinstance(node, ast.arg):
            yield Identifier("parameter", node.arg, f"{place}:{node.lineno}")


@cache
def of_the_product() -> list[Identifier]:
    return [
        identifier
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for identifier in identifiers(path, str(path.relative_to(ROOT)))
    ]


def with_word(word: str, names: list[Identifier]) -> list[Identifier]:
    return [name for name in names if word in name.words]


@pytest.mark.parametrize("word", WORDS)
def test_no_retired_word_is_part_of_an_identifier(word: str) -> None:
    assert with_word(word, of_the_product()) == [], f"write {WORDS[word]}"


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_no_retired_identifier_is_back(kind: str, name: str) -> None:
    found = [
        each for each in of_the_product() if (each.kind, each.name.lstrip("_")) == (kind, name)
    ]
    assert found == [], f"write {NAMES[kind, name]}"


def test_one_class_is_a_finding() -> None:
    classes = [name for name in of_the_product() if name.kind == "class"]
    assert [name.name for name in with_word("finding", classes)] == ["Finding"]


def test_identifiers_of_every_kind_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "old_word.py"
    source.write_text(
        "class HTTPOldWord:\n"
        "    async def _old_word(self, a, /, old_word, *old_words, b, **k): ...\n"
        "text = 'old_word'  # old_word\n"
        "f = lambda oldWord: 1\n"
    )
    found = list(identifiers(source, "f.py"))
    assert found[:3] == [
        Identifier("module", "old_word", "f.py"),
        Identifier("class", "HTTPOldWord", "f.py:1"),
        Identifier("function", "_old_word", "f.py:2"),
    ]
    assert {name.name for name in found[3:]} == {"self", "a", "old_word", "old_words", "b", "k"} | {
        "oldWord"
    }
    assert len(with_word("old", found)) == 6
    assert with_word("ol", found) == []


def test_the_name_of_a_folder_is_the_name_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "__init__.py").touch()
    assert [name.name for name in identifiers(tmp_path / "old" / "__init__.py", "f.py")] == ["old"]


# --- the glossary

GLOSSARY = ROOT / "docs" / "glossary.md"
WITH_SPECIAL_WORDS = [
    path for path in documents.paths() if path.startswith("docs/") or path == "README.md"
]


def entries() -> dict[str, str]:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)
    return dict(rows[2:])


def test_each_word_of_the_glossary_has_one_to_three_sentences_and_its_place() -> None:
    words = entries()
    assert 25 <= len(words) <= 45
    assert list(words) == sorted(words, key=str.lower)
    for word, meaning in words.items():
        assert meaning.endswith("."), word
        assert 1 <= len(re.findall(r"[.:] [A-Z]|\.$", meaning)) <= 3, word


@pytest.mark.parametrize("path", [path for path in WITH_SPECIAL_WORDS if "glossary" not in path])
def test_a_document_leads_to_the_glossary(path: str) -> None:
    links = [link.text.partition("#")[0] for link in documents.read(path).links]
    assert ("docs/glossary.md" if path == "README.md" else "glossary.md") in links
