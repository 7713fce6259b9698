"""Exported models are those that transformers 4.57 reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig

from learner.data.toy import ToyData
from learner.models.load import read_model, read_processor
from learner.models.prompts import encode_request
from learner.models.toy import ToyFamily, make_model
from learner.operate.export import export, logits_of
from learner.rollout.sync.probe import prompts
from tests.unit.small_run import run_quietly, small_config

OLD = "transformers==4.57.6"
# Run by an interpreter with that version: ids of a text, and logits of ids with an image.
READER = """
import json, sys, torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, __version__
folder, inputs, out = sys.argv[1:]
assert __version__.startswith("4.57."), __version__
tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
text = "a cat <|coord_5|><|im_end|>"
ids = [each.encode(text) for each in (tokenizer, processor.tokenizer)]
with torch.no_grad():
    torch.save(model(**torch.load(inputs), use_cache=False).logits[0].float(), out)
size = processor.image_processor.size
print(json.dumps([ids, [size["shortest_edge"], size["longest_edge"]]]))
"""


@pytest.fixture(scope="module", params=get_args(ToyFamily))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_model(folder / "model", seed=0, family=request.param)
    export(folder / "model", folder / "exported", "auto", "transformers")
    return folder


@pytest.mark.req("RUN-01")
def test_an_export_has_the_names_of_published_checkpoints(exported: Path) -> None:
    """Both forms are one config for transformers 5."""
    before, after = (exported / name for name in ("model", "exported"))
    names = {path.name for path in after.iterdir()}
    assert {"preprocessor_config.json", "video_preprocessor_config.json"} <= names
    assert "processor_config.json" not in names
    text = json.loads((after / "config.json").read_text())["text_config"]
    new = "qwen3_5" in exported.name
    rope = {"rope_parameters"} if new else {"rope_theta", "rope_scaling"}
    assert text.keys() & {"rope_parameters", "rope_theta", "rope_scaling"} == rope
    assert "num_local_experts" not in text
    tokenizer = json.loads((after / "tokenizer_config.json").read_text())
    known = "Qwen3_5Tokenizer" if new else "PreTrainedTokenizerFast"
    assert tokenizer["tokenizer_class"] == known
    assert not tokenizer.keys() & {"backend", "is_local", "local_files_only"}
    configs = [AutoConfig.from_pretrained(each) for each in (before, after)]
    ropes: list[Any] = [config.get_text_config().rope_parameters for config in configs]
    assert ropes[0] == ropes[1]


@pytest.mark.req("RUN-01")
def test_files_that_a_run_did_not_change_are_copied_byte_for_byte(
    exported: Path, tmp_path: Path
) -> None:
    """The checkpoint has the same tokenizer and processor in the form of transformers 5."""
    published = shutil.copytree(exported / "exported", tmp_path / "published")
    names = ["preprocessor_config.json", "tokenizer_config.json", "generation_config.json"]
    for name in names:
        content = json.loads((published / name).read_text())
        (published / name).write_text(json.dumps(content, indent=7))
    checkpoint = shutil.copytree(exported / "model", tmp_path / "run" / "checkpoint-1")
    resolved = tmp_path / "run" / "resolved_config.yaml"
    resolved.write_text(json.dumps({"model": {"model": str(published)}}))
    out = tmp_path / "out"
    export(checkpoint, out, "auto", "transformers")
    assert not (out / "processor_config.json").exists()
    for name in (*names, "tokenizer.json", "video_preprocessor_config.json"):
        assert (out / name).read_bytes() == (published / name).read_bytes(), name


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with transformers 4.57; torch is that of this one."""
    folder = tmp_path_factory.mktemp("old") / "venv"
    python = folder / "bin" / "python"
    uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    wanted = [OLD, "safetensors", "pillow", "numpy", "jinja2"]
    subprocess.run([*uv, "pip", "install", "--python", str(python), *wanted], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "zz_torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


@pytest.mark.req("RUN-01")
@pytest.mark.nightly
def test_transformers_4_57_loads_an_export_and_computes_the_same(
    old_python: Path, exported: Path
) -> None:
    if "qwen3_5" in exported.name:
        pytest.skip("4.57 does not know it")
    folder, inputs, out = exported / "exported", exported / "inputs.pt", exported / "logits.pt"
    model, processor = read_model(folder, "auto"), read_processor(folder)
    prompt = encode_request(processor, prompts()["image"])
    given = {
        "input_ids": prompt.ids[None],
        "attention_mask": torch.ones_like(prompt.ids[None]),  # 4.57 would look for packs
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }
    torch.save(given, inputs)
    reader = [str(old_python), "-c", READER, str(folder), str(inputs), str(out)]
    ended = subprocess.run(reader, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ids, size = json.loads(ended.stdout.splitlines()[-1])
    text = "a cat <|coord_5|><|im_end|>"
    assert ids == [processor.tokenizer.encode(text)] * 2
    ours = processor.image_processor.size
    assert size == [ours["shortest_edge"], ours["longest_edge"]]
    assert torch.allclose(torch.load(out), logits_of(model, processor, "image"), atol=1e-4)


@pytest.mark.slow
@pytest.mark.req("RUN-01")
def test_an_exported_adapter_is_served_by_vllm(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4, "use_dora": True}
    training = {"max_steps": 1, "save_steps": 1, "warmup_ratio": 0.0}
    config = small_config(
        toy_checkpoint, toy_data, tmp_path / "run", tuner=tuner, training=training
    )
    run_quietly(config)
    adapter, out = tmp_path / "run" / "checkpoint-1", tmp_path / "exported"
    proofs = export(adapter, out, "auto", "all")
    assert [proof.split()[0] for proof in proofs] == ["transformers", "vLLM"]
