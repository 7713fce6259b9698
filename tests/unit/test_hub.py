"""Runs and exports pushed to a Hub on loopback by the real client, and refusals.

That Hub takes weights by git-LFS, which the client uses where Xet is off.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load

from learner.config import dump_mapping, merge
from learner.data.toy import ToyData
from learner.runs.checkpoint import data_digest, newest_checkpoint
from learner.stages.tokens import COORD_BINS
from tests.unit.hub_server import READER, WRITER, Hub, hub_server
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.req("HUB-01")

REPOSITORY = "ada/shapes"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


def learner(hub: Hub, token: str | None, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The program, with the Hub and the token of the test."""
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
    (WRITER, REPOSITORY, None),
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
