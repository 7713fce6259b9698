"""What the commands of the documents find: data, a model, the files a reader would have.

Names in a command stand for files of that name here (`CHECKPOINT`, `my_run.yaml`). What
cannot be a name is replaced: `World.typed` has the whole list.
"""

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from PIL import Image

from learner.config import dump_mapping
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.server_process import free_ports
from learner.runs.run_folder import RunFolder
from tests.contract.running_server import START_TIMEOUT_S
from tests.docs import data_page, documents
from tests.docs.commands import Command, all_commands, command
from tests.docs.documents import ROOT
from tests.docs.terminal import Done, Terminal

# Added to every server: its documented port may be taken, and machines differ in memory.
SERVER = "--kv-cache-gib 0.125"
# Folders below the world where commands of a document are typed, if not in itself.
FOLDERS = {"docs/data.md": "data"}

# Steps of the longer runs that documents speak of, and those of the run here.
STEPS = {"--step 120": "--step 4", "--step 12": "--step 4", "checkpoint-120": "checkpoint-4"}
SAMPLE = "train.jsonl:7"
# What documents call the one training YAML.
NAMES_OF_RUN = r"\b(?:train\.yaml|RUN\.yaml|F)(?=\s|$)"


class World:
    """A folder with everything in it, and the terminals of the documents' blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.port, self.group_port = free_ports(2)
        self._done: dict[tuple[str, str], Done] = {}
        self._terminals: dict[str, Terminal] = {}
        self._make()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_folder(self) -> Path:
        """What the documented training writes."""
        return self.folder / "runs" / "earlier"

    def typed(self, asked: Command) -> str:
        """The command with every placeholder replaced by what stands for it here."""
        text = asked.text.replace("http://127.0.0.1:8000", self.base_url)
        text = text.replace("/data/images", str(self.folder))
        for shown, here in STEPS.items():
            text = text.replace(shown, here)
        if SAMPLE in text:
            text = text.replace(SAMPLE, self._sample())
        if asked.program == "rollout-server":
            text = f"{text} --port {self.port} {SERVER}"
        return text

    def _sample(self) -> str:
        """A sample of the step that stands for the documents' steps."""
        answers = RunFolder(self.run_folder).answers(4)
        return Path(answers[0].sample_id).name

    def run(self, asked: Command) -> Done:
        """Run a documented command in the terminal of its block.

        One that differs from an earlier one in the name of the training YAML alone has run.
        """
        text = self.typed(asked)
        known = " ".join(command("", 0, re.sub(NAMES_OF_RUN, "my_run.yaml", text)).words)
        key = (FOLDERS.get(asked.document, ""), known)
        if key not in self._done:
            self._done[key] = self.terminal(asked).run(text)
        return self._done[key]

    def serve(self, asked: Command, beside: Command) -> None:
        """Start a documented server in the background, in the terminal of another command."""
        terminal = self.terminal(beside)
        terminal.run(f"{self.typed(asked)} &\nSERVER_PID=$!")
        deadline = time.monotonic() + START_TIMEOUT_S
        with RolloutClient(self.base_url) as client:
            while time.monotonic() < deadline:
                with suppress(*SERVER_ERRORS):
                    client.health()
                    return
                assert terminal.below(), terminal.printed()
                time.sleep(0.2)
        raise AssertionError(f"not healthy in {START_TIMEOUT_S} s:\n{terminal.printed()}")

    def terminal(self, asked: Command) -> Terminal:
        if asked.block not in self._terminals:
            number = len(self._terminals)
            self._terminals[asked.block] = Terminal(
                self.folder / FOLDERS.get(asked.document, ""),
                self.folder / ".terminals" / str(number),
                environment(),
            )
        return self._terminals[asked.block]

    def close(self) -> None:
        for terminal in self._terminals.values():
            terminal.close()

    def _make(self) -> None:
        for name in ("configs", "deploy"):
            (self.folder / name).symlink_to(ROOT / name)
        Image.new("RGB", (64, 64), (90, 120, 30)).save(self.folder / "cat.png")
        with Terminal(self.folder, self.folder / ".making", environment()) as terminal:
            for text in toys():
                done = terminal.run(text)
                assert done.code == 0, done.shown
        (self.folder / "CHECKPOINT").symlink_to("toy-model")
        (self.folder / "my_run.yaml").write_text(dump_mapping(self._training()))
        for name in ("train.yaml", "RUN.yaml", "F"):
            (self.folder / name).symlink_to("my_run.yaml")
            assert re.fullmatch(NAMES_OF_RUN, name)
        (self.folder / ".venv").symlink_to(sys.prefix)
        for name in ("RUN", "runs/my_run", "runs/first/two_channel"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to(self.run_folder)
        settings = {"model": "CHECKPOINT", "device": "cpu", "allowed_media_dirs": ["."]}
        (self.folder / "server.yaml").write_text(dump_mapping(settings))
        speeds = next(b for b in documents.blocks("yaml") if b.start.startswith("engine:"))
        (self.folder / "speeds.yaml").write_text(speeds.text)
        first = {"extends": str(self.folder / "my_run.yaml")}
        (self.folder / "runs" / "first" / "two_channel.yaml").write_text(dump_mapping(first))
        self._make_wrong()
        data_page.make(self.folder / "data", self.folder / "toy-model")

    def _training(self) -> dict[str, object]:
        """The demo's warm-up with both channels and 4 steps of 4 samples."""
        server = {"base_url": self.base_url, "group_port": self.group_port}
        return {
            "extends": "configs/demo/warmup.yaml",
            "model": {"model": "CHECKPOINT"},
            "data": {"train_jsonl": "toy-data/train.jsonl", "val_jsonl": "toy-data/val.jsonl"},
            "training": {
                "run_name": "my_run",
                "output_dir": "runs/earlier",
                "max_steps": 4,
                "save_steps": 4,
                "effective_batch_size": 4,
                "resume": "auto",
            },
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "max_new_tokens": 16,
                "vllm": {"server": {"servers": [server]}},
            },
        }

    def _make_wrong(self) -> None:
        """A folder with the mistakes that documents show, in the lines that they show."""
        wrong = self.folder / "wrong"
        wrong.mkdir()
        (wrong / "my_run.yaml").write_text(
            f"extends: {ROOT}/configs/demo/warmup.yaml\n"
            + "#\n" * 7
            + "rollout_matching:\n  vllm:\n    mode: server\n    server:\n      servers:\n"
            + "        - base_ulr: http://127.0.0.1:8000\n"
            + "          base_url: http://127.0.0.1:8000\n"
            + "          group_port: 51216\n"
        )
        first = wrong / "runs" / "first"
        first.mkdir(parents=True)
        (first / "two_channel.yaml").write_text(
            f"extends: {self.folder}/my_run.yaml\n" + "#\n" * 7 + "training:\n  max_step: 60\n"
        )


def toys() -> list[str]:
    """The commands of README that make data and a model."""
    codes = documents.read("README.md").codes
    found = [c.text for c in codes if c.text.startswith("learner toy make-") and "toy-" in c.text]
    assert len(found) == 2, found
    return found


def environment() -> dict[str, str]:
    """Of a terminal: our programs first, cores shared with whatever else is tested."""
    programs = Path(sys.executable).parent
    inherited = {k: v for k, v in os.environ.items() if k != "ROLLOUT_SERVER_TOKEN"}
    return inherited | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def only(program: str, *words: str) -> Command:
    """The first documented command that runs here, of this program and with these words."""
    return next(
        c
        for c in all_commands()
        if c.program == program and c.not_run is None and set(words) <= set(c.words)
    )
