"""`swift sft` with our plugin against `learner train`, over the same YAML (RUN-02)."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import learner.adapters
from learner.config import load_config
from learner.data.toy import make_data
from learner.models.toy import make_model
from tests.docs.documents import blocks
from tests.unit.small_run import metric_lines, run_quietly, small_mapping

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
PLUGIN = Path(learner.adapters.__path__[0]) / "ms_swift.py"
# What depends on the clock, beside all that is below `time/`.
TIMED = {
    "rollout/per_second",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}


@dataclass(frozen=True)
class Runs:
    ours: Path
    swifts: Path
    records: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Three steps. The second one is of channel B, answered by the model itself."""
    root = tmp_path_factory.mktemp("ms_swift")
    make_model(root / "model", seed=0)
    data = make_data(root / "data", train=24, val=4, seed=0)
    for name in ("ours", "swifts"):
        mapping = small_mapping(
            root / "model",
            data,
            root / name,
            stage2_ab={"schedule": {"b_ratio": 0.5}},
            rollout_matching={"rollout_backend": "hf", "decode_batch_size": 4},
        )
        (root / f"{name}.yaml").write_text(yaml.safe_dump(mapping))
    run_quietly(load_config(root / "ours.yaml"))
    swift_sft(root)
    return Runs(root / "ours", root / "swifts", root / "records")


def swift_sft(root: Path, programs: Path = PROGRAMS, plugin: Path = PLUGIN) -> None:
    """Run `swifts.yaml` of a folder. programs: folder of `swift`."""
    options = {
        "external_plugins": plugin,
        "model": root / "model",
        "model_type": "rollmatch",
        "tuner_type": "rollmatch",
        "dataset": "rollmatch",
        "output_dir": root / "records",
        "add_version": "false",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    environment = {
        "ROLLMATCH_CONFIG": str(root / "swifts.yaml"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MODELSCOPE_CACHE": str(root / "cache"),
    }
    done = subprocess.run(
        [str(programs / "swift"), "sft", *words],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def logged(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that do not depend on the clock."""
    return [
        {k: v for k, v in line.items() if k not in TIMED and not k.startswith(("time/", "perf/"))}
        for line in metric_lines(folder)
    ]


@pytest.mark.req("RUN-02")
def test_stage_2_ab_runs_under_ms_swift_with_raw_sample_collation(runs: Runs) -> None:
    ours, swifts = logged(runs.ours), logged(runs.swifts)
    assert [line.get("step/channel_b") for line in ours] == [0, 1, 0, None]
    assert [line["step"] for line in swifts] == [1, 2, 3, 3]
    for expected, line in zip(ours, swifts, strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.req("RUN-02")
def test_a_checkpoint_of_swift_sft_is_one_of_learner_train(runs: Runs) -> None:
    assert {path.name for path in runs.records.iterdir()} == {"args.json", "logging.jsonl"}
    assert {path.name for path in runs.swifts.iterdir()} == {p.name for p in runs.ours.iterdir()}
    ours, swifts = (folder / "checkpoint-3" for folder in (runs.ours, runs.swifts))
    assert {path.name for path in ours.iterdir()} == {path.name for path in swifts.iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (ours / name).read_text() == (swifts / name).read_text()
    weights = [load_file(folder / "model.safetensors") for folder in (ours, swifts)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.req("RUN-02")
@pytest.mark.timeout(1200)
def test_the_documented_installation_runs_swift_sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is empty and outside of the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv = tmp_path / "venv"
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    monkeypatch.setenv("PATH", f"{venv / 'bin'}:{PROGRAMS}:{os.environ['PATH']}")
    (install,) = [block.text for block in blocks("sh") if "[cpu,swift]" in block.text]
    for command in (
        [str(ROOT / "scripts" / "dist"), str(tmp_path / "dist")],
        [str(PROGRAMS / "uv"), "venv", "--quiet", "--python", sys.executable, str(venv)],
        ["bash", "-ec", install],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    make_model(tmp_path / "model", seed=0)
    data = make_data(tmp_path / "data", train=8, val=4, seed=0)
    mapping = small_mapping(tmp_path / "model", data, tmp_path / "run", training={"max_steps": 1})
    (tmp_path / "swifts.yaml").write_text(yaml.safe_dump(mapping))
    (plugin,) = venv.glob("lib/python*/site-packages/learner/adapters/ms_swift.py")
    swift_sft(tmp_path, venv / "bin", plugin)
    assert metric_lines(tmp_path / "run")[0]["step"] == 1


@pytest.mark.req("FULL-07")
def test_the_plugin_counts_gpus_as_nvidia_smi_does() -> None:
    """Before it reads the YAML, which is not set here."""
    script = (
        "import os\n"
        "try:\n    import learner.adapters.ms_swift\n"
        "except SystemExit as ended:\n    print(ended.code, os.environ['CUDA_DEVICE_ORDER'])"
    )
    environment = os.environ | {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    environment.pop("ROLLMATCH_CONFIG", None)
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert shown.stdout.splitlines()[-1] == "2 PCI_BUS_ID", shown.stderr
