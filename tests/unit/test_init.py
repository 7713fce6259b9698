"""`learner init`: what it writes trains, what it chooses fits, what it refuses leaves nothing."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
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
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.gpus import Gpu, gpu_named
from learner.operate.doctor.run import examine
from learner.operate.estimate.report import Estimate, estimate
from learner.operate.init import Asked, Lengths, Shape, Writer, choose, command_of, init
from learner.runs.checkpoint import newest_whole
from learner.stages.coords import COORD_BINS
from learner.training.start_checks import check_inputs, coordinate_ids
from learner.training.train import train
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.stock_checkpoints import make_stock

pytestmark = [pytest.mark.req("INIT-01"), pytest.mark.usefixtures("one_thread")]

PROFILE = Path(__file__).parents[2] / "configs" / "stage2_two_channel" / "prod" / "default.yaml"
GIB = 2**30


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("stock") / "model", tie=True)


def asked(model: Path, scenes: ToyData, out: Path, **options: Any) -> Asked:
    """On the CPU, with a file to evaluate on, unless the options say otherwise."""
    of_cpu = Asked(model, scenes.train_jsonl, scenes.val_jsonl, out, gpu=None, gpus=0, lora=False)
    return replace(of_cpu, **options)


def start(given: Asked) -> str:
    """What `init` says."""
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
    found, _ = newest_whole(Path(config.training.output_dir))
    assert found is not None
    assert found.manifest.step == 2
    return found.path


@pytest.mark.timeout(900)
def test_a_stock_checkpoint_is_trained_by_the_yamls_it_gets(
    stock: Path, toy_data: ToyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my_run"
    said = start(asked(stock, toy_data, out))
    table = capsys.readouterr().out
    objects = sum(len(json.loads(line)["objects"]) for line in toy_data.train_jsonl.open())
    assert f"24       {objects}         0         0" in table
    assert {path.name for path in out.iterdir()} == {
        *("model", "schema.json", "warmup.yaml", "two_channel.yaml")
    }
    assert len(coordinate_ids(out / "model")) == COORD_BINS
    assert "noise of mean zero" in said
    assert said.splitlines()[-3:] == [
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
    lines = (out / "two_channel" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert {line["step/channel_b"] for line in steps if "loss" in line} == {0, 1}
    assert any("eval/f1" in line for line in steps)


def test_the_run_has_the_objective_of_the_shipped_profile(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    start(asked(toy_checkpoint, toy_data, tmp_path / "out"))
    written, shipped = load_mapping(tmp_path / "out" / "two_channel.yaml"), load_mapping(PROFILE)
    assert written["stage2_ab"]["pipeline"] == shipped["stage2_ab"]["pipeline"]
    assert written["template"] == shipped["template"]
    rates = ("learning_rate", "vit_lr", "aligner_lr", "weight_decay", "max_grad_norm")
    for key in (*rates, "lr_scheduler_type", "warmup_ratio", "adam_beta2"):
        assert written["training"][key] == shipped["training"][key]


def test_a_checkpoint_with_untrained_tokens_is_used_as_it_is_after_a_warm_up(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    twice = tmp_path / "train.jsonl"
    twice.write_text(line(toy_data) * 2)
    said = start(asked(toy_checkpoint, toy_data, out, data=twice, val=None))
    assert f"`learner data check {twice}` lists the warnings" in said
    assert not (out / "model").exists()
    assert load_config(out / "warmup.yaml").model.model == toy_checkpoint
    assert "A warm-up comes first, because of the coordinate tokens: they are as" in said
    assert "No --val: the run is not evaluated" in said
    config = load_config(out / "two_channel.yaml")
    assert config.data.val_jsonl is None
    assert config.training.eval_strategy == "no"


def test_a_checkpoint_with_trained_tokens_gets_no_warm_up(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    model = shutil.copytree(toy_checkpoint, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    rows = weights["model.language_model.embed_tokens.weight"]
    walk = torch.randn(COORD_BINS, rows.shape[1], generator=torch.Generator().manual_seed(0))
    rows[-COORD_BINS:] = 0.01 * walk.cumsum(dim=0)  # alike, and each with a step of its own
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    said = start(asked(model, toy_data, tmp_path / "out"))
    assert "and they look trained" in said
    assert not (tmp_path / "out" / "warmup.yaml").exists()
    assert load_config(tmp_path / "out" / "two_channel.yaml").model.model == model


@pytest.mark.timeout(900)
def test_a_gpu_that_everything_fits_is_shared_with_the_server(
    stock: Path, toy_data: ToyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real estimate."""
    out = tmp_path / "out"
    said = start(asked(stock, toy_data, out, gpu=gpu_named("H100"), gpus=1))
    assert "Estimate for H100: all weights, a server on the same device, packs of 12,000" in said
    assert "yes" in capsys.readouterr().out
    config = load_config(out / "two_channel.yaml")
    assert config.rollout_matching.backend == "colocate"
    assert config.rollout_matching.vllm.gpu_memory_utilization == 0.7
    assert config.model.gradient_checkpointing
    assert (
        "# Estimate for H100, on the longest samples: the learner needs "
        in (out / "two_channel.yaml").read_text()
    )
    described = config.model_copy(
        update={"model": config.model.model_copy(update={"model": out / "model"})}
    )
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    assert not list(estimate(described, samples, gpu_named("H100"), 1).refusals())


@pytest.fixture(scope="module")
def counted(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Estimate:
    """The toy's on an H100, whose numbers are then pretended to be larger."""
    folder = tmp_path_factory.mktemp("counted")
    writer = Writer(
        asked(toy_checkpoint, toy_data, folder), folder, toy_checkpoint, 24, warmup=False
    )
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    return estimate(writer.draft(), samples, gpu_named("H100"), 1)


@pytest.mark.parametrize(
    ("gpus", "lora", "states", "pack", "chosen"),
    [
        (1, False, 20, 0, "all weights, a server on the same device, packs of 12,000 tokens"),
        (1, False, 60, 30, "LoRA, a server on the same device, packs of 12,000 tokens"),
        (2, False, 60, 12, "all weights, a server on 1, packs of 12,000 tokens"),
        (2, False, 60, 24, "all weights, a server on 1, packs of 6,000 tokens"),
        (2, False, 90, 12, "LoRA, a server on 1, packs of 12,000 tokens"),
        (4, False, 90, 12, "all weights split over 2 GPUs (FSDP2), a server on 2, packs of 12,000"),
        (
            8,
            False,
            240,
            12,
            "all weights split over 4 GPUs (FSDP2), a server on 4, packs of 12,000",
        ),
        (8, True, 20, 0, "LoRA, a server on 7, packs of 12,000 tokens"),
    ],
)
def test_the_smallest_change_that_fits_is_chosen(
    counted: Estimate,
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    gpus: int,
    lora: bool,
    states: float,
    pack: float,
    chosen: str,
) -> None:
    """states, pack: GiB of all weights, and of a pack of 12,000 tokens; LoRA has a tenth."""
    gpu = gpu_named("H100")

    def count(config: Config, _: Sequence[Sample], gpu: Gpu, processes: int) -> Estimate:
        weights = states * GIB * (0.1 if config.tuner.train_type == "lora" else 1) / processes
        working = pack * GIB * config.global_max_length / 12_000
        costs = {
            channel: replace(
                cost,
                weights=int(weights / 4),
                gradients=int(weights / 4),
                moments=int(weights / 2),
                working=int(working),
            )
            for channel, cost in counted.costs.items()
        }
        return replace(counted, config=config, processes=processes, costs=costs)

    given = asked(toy_checkpoint, toy_data, tmp_path, gpu=gpu, gpus=gpus, lora=lora)
    writer = Writer(given, tmp_path, toy_checkpoint, 64, warmup=False)
    shown = io.StringIO()
    found = choose(writer, [], Lengths(10, 20, 320), Console(file=shown, width=200), count)
    assert str(found.shape).startswith(chosen)
    config = writer.config(found, Lengths(10, 20, 320))
    assert (config.training.data_parallel == "fsdp2") == (found.shape.learner_gpus > 1)
    assert (config.rollout_matching.backend == "colocate") == (gpus == 1)
    assert config.tuner.train_type == ("lora" if chosen.startswith("LoRA") else "full")
    assert not list(count(config, [], gpu, found.shape.learner_gpus).refusals())


def test_what_the_learner_keeps_is_moved_away_where_the_server_needs_the_room(
    counted: Estimate, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """Beside a server that needs 40 GiB a learner of 45 cannot stay."""
    served = counted.served
    assert served is not None

    def count(config: Config, _: Sequence[Sample], gpu: Gpu, processes: int) -> Estimate:
        costs = {
            channel: replace(cost, weights=15 * GIB, gradients=0, moments=30 * GIB, working=0)
            for channel, cost in counted.costs.items()
        }
        return replace(
            counted, config=config, costs=costs, served=replace(served, weights=40 * GIB)
        )

    given = asked(toy_checkpoint, toy_data, tmp_path, gpu=gpu_named("H100"), gpus=1)
    writer = Writer(given, tmp_path, toy_checkpoint, 64, warmup=False)
    found = choose(writer, [], Lengths(10, 20, 320), Console(file=io.StringIO(), width=200), count)
    assert (found.offload, found.share) == ("optimizer", 0.7)
    offload = writer.config(found, Lengths(10, 20, 320)).rollout_matching.offload
    assert (offload.enabled, offload.offload_optimizer, offload.offload_model) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("gpus", "learner", "name", "command"),
    [
        (1, 1, "warmup", "learner train r/warmup.yaml"),
        (1, 1, "two_channel", "learner train r/two_channel.yaml"),
        (4, 1, "warmup", "CUDA_VISIBLE_DEVICES=0 learner train r/warmup.yaml"),
        (
            *(4, 2, "warmup"),
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 --no-python "
            "learner train --config r/warmup.yaml",
        ),
        (
            *(4, 2, "two_channel"),
            "learner launch r/two_channel.yaml --server-gpus 2,3 --train-gpus 0,1",
        ),
    ],
)
def test_the_next_command_has_the_gpus_of_the_shape(
    gpus: int, learner: int, name: str, command: str
) -> None:
    shape = Shape(False, learner, gpus - learner if gpus > 1 else 0, 12_000)
    assert command_of(name, Path("r"), shape) == command


def test_a_gpu_that_nothing_fits_is_refused_with_the_numbers(
    stock: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    tiny = replace(gpu_named("RTX4090"), name="tiny", memory=10 * 2**20)
    with pytest.raises(ContractError, match="nothing fits 1 x tiny") as caught:
        start(asked(stock, toy_data, tmp_path / "out", gpu=tiny, gpus=1))
    assert "GiB" in caught.value.found
    assert list(tmp_path.iterdir()) == []


def line(data: ToyData, **changes: Any) -> str:
    with data.train_jsonl.open() as file:
        record = json.loads(next(file)) | changes
    folder = data.train_jsonl.parent
    images = [str(folder / image) for image in record["images"]]
    return json.dumps({**record, "images": changes.get("images", images)}) + "\n"


POLYGON = [{"desc": "cat", "poly": [1, 1, 9, 1, 5, 9]}]


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"images": ["gone.png"]}, "gone.png"), ({"objects": POLYGON}, "poly"), ({"width": 7}, "7x")],
    ids=["no image", "a polygon", "another size"],
)
def test_data_that_a_run_refuses_is_refused(
    stock: Path, toy_data: ToyData, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(line(toy_data) + line(toy_data, **changes))
    with pytest.raises(ContractError) as caught:
        start(asked(stock, toy_data, tmp_path / "out", data=data))
    assert caught.value.errors[0].where == f"{data}:2"
    assert found in caught.value.errors[0].found
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(
    ("options", "where", "found"),
    [
        (["--gpu", "H1000"], "--gpu", "'H1000'"),
        (["--gpu", "cpu", "--gpus", "2"], "--gpus", "2, and --gpu is cpu"),
        (["--gpu", "cpu", "--model", "no/such"], "--model", "there is no folder no/such"),
        (["--gpu", "cpu", "--model", "broken"], "--model", "has no config.json"),
        (["--gpu", "cpu", "--model", "other"], "--model", "model_type is bert"),
        (["--gpu", "cpu", "--model", "empty"], "--model", "no *.safetensors"),
        (["--gpu", "cpu", "--data", "none.jsonl"], "none.jsonl", ""),
        (["--gpu", "cpu", "--out", "full"], "full", "is not an empty directory"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
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
    (tmp_path / "broken").mkdir()
    for name, family in (("other", "bert"), ("empty", "qwen3_vl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": family}))
        shutil.copy(stock / "tokenizer.json", tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    words = ["--model", str(stock), "--data", str(toy_data.train_jsonl), "--out", "out", *options]
    error = CliRunner().invoke(app, ["init", *words]).exception
    assert isinstance(error, ContractError), error
    assert error.where == where
    assert found in error.found
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_has_to_be_named(stock: Path, toy_data: ToyData, tmp_path: Path) -> None:
    words = ["--model", str(stock), "--data", str(toy_data.train_jsonl), "--out", "out"]
    error = CliRunner().invoke(app, ["init", *words]).exception
    assert isinstance(error, ContractError), error
    assert (error.where, error.found) == ("--gpu", "not given, and no GPU is visible here")
    assert "H100" in error.do
    assert "cpu" in error.do
