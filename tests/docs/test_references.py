"""What prose points at is there: links, files, commands, options, keys of the configuration."""

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from learner.config.schema import Config
from tests.docs import documents, options
from tests.docs.documents import ROOT, Document, Inline

FILE = re.compile(r"[\w./*-]*[\w*]\.(?:py|md|ya?ml|jsonl?|sh|toml|html|png)")
FOLDERS = (
    "benchmarks",
    "configs",
    "deploy",
    "docs",
    "learner",
    "requirements",
    "rollout_server",
    "scripts",
    "shared_contracts",
    "tests",
)
# Files of a run, of other programs, and the names that stand for a reader's own.
MADE = {
    "../base.yaml",
    "/openapi.json",
    "FILE.json",
    "NAME.py",
    "adapter_config.json",
    "args.json",
    "config.json",
    "generation_config.json",
    "data.yaml",
    "coco_gt.json",
    "coco_preds.json",
    "gt_vs_pred.jsonl",
    "logging.jsonl",
    "metrics.jsonl",
    "my_run.yaml",
    "report.html",
    "resolved_config.yaml",
    "rollmatch_state.json",
    "bad_samples.jsonl",
    "bad_samples.rank1.jsonl",
    "rollout_calls*.jsonl",
    "rollout_calls.jsonl",
    "rollouts/step_*.jsonl",
    "run.json",
    "scores.json",
    "server.yaml",
    "step_*.rank*.jsonl",
    "train.yaml",
    "two_channel.yaml",
    "warmup.yaml",
}
# Options of other programs that prose names.
FOREIGN = {
    "docs/ms-swift.md": {
        *("--add_version", "--deepspeed", "--model", "--output_dir", "--resume_from_checkpoint"),
        *("--task_type", "--val_dataset"),
    },
    "docs/benchmarks.md": {"--only", "--rounds"},
    "deploy/README.md": {"--profile"},
}
# Sections of the training YAML, and those within that prose begins with.
SECTIONS = {*Config.model_fields, "vllm", "server", "sync", "schedule", "pipeline", "matching"}
RETIRED = {"custom.coord_loss"}
# A note of a change may name what has gone since, and a plan what has not come.
HISTORY = {"CHANGELOG.md"}


def inline(*documents_read: Document) -> list[Inline]:
    found = documents_read or tuple(documents.documents())
    return [code for document in found for code in document.codes]


def dead_links(document: Document) -> list[str]:
    """Relative links without their file, and anchors without their heading."""
    dead = []
    for link in document.links:
        if re.match(r"[a-z]+:", link.text):
            continue
        path, _, anchor = link.text.partition("#")
        target = (ROOT / document.path).parent / path if path else ROOT / document.path
        if not target.exists():
            dead.append(f"{link}: no such file")
        elif anchor and anchor not in documents.parse("", target.read_text()).anchors:
            dead.append(f"{link}: no such heading")
    return dead


def missing_file(code: Inline) -> bool:
    """Whether it looks like a file of the repository, and none is there."""
    text = re.sub(r":\d+$", "", code.text)
    names_folder = text.startswith(tuple(f"{folder}/" for folder in FOLDERS))
    if not (names_folder and " " not in text) and not FILE.fullmatch(text):
        return False
    made_by_a_run = any(fnmatch(text, made) or fnmatch(text, f"*/{made}") for made in MADE)
    if made_by_a_run or text.startswith(("/", "runs/")):
        return False
    return not any(fnmatch(f"/{file}", f"*/{text.rstrip('/')}") for file in tracked())


@cache
def tracked() -> frozenset[str]:
    """Files and folders of the project, from its root."""
    found: set[str] = set()
    for top in (*FOLDERS, "."):
        inside = (ROOT / top).rglob("*") if top != "." else ROOT.glob("*")
        found |= {str(path.relative_to(ROOT)) for path in inside if "__pycache__" not in str(path)}
    return frozenset(found | set(FOLDERS))


def unknown_words(code: Inline) -> str | None:
    """Why a command, or an option, is none; None where it is one, or code of another kind."""
    words = code.text.split()
    try:
        if words[:1] and words[0] in options.OURS and len(words) > 1:
            options.mentioned(words)
        elif words[:2] == [".venv/bin/python", "-m"]:
            options.python_module(code.text)
        elif re.match(r"--[a-z]", code.text):
            return unknown_option(code)
    except options.Unknown as unknown:
        return str(unknown)
    return None


def unknown_option(code: Inline) -> str | None:
    names = set(options.option_names(code.text.split())) - FOREIGN.get(code.document, set())
    names -= options.all_options()
    if names and names <= options.torchrun_options():
        return None
    return f"{code}: no program of ours has it" if names else None


@cache
def config_keys() -> frozenset[str]:
    """Every key of the training YAML, by the generated reference, without indices."""
    keys: set[str] = set()
    for code in documents.read("docs/config.md").codes:
        steps = code.text.replace("[]", "").split(".")
        if re.fullmatch(r"[a-z0-9_.\[\]]+", code.text):
            keys |= {".".join(steps[: i + 1]) for i in range(len(steps))}
    return frozenset(keys)


def unknown_key(code: Inline) -> str | None:
    """A dotted key, maybe with its value, that the training YAML does not have."""
    found = re.match(r"((?:[a-z]\w*)(?:\.[a-z]\w*\*?(?:\[\d*\])?)+)(?=$|:)", code.text)
    if found is None:
        return None
    key = re.sub(r"\[\d*\]", "", found[1])
    if key.split(".")[0] not in SECTIONS or FILE.fullmatch(key) or key.endswith(".log"):
        return None
    if key in RETIRED:
        return None
    if any(fnmatch(f".{known}", f"*.{key}") for known in config_keys()):
        return None
    return f"{code}: no such key"


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize("path", documents.paths())
def test_every_link_leads_somewhere(path: str) -> None:
    assert dead_links(documents.read(path)) == []


@pytest.mark.parametrize("path", documents.paths())
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert [str(c) for c in inline(documents.read(path)) if missing_file(c)] == []


@pytest.mark.parametrize("path", documents.paths())
def test_every_command_and_option_that_is_named_exists(path: str) -> None:
    assert [why for c in inline(documents.read(path)) if (why := unknown_words(c))] == []


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("path", sorted(set(documents.paths()) - HISTORY))
def test_every_key_that_is_named_exists(path: str) -> None:
    assert [why for c in inline(documents.read(path)) if (why := unknown_key(c))] == []


WRONG = """# A page

[gone](nothing.md) [here](../README.md#no-such-heading) [good](../README.md#try-it)
`learner trian --config F`, `learner train --learning-rate`, `--no-such-option`,
`learner config show run.yaml more.yaml`, `learner config show --config run.yaml`,
`docs/nothing.md`, `learner/nothing.py`, `training.learning_rat: 1`, `rollout_matching.vlm.mode`,
`.venv/bin/python -m benchmarks.nothing`; `learner train --config F`, `docs/server.md`,
`training.save_*`, `training.resume: auto`, `rollout_matching.vllm.server.servers[0].base_url`.
"""


def test_a_reference_to_nothing_is_caught() -> None:
    page = documents.parse("docs/page.md", WRONG)
    assert [link.split(": ")[1] for link in dead_links(page)] == [
        "nothing.md",
        "../README.md#no-such-heading",
    ]
    assert [c.text for c in inline(page) if missing_file(c)] == [
        "docs/nothing.md",
        "learner/nothing.py",
    ]
    assert [c.text for c in inline(page) if unknown_words(c)] == [
        "learner trian --config F",
        "learner train --learning-rate",
        "--no-such-option",
        "learner config show run.yaml more.yaml",
        ".venv/bin/python -m benchmarks.nothing",
    ]
    assert [c.text for c in inline(page) if unknown_key(c)] == [
        "training.learning_rat: 1",
        "rollout_matching.vlm.mode",
    ]


def test_every_document_is_read() -> None:
    assert {"README.md", "deploy/README.md", "docs/server.md"} <= set(documents.paths())
    assert all(Path(ROOT / path).is_file() for path in documents.paths())
    assert len(inline()) > 1000
