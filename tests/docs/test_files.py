"""YAML and JSON in the documents are what the programs read and write."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.coco import CocoAnnotation
from learner.data.conversion import Conversion, LeftOut, Rule, write_left_out
from learner.data.jsonl import read_samples
from learner.operate.simulate.inputs import Drawn, LengthsFile, Speeds, read_strict
from rollout_server.http.chat_completions import openai_error
from rollout_server.settings.options import ServerSettings, load_settings
from shared_contracts.errors import PROBLEM_TITLES, ContractErrors, Problem
from tests.docs import documents
from tests.docs.documents import ROOT, Block

WARMUP = ROOT / "configs" / "demo" / "warmup.yaml"
LENGTHS = {"samples", "prompt", "answer", "target", "corrected"}
# JSON that an answer of a server has: tests/docs/test_commands.py holds it against a real one.
ANSWERS = "response"


class Unreadable(AssertionError):
    """A block that no program reads."""


def read_yaml(text: str, folder: Path) -> object:
    """The block as the program reads it whose keys it has; a part is read on top of a whole."""
    mapping = yaml.safe_load(text)
    keys = set(mapping) if isinstance(mapping, dict) else set[str]()
    file = folder / "block.yaml"
    file.write_text(text)
    if keys and keys <= {*Config.model_fields, "extends"}:
        return _read_config(mapping)
    if keys and keys <= set(ServerSettings.model_fields):
        return load_settings(file, {"model": str(folder)}, environ={})
    if keys and keys <= set(Speeds.model_fields):
        return read_strict(file, Speeds)
    if keys and keys <= LENGTHS:
        return Drawn(read_strict(file, LengthsFile), seed=0)
    if "services" in keys:
        return _read_services(mapping)
    raise Unreadable(f"no program reads {sorted(keys)}")


def _read_config(mapping: dict[str, Any]) -> Config:
    base = ROOT / mapping.pop("extends") if "extends" in mapping else WARMUP
    return parse_config(merge(load_mapping(base), mapping))


def _read_services(mapping: dict[str, Any]) -> set[str]:
    """An override of the compose file: services that it has."""
    known = yaml.safe_load((ROOT / "deploy" / "docker-compose.yaml").read_text())["services"]
    unknown = set(mapping["services"]) - set(known)
    if unknown:
        raise Unreadable(f"no services {unknown}")
    return set(known)


def read_json(text: str, folder: Path) -> object:
    """The block as its reader takes it: a line of data, a problem, an answer."""
    value = json.loads(text)
    if isinstance(value, dict) and "images" in value:
        size = (value["width"], value["height"])
        for name in value["images"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size).save(folder / name)
        (folder / "data.jsonl").write_text(json.dumps(value) + "\n")
        return read_samples(folder / "data.jsonl", allow_poly=True)
    if isinstance(value, dict) and value.keys() == {"error"}:
        return _read_openai_error(value)
    if isinstance(value, dict) and "type" in value:
        problem = Problem.model_validate(value)
        if PROBLEM_TITLES.get(problem.kind) != (problem.status, problem.title):
            raise Unreadable(f"{problem.kind} is {PROBLEM_TITLES.get(problem.kind)}")
        return problem
    if isinstance(value, dict) and "reason" in value:
        return _read_left_out(value, folder)
    if isinstance(value, list) and all(ANSWERS in element for element in value):
        return value
    raise Unreadable(f"nobody reads or writes {text[:60]}")


def _read_openai_error(value: dict[str, Any]) -> Problem:
    """The body of an error below `/v1/`, which is one of the server's problems."""
    error = value["error"]
    problem = Problem.of(error["code"], error["message"].partition(": ")[2], error["param"])
    if openai_error(problem) != value:
        raise Unreadable(f"the server writes {openai_error(problem)}")
    return problem


def _read_left_out(value: dict[str, Any], folder: Path) -> Rule:
    """A line of `convert --left-out`: its keys, and a reason that there is."""
    annotation = CocoAnnotation(image_id=1, category_id=1, bbox=(0, 0, 1, 1))
    conversion = Conversion(left_out=[LeftOut(annotation, None, Rule.CROWD)])
    write_left_out(conversion, folder / "instances.json", folder / "left_out.jsonl")
    written = json.loads((folder / "left_out.jsonl").read_text())
    if value.keys() != written.keys():
        raise Unreadable(f"a line of --left-out has {sorted(written)}")
    return next(rule for rule in Rule if rule.what == value["reason"])


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("block", documents.blocks("yaml", "yml"), ids=str)
def test_yaml_of_a_document_is_read_by_its_program(block: Block, tmp_path: Path) -> None:
    read_yaml(block.text, tmp_path)


@pytest.mark.parametrize("block", documents.blocks("json"), ids=str)
def test_json_of_a_document_is_read_by_its_program(block: Block, tmp_path: Path) -> None:
    read_json(block.text, tmp_path)


@pytest.mark.parametrize("block", documents.blocks("jsonl"), ids=str)
def test_lines_of_json_of_a_document_are_read(block: Block, tmp_path: Path) -> None:
    for line in block.text.splitlines():
        read_json(line, tmp_path)


def test_every_language_has_a_test() -> None:
    languages = {b.language for document in documents.documents() for b in document.blocks}
    here = {"yaml", "yml", "json", "jsonl"}
    elsewhere = {"", "text", "console", "sh", "bash"}
    drawn, of_others = {"mermaid"}, {"nginx"}  # tests/unit/test_architecture.py; no program of ours
    elsewhere.add("python")  # tests/contract/test_openai.py runs it
    assert languages - here - elsewhere <= drawn | of_others


@pytest.mark.parametrize(
    "text",
    [
        "training: {save_stepz: 500}",
        "trainign: {save_steps: 500}",
        "engine: {step_z: 0.1}",
        "prompt: [900, 1250]\nsamples: -1",
        "max_num_seq: 3",
    ],
)
def test_yaml_with_a_fault_is_caught(text: str, tmp_path: Path) -> None:
    with pytest.raises((ContractErrors, Unreadable)):
        read_yaml(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"images": ["a.png"], "width": 64, "height": 64, "objects": [{"desc": "a"}]}',
        '{"type": "urn:rollmatch:not-ready", "title": "?", "status": 5, "detail": "", "where": ""}',
        '{"nobody": 1}',
        '{"error": {"message": "a: b", "type": "?", "param": "a", "code": "not-ready"}}',
        "{1}",
    ],
)
def test_json_with_a_fault_is_caught(text: str, tmp_path: Path) -> None:
    with pytest.raises((ContractErrors, Unreadable, ValueError)):
        read_json(text, tmp_path)
