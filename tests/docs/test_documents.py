"""The documents' commands run, print what the documents show, and their YAML is valid."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import dump_mapping, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import make_data
from learner.runs.run_folder import RunFolder
from rollout_server.settings.options import ServerSettings, load_settings
from tests.contract.running_server import START_TIMEOUT_S
from tests.docs.documents import LAST_STEP, ROOT, Block, World, blocks, open_world, start_server
from tests.integration.ranks import Nursery

SHELL = blocks("sh")
SERVE, TRAIN = (
    next(c for block in SHELL for c in block.commands if all(word in c for word in words))
    for words in (("rollout-server serve", "--device cpu"), ("learner train my_run.yaml",))
)
# The rest needs GPUs, docker, root, a published checkpoint, several nodes, or minutes.
# scripts/doc_links checks its commands and options.
RUNS = re.compile(
    r"(?!.*(my_run/|configs/))"
    r"(curl|learner (config check|doctor|estimate|report|replay|launch --device cpu)) "
)
# The programs see no GPU with any value of this variable.
SAME = re.compile(r"^CUDA_VISIBLE_DEVICES=\S+ |--config ")
COMMANDS = sorted({c for b in SHELL for each in b.commands if RUNS.match(c := SAME.sub("", each))})
FOR_GPUS = re.compile(r"(rollout-server serve|learner launch) (?!.*ray ).*gpus ")
SERVERS = re.compile(r"rollout-server serve (?!.*(ray|gpus|--port) )")
TORCHRUN = re.compile(r"CUDA_VISIBLE_DEVICES=\S+ (torchrun --nproc.*)")
TRANSCRIPTS = [block for block in blocks("") if block.text.startswith("$ ")]


@pytest.fixture(scope="session")
def world(
    toy_checkpoint: Path, started: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The world in which the documented training has run."""
    folder = tmp_path_factory.mktemp("docs").resolve()
    with open_world(folder, toy_checkpoint, SERVE, started) as world:
        code, printed = world.run(TRAIN)
        assert code == 0, printed
        yield world


@pytest.mark.slow
@pytest.mark.req("CFG-01", "SRV-01")
@pytest.mark.parametrize(
    "command",
    [
        # tests/integration/test_commands.py launches, too.
        pytest.param(c, marks=pytest.mark.nightly if "learner launch" in c else ())
        for c in COMMANDS
    ],
)
def test_a_documented_command_succeeds(command: str, world: World) -> None:
    code, printed = world.run(command)
    assert code == 0, printed
    assert "Traceback" not in printed
    if command.startswith("curl"):
        assert "urn:rollmatch:" not in printed, printed


@pytest.mark.slow
@pytest.mark.req("SRV-04")
@pytest.mark.parametrize(
    "command", sorted({c for block in SHELL for c in block.commands if FOR_GPUS.match(c)})
)
def test_a_documented_command_for_gpus_lacks_nothing_else(command: str, world: World) -> None:
    """It is refused for them, for the token of the page, or as the server of `world` runs."""
    code, printed = world.run(command.replace("train.yaml", "my_run.yaml"))  # of the run here
    assert code == 2, printed
    faults = re.findall(r"^error: (.*)$", printed, re.MULTILINE)
    assert faults, printed
    lacking = re.compile(r"(--)?(gpus|server-gpus|train-gpus|device|host)|\S+\[0\]\.base_url")
    assert all(map(lacking.fullmatch, faults)), printed


@pytest.mark.slow
@pytest.mark.nightly  # test_replicas.py and others start servers with these options
@pytest.mark.req("SRV-01")
@pytest.mark.parametrize(
    "command", sorted({c for b in SHELL for c in b.commands if SERVERS.match(c) and c != SERVE})
)
def test_a_documented_server_starts(command: str, world: World) -> None:
    settings = {"model": str(world.folder / "CHECKPOINT"), "device": "cpu"}
    (world.folder / "server.yaml").write_text(dump_mapping(settings))
    with start_server(world.folder, command, "another.log") as server:
        server.wait_until_healthy(START_TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.req("DDP-01")
def test_the_documented_torchrun_trains(world: World) -> None:
    world.write_config("two.yaml", training={"output_dir": "runs/two"})
    commands = {found[1] for b in SHELL for c in b.commands if (found := TORCHRUN.match(c))}
    (command,) = {re.sub(r"\w+\.yaml", "two.yaml", command) for command in commands}
    code, printed = world.run(command)
    assert code == 0, printed
    *_, summary = RunFolder(world.folder / "runs/two").metrics()
    assert summary["step"] == LAST_STEP


@pytest.mark.slow
def test_the_readme_leads_from_own_data_to_a_score(
    toy_checkpoint: Path, started: Nursery, tmp_path: Path
) -> None:
    """Its commands in their order, except the download, on a CPU and with one step a run."""
    folder = tmp_path / "own"
    make_data(folder, train=16, val=4, seed=0)
    (folder / "models").mkdir()
    (folder / "models/qwen3-vl-4b").symlink_to(toy_checkpoint)
    (walk,) = [block.commands for block in SHELL if "learner init --model" in block.text]
    assert walk[0].startswith("hf download ")
    assert walk[0].endswith(" models/qwen3-vl-4b")
    for command in walk[1:]:
        words = re.sub(r"checkpoint-\d+", "checkpoint-1", command).split()[1:]
        options = ["--gpu", "cpu"] if words[0] == "init" else []
        code, printed = started.run([*words, *options], folder)
        assert code == 0, printed
        for file in (folder / "my_run").glob("*.yaml") if options else ():
            short = re.sub(r"(_steps:|checkpoint-)( ?)\d+", r"\1\g<2>1", file.read_text())
            file.write_text(short.replace("b_ratio: 0.5", "b_ratio: 1.0"))
    assert "F1@mIoU" in printed


@pytest.mark.slow
def test_an_answer_of_the_server_has_the_documented_fields(world: World) -> None:
    (command,) = [c for c in COMMANDS if "/infer/" in c and '"temperature": 0' in c]
    (shown,) = [block.text for block in blocks("json") if '"choices": [{' in block.text]
    assert fields(json.loads(shown)) <= fields(json.loads(world.run(command)[1]))


def fields(value: Any, path: str = "") -> set[str]:
    """The path and type of each value in JSON."""
    if isinstance(value, dict):
        return {name for key in value for name in fields(value[key], f"{path}.{key}")}
    if isinstance(value, list):
        return {f"{path}[]", *(name for item in value for name in fields(item, f"{path}[]"))}
    return {f"{path}: {type(value).__name__}"}


@pytest.mark.slow
@pytest.mark.parametrize("block", TRANSCRIPTS, ids=lambda block: block.text.splitlines()[0])
def test_a_command_prints_what_the_document_shows(block: Block, world: World) -> None:
    """`...` stands for any lines."""
    (command, *shown) = block.text.splitlines()
    _, printed = world.run(command.removeprefix("$ "))
    lines = ("(?:.*\n)*?" if s == "..." else re.escape(s.rstrip()) + "\n" for s in shown)
    printed = re.sub(r" +\n", "\n", printed)
    assert re.fullmatch("".join(lines), printed), printed


# Text of the quoted message, command, changes of the section `training`.
MISTAKES: list[tuple[str, str, dict[str, Any]]] = [
    ("samples a step", TRAIN, {"effective_batch_size": 4096, "output_dir": "runs/new"}),
    ("holds another run", TRAIN, {"resume": "never"}),
    ("the port is in use", "rollout-server serve --model CHECKPOINT --device cpu --port 8000", {}),
    ("is no token", "rollout-server serve --model CHECKPOINT --device cpu --host 0.0.0.0", {}),
]


@pytest.mark.slow
@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(("text", "command", "changes"), MISTAKES)
def test_a_mistake_is_reported_as_the_troubleshooting_page_shows(
    text: str, command: str, changes: dict[str, Any], world: World
) -> None:
    (block,) = [block for block in blocks("text") if text in block.text]
    world.write_config("mistake.yaml", training=changes)
    command = command.replace("my_run", "mistake")
    code, printed = world.run(command.replace("8000", world.base_url.rpartition(":")[2]))
    assert code == 2
    printed = printed.replace(f"{world.folder}/", "")
    shown, printed = (re.sub(r"\d+(?:\.\d+)*", "N", each) for each in (block.text, printed))
    assert shown in printed, printed


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(
    "block", blocks("yaml"), ids=lambda block: f"{block.document}-{block.text.splitlines()[0]}"
)
def test_yaml_of_a_document_is_valid(block: Block, tmp_path: Path) -> None:
    """A part of a training YAML, or settings of a server."""
    mapping = yaml.safe_load(block.text)
    if mapping.keys() & {*Config.model_fields, "extends"}:
        base = ROOT / mapping.pop("extends", "configs/demo/warmup.yaml")
        parse_config(merge(load_mapping(base), mapping))
    elif mapping.keys() & ServerSettings.model_fields.keys():
        (tmp_path / "server.yaml").write_text(block.text)
        load_settings(tmp_path / "server.yaml", {"model": str(tmp_path)}, environ={})
