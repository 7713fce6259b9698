"""The fenced blocks of the documents, and a folder with a server in which their commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from learner.config import dump_mapping
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import ServerProcess, free_ports
from learner.runs.run_folder import RunFolder
from tests.contract.running_server import START_TIMEOUT_S, by_servers
from tests.integration.ranks import Nursery

ROOT = Path(__file__).parents[2]
# The short run of `my_run.yaml`. The documents' steps and samples are replaced by its own.
RUN = "runs/my_run"
LAST_STEP = 4
SAMPLE = "train.jsonl:7"


@dataclass(frozen=True)
class Block:
    """document: its path from the root. language: of the fence, perhaps ""."""

    document: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without comments."""
        commands, pending = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            pending += line
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quote is open
                pending += "\n"
                continue
            commands += [re.sub(r"\s+# .*", "", pending)] if words else []
            pending = ""
        return commands


def blocks(*languages: str) -> list[Block]:
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")]
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(str(path.relative_to(ROOT)), found[1], found[2])
        for path in sorted(paths)
        for found in fenced.finditer(path.read_text(encoding="utf-8"))
        if found[1] in languages
    ]


@dataclass(frozen=True)
class World:
    """A folder with a model, data, YAMLs and a server."""

    folder: Path
    base_url: str
    nursery: Nursery

    def run(self, text: str) -> tuple[int, str]:
        """Exit code and output of a command of a document, its placeholders replaced."""
        text = text.replace("http://127.0.0.1:8000", self.base_url)
        text = text.replace("/data/images", str(self.folder))
        text = re.sub(r"--step \d+", f"--step {LAST_STEP}", text)
        if SAMPLE in text:
            (answer, *_) = RunFolder(self.folder / RUN).answers(LAST_STEP)
            text = text.replace(SAMPLE, Path(answer.sample_id).name)
        program, *words = shlex.split(text)
        if program == "learner":
            return self.nursery.run(words, self.folder)
        inherited = {k: v for k, v in os.environ.items() if k != "ROLLOUT_SERVER_TOKEN"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=inherited | {"PATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def write_config(self, name: str, **sections: object) -> None:
        """A YAML that extends my_run.yaml."""
        mapping = {"extends": str(self.folder / "my_run.yaml"), **sections}
        (self.folder / name).write_text(dump_mapping(mapping))


def start_server(folder: Path, command: str, log: str) -> ServerProcess:
    """Start a documented server on the files of `folder`, with a small cache."""
    command = re.sub(r"CHECKPOINT|\w+\.yaml", lambda name: f"{folder}/{name[0]}", command)
    options = command.replace("/data/images", str(folder)).split()[2:]
    return ServerProcess([*options, "--kv-cache-gib", "0.125"], folder / log)


@contextmanager
def open_world(folder: Path, model: Path, serve: str, nursery: Nursery) -> Iterator[World]:
    """serve: the documented command of the server."""
    (folder / "CHECKPOINT").symlink_to(model)
    (folder / "configs").symlink_to(ROOT / "configs")
    Image.new("RGB", (64, 64), (90, 120, 30)).save(folder / "cat.png")
    make_faulty(make_data(folder / "toy", train=200, val=20, seed=0))
    server = start_server(folder, serve, "server.log")
    world = World(folder, server.base_url, nursery)
    try:
        (folder / "my_run.yaml").write_text(dump_mapping(training(server.base_url)))
        world.write_config("train.yaml", rollout_matching={"max_new_tokens": 80})
        (folder / "runs" / "first").mkdir(parents=True)
        vllm = by_servers(f"http://127.0.0.1:{free_ports(1)[0]}")
        world.write_config("runs/first/two_channel.yaml", rollout_matching={"vllm": vllm})
        (folder / "runs" / "first" / "two_channel").symlink_to(folder / RUN)
        server.wait_until_healthy(START_TIMEOUT_S)
        yield world
    finally:
        server.stop()


def make_faulty(toy: ToyData) -> None:
    """Write `mine.jsonl` and `instances.json` with the faults that docs/data.md shows."""
    records = [json.loads(line) for line in toy.train_jsonl.read_text().splitlines()[:5]]
    for record, count in zip(records, (2, 1, 2, 2, 3), strict=True):
        objects = [{"desc": "cat", "bbox_2d": [600, 600, 900, 900 - n]} for n in range(count)]
        record["objects"] = objects
    records[1]["objects"][0]["bbox_2d"] = [562, 375, 1200, 734]
    records[4]["objects"][2] = {"desc": "red line", "bbox_2d": [40, 40, 40, 90]}
    lines = [f"{json.dumps(record)}\n" for record in records]
    toy.train_jsonl.with_name("mine.jsonl").write_text("".join(lines))
    coco = json.loads(toy.coco_train.read_text())
    image, annotation = coco["images"][0], coco["annotations"][0]
    coco["images"].append(image | {"id": 9000, "file_name": "images/train/lost.png"})
    coco["annotations"][3]["iscrowd"] = 1
    coco["annotations"][5]["bbox"][2] += image["width"]
    coco["annotations"] += [
        annotation | {"id": 9001, "image_id": 9000},
        annotation | {"id": 9002, "bbox": [1, 1, 0, 0]},
    ]
    toy.train_jsonl.with_name("instances.json").write_text(json.dumps(coco))


def training(base_url: str) -> dict[str, object]:
    return {
        "extends": "configs/demo/warmup.yaml",
        "model": {"model": "CHECKPOINT"},
        "data": {"train_jsonl": "toy/train.jsonl", "val_jsonl": "toy/val.jsonl"},
        "training": {
            "run_name": "my_run",
            "output_dir": RUN,
            "max_steps": LAST_STEP,
            "save_steps": LAST_STEP,
            "effective_batch_size": 4,
            "resume": "auto",
        },
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout_matching": {"max_new_tokens": 16, "vllm": by_servers(base_url)},
    }
