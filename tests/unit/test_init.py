"""`learner init`: its YAMLs train, its choice fits, its refusals leave nothing."""

import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping, load_config, load_mapping
from learner.config.schema import Config
from learner.data.checkpoint import Checkpoint
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.gpus import Gpu, gpu_named
from learner.operate.doctor import examine
from learner.operate.estimate import Estimate
from learner.operate.init import InitOptions, Plan, choose_shape, init
from learner.runs.checkpoint import newest_checkpoint
from learner.stages.tokens import COORD_BINS
from learner.training.input_checks import check_inputs
from learner.training.train import train
from shared_contracts.errors import ContractError
from tests.unit.small_run import metric_lines
from tests.unit.stock_checkpoints import make_stock
from tests.unit.test_estimate import COST, SERVED, estimate_of

pytestmark = pytest.mark.req("INIT-01")

PROFILE = Path(__file__).parents[2] / "configs" / "stage2_two_channel" / "prod" / "default.yaml"
GIB, H100 = 2**30, gpu_named("H100")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("stock") / "model", tie=True)


def init_options(model: Path, scenes: ToyData, out: Path, **options: Any) -> InitOptions:
    """On the CPU, with a file to evaluate on, unless the options differ."""
    of_cpu = InitOptions(
        model, scenes.train_jsonl, scenes.val_jsonl, out, gpu=None, gpus=0, lora=False
    )
    return replace(of_cpu, **options)


def start(given: InitOptions) -> str:
    shown = io.StringIO()
    init(given, Console(file=shown, width=400))
    return shown.getvalue()


def run(path: Path, **sections: Any) -> Path:
    """Two steps by a YAML, whose sections are changed; the checkpoint."""
    short = path.with_name(f"short_{path.name}")
    training = {"max_steps": 2, "save_steps": 2, "eval_steps": 2}
    short.write_text(dump_mapping({"extends": path.name, "training": training, **sections}))
    config = load_config(short)
    train(config, check_inputs(config), [], Console(file=io.StringIO()))
    found = newest_checkpoint(Path(config.training.output_dir))
    assert found is not None
    assert found.manifest.step == 2
    return found.path


@pytest.mark.slow
def test_stock_checkpoint_trains_with_the_written_yamls(
    stock: Path, toy_data: ToyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my_run"
    printed = start(init_options(stock, toy_data, out))
    table = capsys.readouterr().out
    objects = sum(len(json.loads(line)["objects"]) for line in toy_data.train_jsonl.open())
    assert f"24       {objects}         0         0" in table
    assert {path.name for path in out.iterdir()} == {
        *("model", "schema.json", "warmup.yaml", "two_channel.yaml")
    }
    assert None not in Checkpoint(out / "model").coordinate_ids
    assert "noise of mean zero" in printed
    assert printed.splitlines()[-3:] == [
        f"  learner doctor {out}/warmup.yaml",
        f"  learner train {out}/warmup.yaml",
        f"  learner train {out}/two_channel.yaml",
    ]
    warmup = out / "warmup.yaml"
    assert [one for one in examine(load_config(warmup)) if one.status in ("fail", "warn")] == []
    checkpoint = run(warmup)
    assert load_config(out / "two_channel.yaml").model.model == out / "warmup" / "checkpoint-300"
    rollout = {"rollout_backend": "hf", "max_new_tokens": 12, "decode_batch_size": 8}
    run(
        out / "two_channel.yaml",
        model={"model": str(checkpoint)},
        rollout_matching=rollout,
        stage2_ab={"schedule": {"b_ratio": 0.5}},
    )
    folder = out / "two_channel"
    assert {line["step/channel_b"] for line in metric_lines(folder, "loss")} == {0, 1}
    assert metric_lines(folder, "eval/f1")


def test_checkpoint_with_untrained_tokens_gets_a_warm_up(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    twice = tmp_path / "train.jsonl"
    record = json.loads(toy_data.train_jsonl.read_text().splitlines()[0])
    record["images"] = [str(toy_data.train_jsonl.parent / image) for image in record["images"]]
    twice.write_text(2 * (json.dumps(record) + "\n"))
    printed = start(init_options(toy_checkpoint, toy_data, out, data=twice, val=None))
    assert f"`learner data check {twice}` lists the warnings" in printed
    assert not (out / "model").exists()
    assert load_config(out / "warmup.yaml").model.model == toy_checkpoint
    assert "A warm-up comes first, because of the coordinate tokens: they are as" in printed
    config = load_config(out / "two_channel.yaml")
    assert config.data.val_jsonl is None
    assert config.training.eval_strategy == "no"
    written, shipped = load_mapping(out / "two_channel.yaml"), load_mapping(PROFILE)
    assert written["stage2_ab"]["pipeline"] == shipped["stage2_ab"]["pipeline"]
    assert written["template"] == shipped["template"]
    rates = ("learning_rate", "vit_lr", "aligner_lr", "weight_decay", "max_grad_norm")
    for key in (*rates, "lr_scheduler_type", "warmup_ratio", "adam_beta2"):
        assert written["training"][key] == shipped["training"][key]


def convert(data: Path, out: Path, to: str) -> None:
    words = ["data", "convert", str(data), str(out), "--to", to]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.req("IO-01")
def test_data_of_another_format_is_converted(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run reads the same objects as from the data file."""
    source, out = tmp_path / "other.json", tmp_path / "out"
    convert(toy_data.val_jsonl, source, "coco")
    printed = start(init_options(toy_checkpoint, toy_data, out, data=source, val=source))
    assert f"Data file: {out / 'train.jsonl'}" in printed
    files = [str(out / name) for name in ("train.jsonl", "val.jsonl")]
    assert f"`learner data check {' '.join(files)}` lists the warnings" in printed
    table = capsys.readouterr().out
    assert ".part" not in table
    assert f"\n{files[0]} " in table
    data = load_config(out / "two_channel.yaml").data
    assert (data.train_jsonl, data.val_jsonl) == (out / "train.jsonl", out / "val.jsonl")
    assert data.val_jsonl is not None
    for file in (data.train_jsonl, data.val_jsonl):
        read, before = (read_samples(f, allow_poly=False) for f in (file, toy_data.val_jsonl))
        assert [each.objects for each in read] == [each.objects for each in before]


@pytest.mark.req("IO-01")
def test_splits_of_one_yolo_folder_are_data_and_val(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """A folder that has no images is refused with the error's own advice and the command."""
    source, out = tmp_path / "set", tmp_path / "out"
    convert(toy_data.val_jsonl, source, "yolo")
    for folder in (source / "images", source / "labels"):
        (folder / "val").mkdir()
        first = min((folder / "train").iterdir())
        first.rename(folder / "val" / first.name)
    yaml = source / "data.yaml"
    yaml.write_text(yaml.read_text().replace("val: images/train", "val: images\\val"))
    start(init_options(toy_checkpoint, toy_data, out, data=source, val=source))
    files = [out / "train.jsonl", out / "val.jsonl"]
    assert [len(read_samples(file, allow_poly=False)) for file in files] == [3, 1]
    shutil.rmtree(source / "images" / "train")
    with pytest.raises(ContractError, match="images/train is not there") as caught:
        start(init_options(toy_checkpoint, toy_data, tmp_path / "again", data=source))
    assert "Name a folder of images, or a list of them" in caught.value.found
    assert caught.value.do == f"`learner data convert {source} FILE.jsonl` has options for it"


def test_checkpoint_with_trained_tokens_gets_no_warm_up(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    model = shutil.copytree(toy_checkpoint, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    rows = weights["model.language_model.embed_tokens.weight"]
    walk = torch.randn(COORD_BINS, rows.shape[1], generator=torch.Generator().manual_seed(0))
    rows[-COORD_BINS:] = 0.01 * walk.cumsum(dim=0)  # alike, and each with a step of its own
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    printed = start(init_options(model, toy_data, tmp_path / "out"))
    assert "and they look trained" in printed
    assert not (tmp_path / "out" / "warmup.yaml").exists()
    assert load_config(tmp_path / "out" / "two_channel.yaml").model.model == model


def plan_of(model: Path, scenes: ToyData, out: Path, **options: Any) -> Plan:
    given = init_options(model, scenes, out, **{"gpu": H100, **options})
    return Plan(given, out, model, 64, after_warmup=False, target=10, answer=20, longest=320)


@dataclass(frozen=True)
class Counted:
    """An estimate of numbers in GiB: states, half of them moments, and a pack of 12,000 tokens.

    LoRA has a tenth of the states.
    """

    states: float
    pack: float

    def __call__(self, config: Config, _: Any, gpu: Gpu, processes: int) -> Estimate:
        share = (0.1 if config.tuner.train_type == "lora" else 1) / processes
        states = self.states * GIB * share
        cost = replace(
            COST,
            weights=int(states / 2),
            gradients=0,
            moments=int(states / 2),
            working=int(self.pack * GIB * config.global_max_length / 12_000),
        )
        return estimate_of(config, cost, SERVED, gpu, processes)


@pytest.mark.parametrize(
    ("gpus", "lora", "states", "pack", "chosen"),
    [
        (1, False, 20, 0, "all weights, a server on the same device, packs of 12,000 tokens"),
        (1, False, 60, 30, "LoRA, a server on the same device, packs of 12,000 tokens"),
        (2, False, 60, 24, "all weights, a server on 1, packs of 6,000 tokens"),
        (2, False, 90, 12, "LoRA, a server on 1, packs of 12,000 tokens"),
        (4, False, 90, 12, "all weights split over 2 GPUs (FSDP2), a server on 2, packs of 12,000"),
        (8, True, 20, 0, "LoRA, a server on 7, packs of 12,000 tokens"),
        (1, False, 900, 0, "nothing fits 1 x H100"),
    ],
)
def test_smallest_change_that_fits_is_chosen(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    gpus: int,
    lora: bool,
    states: float,
    pack: float,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """states, pack: GiB of all weights, and of a pack of 12,000 tokens."""
    count = Counted(states, pack)
    monkeypatch.setattr("learner.operate.init.estimate", count)
    plan = plan_of(toy_checkpoint, toy_data, tmp_path, gpus=gpus, lora=lora)
    console = Console(file=io.StringIO(), width=200)
    if chosen.startswith("nothing"):
        with pytest.raises(ContractError, match=chosen) as caught:
            choose_shape(plan, [], console)
        assert "GiB" in caught.value.found
        return
    found = choose_shape(plan, [], console)
    assert str(found).startswith(chosen)
    config = found.config()
    assert (config.training.data_parallel == "fsdp2") == (found.learner_gpus > 1)
    assert (config.rollout_matching.backend == "colocate") == (gpus == 1)
    assert config.tuner.train_type == ("lora" if chosen.startswith("LoRA") else "full")
    assert not list(count(config, [], H100, found.learner_gpus).refusals())


@pytest.mark.parametrize(
    ("options", "where", "found"),
    [
        (["--gpu", "H1000"], "--gpu", "'H1000'"),
        ([], "--gpu", "not given, and no known GPU"),
        (["--gpu", "cpu", "--model", "no/such"], "--model", "there is no folder no/such"),
        (["--gpu", "cpu", "--model", "other"], "--model", "model_type is bert"),
        (["--gpu", "cpu", "--model", "holed"], "--model", "model.language_model.norm.weight"),
        (["--gpu", "cpu", "--model", "bin"], "--model", "holds no *.safetensors file"),
        (["--gpu", "cpu", "--data", "none.jsonl"], "none.jsonl", ""),
        (["--gpu", "cpu", "--out", "full"], "full", "is not an empty directory"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    stock: Path,
    toy_data: ToyData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    where: str,
    found: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    other = shutil.copytree(stock, tmp_path / "other") / "config.json"
    other.write_text(json.dumps({"model_type": "bert"}))
    weights = load_file(shutil.copytree(stock, tmp_path / "holed") / "model.safetensors")
    del weights["model.language_model.norm.weight"]
    save_file(weights, tmp_path / "holed" / "model.safetensors", {"format": "pt"})
    pickled = shutil.copytree(stock, tmp_path / "bin") / "model.safetensors"
    pickled.rename(pickled.with_name("pytorch_model.bin"))
    before = sorted(tmp_path.rglob("*"))
    words = ["--model", str(stock), "--data", str(toy_data.train_jsonl), "--out", "out", *options]
    error = CliRunner().invoke(app, ["init", *words]).exception
    assert isinstance(error, ContractError), error
    assert error.where == where
    assert found in error.found
    assert sorted(tmp_path.rglob("*")) == before
