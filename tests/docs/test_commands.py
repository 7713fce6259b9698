"""Every command of the documents is run, or its options are held against its program."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollout_server.cli
import rollout_server.settings.preflight
from rollout_server.settings.options import ServerSettings
from tests.contract.running_server import wait_until_gone
from tests.docs import documents, options
from tests.docs.commands import PLAIN, PROGRAMS, Command, all_commands, command, commands_of
from tests.docs.documents import Block
from tests.docs.messages import PAGE, quoted
from tests.docs.provoked import PROVOKED, Provoked, plain
from tests.docs.world import World, only

COMMANDS = all_commands()
# `kill "$SERVER_PID"` ends the server that the others ask.
RUN = sorted((c for c in COMMANDS if c.not_run is None), key=lambda c: c.program == "kill")
CHECKED = [c for c in COMMANDS if c.not_run is not None]
# SC2086: `$N` in a command that a reader edits needs no quotes. SC1091: a script that is elsewhere.
LOOSE = "SC2086,SC1091"
SERVERS = [c for c in CHECKED if c.program == "rollout-server"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("provoked", PROVOKED, ids=lambda provoked: provoked.said)
def test_a_message_is_what_a_failing_command_says(provoked: Provoked, served: World) -> None:
    """Before the server is ended below."""
    if "GPU" in provoked.said and Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("this machine has GPUs")
    train_once(served)
    provoked.write_config(served)
    asked = command(PAGE, 0, provoked.command, provoked.said)
    done = served.terminal(asked).run(
        provoked.command.replace("8000", str(served.port)).replace("/data/images", "")
    )
    (block,) = (block for block in quoted() if provoked.said in block.text)
    shown = plain(block.text, served.folder)
    if provoked.command.startswith("curl"):
        assert plain(json.loads(done.out)["detail"], served.folder) in shown
    else:
        assert (done.code, shown in plain(done.err, served.folder)) == (2, True), done.err


@pytest.mark.slow
@pytest.mark.req("CFG-01", "SRV-01")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("asked", RUN, ids=str)
def test_a_documented_command_does_what_it_says(asked: Command, served: World) -> None:
    if asked.program == "rollout-server":
        assert served.typed(asked) == served.typed(only("rollout-server", "cpu")), "start it, too"
        return
    if any(re.match(r"RUN\b|runs/", word) for word in asked.words):
        train_once(served)
    below = served.terminal(asked).below() if asked.program == "kill" else []
    done = served.run(asked)
    assert done.code == 0, done.shown
    assert "Traceback" not in done.shown, done.shown
    if asked.program == "curl":
        assert "urn:rollmatch:" not in done.out, done.out
        if any("/infer/" in word for word in asked.words):
            (answer,) = json.loads(done.out)
            assert answer["response"]["prompt_token_ids"]
            assert answer["response"]["choices"][0]["token_ids"]
    if asked.program == "kill":
        assert below
        assert wait_until_gone(below, 40.0) == []
    if shape := documented_answer(asked):
        assert differences(shape, json.loads(done.out)) == []


@pytest.mark.parametrize("asked", COMMANDS, ids=str)
def test_a_documented_command_is_one_its_program_takes(asked: Command) -> None:
    assert {simple.program for simple in asked.simple} <= {*PROGRAMS, *PLAIN}
    options.check(asked)


@pytest.mark.slow
@pytest.mark.req("CFG-09")
@pytest.mark.parametrize("asked", SERVERS, ids=str)
def test_the_settings_of_a_documented_server_load(
    asked: Command, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where the server looks for GPUs."""
    loaded: list[ServerSettings] = []

    def stop(settings: ServerSettings) -> None:
        loaded.append(settings)
        raise Stopped

    monkeypatch.chdir(world.folder)
    monkeypatch.setattr(rollout_server.settings.preflight, "check_settings", stop)
    with pytest.raises(Stopped):
        rollout_server.cli.app(command("", 0, world.typed(asked)).words[1:], standalone_mode=False)
    assert loaded[0].port == world.port


class Stopped(Exception):
    """The settings are loaded; nothing more is to happen."""


def train_once(world: World) -> None:
    """What the documents say of a run needs one."""
    if not world.run_folder.exists():
        done = world.run(only("learner", "train"))
        assert done.code == 0, done.shown


def documented_answer(asked: Command) -> Any | None:
    """The JSON that a document shows after a block with one command."""
    blocks = documents.read(asked.document).blocks
    place = next(i for i, block in enumerate(blocks) if str(block) == asked.block)
    after = blocks[place + 1 : place + 2]
    if asked.program != "curl" or not after or after[0].language != "json":
        return None
    return json.loads(after[0].text)


def differences(shown: Any, real: Any, where: str = "") -> list[str]:
    """Keys that only one of them has, and values of other types."""
    if isinstance(shown, dict) and isinstance(real, dict):
        found = [f"{where}.{key}" for key in shown if key not in real]
        both = [key for key in shown if key in real]
        below = (differences(shown[key], real[key], f"{where}.{key}") for key in both)
        return found + [difference for one in below for difference in one]
    if isinstance(shown, list) and isinstance(real, list):
        pairs = list(zip(shown, real, strict=False))
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{where}[{i}]")]
    return [] if type(shown) is type(real) else [f"{where}: {shown!r}, and it is {real!r}"]


WRONG = """```sh
learner train --config F --learning-rate 1
rollout-server serve --modle CHECKPOINT
torchrun --nproc-per-nide 2 --no-python learner train --config F
torchrun --nproc-per-node 2 --no-python learner trian --config F
make dmeo
make test EXRTA=gpu
ray start --haed
swift sft --no_such_option 1
vllm serve MODEL --no-such-option
kill -FOO %1
forgotten --option
```"""


def test_what_no_program_takes_is_caught() -> None:
    (block,) = documents.parse("docs/page.md", WRONG).blocks
    asked = list(commands_of(block))
    assert len(asked) == 11
    for one in asked:
        with pytest.raises(options.Unknown):
            options.check(one)


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "```sh\n# a note\nA=1 curl -d '{\n \"a\": 1}' \\\n  url  # why\nkill %1\n```\n"
    (block,) = documents.parse("docs/page.md", text).blocks
    first, second = commands_of(block)
    assert first.words == ["curl", "-d", '{\n "a": 1}', "url"]
    assert (first.environment, first.line) == ({"A": "1"}, 3)
    assert (second.words, second.line) == (["kill", "%1"], 6)


def test_another_shape_of_an_answer_is_caught() -> None:
    assert differences([{"a": [1], "b": {}}], [{"a": [2, 3], "b": {}, "c": 1}]) == []
    assert differences([{"a": 1, "b": "x"}], [{"b": 2}]) == ["[0].a", "[0].b: 'x', and it is 2"]


@pytest.mark.parametrize("block", documents.blocks("sh", "bash"), ids=str)
def test_a_block_of_shell_is_clean(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.sh"
    script.write_text(block.text)
    program = Path(sys.executable).parent / "shellcheck"
    for words in (["bash", "-n"], [str(program), "--shell=bash", f"--exclude={LOOSE}"]):
        done = subprocess.run([*words, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
