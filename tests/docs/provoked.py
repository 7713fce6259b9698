"""Commands that fail as docs/troubleshooting.md says, beside the served toy run.

The other messages come of what is dear to break; they are held against the code alone.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.config import dump_mapping
from tests.docs.world import World

TRAIN = "learner train --config provoked.yaml"
SERVE = "rollout-server serve --model CHECKPOINT --device cpu"
NEW = {"training": {"output_dir": "runs/provoked"}}
ASK = """curl -s http://127.0.0.1:8000/infer/ -H 'content-type: application/json' -d '{
  "infer_requests": [{"messages": [{"role": "user", "content": "<image>What?"}],
                      "images": ["/etc/hostname"]}]}'"""


@dataclass(frozen=True)
class Provoked:
    """said: of the quoted block. changes: to my_run.yaml, in `provoked.yaml`."""

    said: str
    command: str
    changes: dict[str, Any] = field(default_factory=dict)

    def write_config(self, world: World) -> None:
        config = {"extends": "my_run.yaml"} | self.changes
        (world.folder / "provoked.yaml").write_text(dump_mapping(config))


def _vllm(**keys: Any) -> dict[str, Any]:
    return NEW | {"rollout_matching": {"vllm": keys}}


PROVOKED = (
    Provoked("unknown key", "cd wrong; learner train --config my_run.yaml"),
    Provoked(
        "samples a step",
        TRAIN,
        {"training": {"output_dir": "runs/provoked", "effective_batch_size": 4096}},
    ),
    Provoked("holds another run", TRAIN, {"training": {"resume": "never"}}),
    Provoked(
        "a resumed run must have the same value", TRAIN, {"training": {"learning_rate": 0.001}}
    ),
    Provoked("the port is in use", f"{SERVE} --port 8000"),
    Provoked("and there is no token", f"{SERVE} --host 0.0.0.0"),
    Provoked("GiB are free", f"{SERVE} --kv-cache-gib 100000"),
    Provoked("GPU 0 is not there", "rollout-server serve --model CHECKPOINT --gpus 0,1"),
    Provoked(
        "no healthy answer",
        TRAIN,
        _vllm(
            server={
                "servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}],
                "timeout_s": 0.5,
            }
        ),
    ),
    Provoked(
        "the server's guard is off",
        TRAIN,
        NEW | {"rollout_matching": {"repeat_terminate": {"enabled": True, "max_object_keys": 9}}},
    ),
    Provoked("fewer than", TRAIN, NEW | {"rollout_matching": {"decode_batch_size": 128}}),
    Provoked("the path is in no allowed folder", ASK),
)


def plain(text: str, folder: Path) -> str:
    """A message without what differs from run to run: numbers, and this world's places."""
    text = text.replace(f"{folder}/", "").replace("runs/earlier", "runs/my_run")
    return re.sub(r"\d+(?:\.\d+)*", "N", text)
