"""Runs and exports pushed to a Hub on loopback by the real client, and refusals.

That Hub takes weights by git-LFS, which the client uses where Xet is off.
"""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load

from learner.config import dump_mapping, merge
from learner.data.toy import ToyData
from learner.runs.checkpoint import data_digest, newest_checkpoint
from learner.stages.tokens import COORD_BINS
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.req("HUB-01")
REPOSITORY = "ada/shapes"
WRITER, READER, SINGLE, USER, TEAM = "hf_writer", "hf_reader", "hf_single", "ada", "lab"
LOST = "hf_lost"  # its connection breaks


@dataclass
class Hub:
    """A Hub on loopback: the calls of huggingface_hub that create a repository and commit files.

    Weights go by git-LFS, all else within the commit, as on the real one. url: of its API. private,
    files: of each repository; files by path. full: refuse commits, as over a quota.
    """

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    full: bool = False


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        role = {WRITER: "write", READER: "read", SINGLE: "fineGrained"}.get(self._token())
        if self._token() == LOST:
            return
        if self.path != "/api/whoami-v2":
            self._send(404, {"error": "not here"})
        elif role is None:
            self._send(401, {"error": "Invalid credentials"})
        else:
            auth = {"accessToken": {"displayName": "test", "role": role}}
            self._send(200, {"name": USER, "orgs": [{"name": TEAM}], "auth": auth})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if self._token() != WRITER:
            self._send(401, {"error": "Invalid credentials"})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            known = name in self.hub.files
            if not known:
                self.hub.files[name] = {}
                self.hub.private[name] = asked["visibility"] == "private"
            self._send(409 if known else 200, {"url": f"{self.hub.url}/{name}"})
        elif path.endswith("/preupload/main"):
            self._send(200, {"files": [_upload(each) for each in json.loads(body)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._lfs(each) for each in json.loads(body)["objects"]]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._send(404, {"error": "not here"})

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        self.hub.blobs[self.path.rpartition("/")[2]] = self.rfile.read(size)
        self._send(200, {})

    def _lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.url}/lfs/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href, "header": {}}}}

    def _commit(self, name: str, body: bytes) -> None:
        if self.hub.full:
            self._send(403, {"error": "Storage quota exceeded"})
            return
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.blobs[value["oid"]]
            else:
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
        url = f"{self.hub.url}/{name}/commit/{'0' * 40}"
        self._send(200, {"commitUrl": url, "commitOid": "0" * 40})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if "error" in answer:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


def _upload(asked: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if asked["path"].endswith(".safetensors") else "regular"
    return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


def learner(hub: Hub, token: str | None, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return python(hub, token, "from learner.cli import main; main()", *map(str, words))


def python(
    hub: Hub, token: str | None, program: str, *words: str
) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token or "", "OMP_NUM_THREADS": "1"}
    own |= {"HF_TOKEN_PATH": os.devnull, "HF_HUB_DISABLE_XET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        env=os.environ | own,
        check=False,
    )


def write_run(folder: Path, model: Path, data: ToyData, **training: Any) -> Path:
    """The YAML of three steps with an evaluation, whose answers come from the learner itself."""
    sections = {
        "training": {"eval_strategy": "steps", "eval_steps": 3, "push_to_hub": True, **training},
        "rollout_matching": {"rollout_backend": "hf", "decode_batch_size": 4},
        "custom": {"extra": {"note": "a secret of the team"}},
    }
    mapping = merge(small_mapping(model, data, folder / "run"), sections)
    path = folder / "my_run.yaml"
    path.write_text(dump_mapping(mapping))
    return path


@pytest.mark.slow
def test_run_is_pushed_at_its_end(
    hub: Hub, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    lora = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
    path = write_run(tmp_path, toy_checkpoint, toy_data, hub_model_id=REPOSITORY)
    path.write_text(path.read_text() + dump_mapping({"tuner": lora}))
    done = learner(hub, WRITER, "train", path)
    assert done.returncode == 0, done.stderr
    assert f"Pushed: {hub.url}/{REPOSITORY}/commit/" in done.stdout.replace("\n", "")
    assert hub.private == {REPOSITORY: True}
    assert hub.messages == ["small, step 3"]
    files = hub.files[REPOSITORY]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert "adapter_config.json" not in files  # merged
    rows = load(files["model.safetensors"])["model.language_model.embed_tokens.weight"]
    assert len(rows) > COORD_BINS
    assert not list((tmp_path / "run").glob(".push-*"))

    card = files["README.md"].decode()
    assert ModelCard(card).data["library_name"] == "transformers"
    assert "checkpoint-3` of the run `small`" in card
    for file, use in ((toy_data.train_jsonl, "training"), (toy_data.val_jsonl, "evaluation")):
        assert f"| {file.name} | {use} | {data_digest(file)} |" in card
    assert "after step 3:" in card
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-2])
    assert f"| predicted | {last['eval/predicted']:.4g} |" in card
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert f"transformers {facts['versions']['transformers']}" in card
    assert facts["commit"] is None or facts["commit"] in card
    assert "lora_rank: 2" in card
    assert "Detect every object in the image." in card
    for private in ("a secret of the team", str(tmp_path), str(toy_checkpoint.parent)):
        assert private not in card


@pytest.mark.slow
def test_run_whose_push_fails_keeps_its_model_for_an_export(
    hub: Hub, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    hub.full = True
    own = {"hub_model_id": REPOSITORY, "eval_strategy": "no", "eval_steps": None}
    done = learner(hub, WRITER, "train", write_run(tmp_path, toy_checkpoint, toy_data, **own))
    assert done.returncode == 1, done.stdout
    whole = newest_checkpoint(tmp_path / "run")
    assert whole is not None
    assert whole.manifest.step == 3
    assert "Storage quota exceeded" in done.stderr
    assert f"learner export {whole.path} --out NEW --push-to-hub {REPOSITORY}" in done.stderr
    assert "Traceback" not in done.stderr

    hub.full, out = False, tmp_path / "detector"
    words = ("export", whole.path, "--out", out, "--verify", "transformers", "--public")
    done = learner(hub, WRITER, *words, "--push-to-hub", "lab/public")
    assert done.returncode == 0, done.stderr
    assert hub.private["lab/public"] is False
    names = {path.name for path in out.iterdir()}
    assert names == set(hub.files["lab/public"])
    card = (out / "README.md").read_text()
    assert hub.files["lab/public"]["README.md"].decode() == card
    assert "The run has not evaluated this model." in card


ACCESS: list[tuple[str, str, str | None]] = [
    ("", REPOSITORY, "the Hub cannot check a token of yours"),
    ("hf_of_nobody", REPOSITORY, "Invalid user token"),
    (READER, REPOSITORY, "the token of ada may only read"),
    (WRITER, "bob/shapes", "may write to those of ada, lab"),
    (SINGLE, "bob/shapes", None),
    (LOST, REPOSITORY, "the Hub cannot check a token of yours"),
    (WRITER, REPOSITORY, None),
    (WRITER, "shapes", None),
]
ASK = """
import json, os, sys
from learner.runs.hub import require_hub_access
from shared_contracts.errors import ContractError
for token, repository, _ in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    try:
        require_hub_access("--push-to-hub", repository)
        print()
    except ContractError as error:
        print(repr(str(error)))
"""


def test_token_must_be_allowed_to_write_to_the_repository(hub: Hub) -> None:
    done = python(hub, WRITER, ASK, json.dumps(ACCESS))
    assert done.returncode == 0, done.stderr
    for (token, _, found), line in zip(ACCESS, done.stdout.splitlines(), strict=True):
        if found is None:
            assert line == ""
        else:
            assert line[1:].startswith("--push-to-hub: ")
            assert found in line
            assert not token or token not in line
    assert hub.files == {}
