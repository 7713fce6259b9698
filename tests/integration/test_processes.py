"""Several learner processes make the same steps as one process, under DDP and FSDP2.

torchrun starts them once per number of processes, over gloo, for all configs. Without packing the
forwards of one process and of several are equal, so losses and updates are, too.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from learner.config import dump_mapping, load_config, merge
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.toy import ToyFamily, make_model
from learner.training.train import order_of
from tests.integration.process_run import run
from tests.integration.ranks import Nursery
from tests.integration.runs import torchrun
from tests.unit.small_run import metric_lines, small_mapping

pytestmark = [pytest.mark.slow]

RUN_S = 840.0
BATCH = 4
# The second loss is of weights that the first step has changed.
SHORT = {"max_steps": 2, "warmup_ratio": 0.0, "effective_batch_size": BATCH, "packing": False}
HF = {"rollout_backend": "hf", "max_new_tokens": 12, "decode_batch_size": 4}
FSDP2 = {"training": {"data_parallel": "fsdp2"}}
UNROLL = {"stage2_ab": {"n_softctx_iter": 2, "softctx_grad_mode": "unroll"}}
DETACH = {
    "stage2_ab": {"n_softctx_iter": 2, "softctx_grad_mode": "em_detach"},
    "model": {"gradient_checkpointing": True},
}
CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 1.0}}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}}
DORA = merge(LORA, {"tuner": {"use_dora": True}})
BFLOAT16 = {"model": {"torch_dtype": "bfloat16"}}
# So small that in some steps one process has more packs than the other.
PACKED = {"training": {"packing": True, "effective_batch_size": 8}, "global_max_length": 300}
# Two runs. The second one resumes the first.
CONSTANT = {"training": {"lr_scheduler_type": "constant", "save_steps": 1}}
HALF = merge(CONSTANT, {"training": {"max_steps": 1}})

# A head of its own, which FSDP2 shards apart from the embedding.
UNTIED: dict[str, dict[str, Any]] = {
    f"{forwards}_{mode}-untied": {
        "stage2_ab": {"n_softctx_iter": forwards, "softctx_grad_mode": mode}
    }
    for forwards, mode in ((1, "unroll"), (3, "unroll"), (3, "em_detach"))
}
OTHER_FAMILIES: tuple[ToyFamily, ...] = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
ALSO_ALONE: dict[str, dict[str, Any]] = {
    "unroll": UNROLL,
    "detach": DETACH,
    "b": CHANNEL_B,
    "lora": LORA,
    **{f"dora-{family}": DORA for family in OTHER_FAMILIES},
}
OF_TWO: dict[str, dict[str, Any]] = {
    **ALSO_ALONE,
    "packed": PACKED,
    "constant": CONSTANT,
    "bfloat16": BFLOAT16,
    "sharded_unroll": merge(UNROLL, FSDP2),
    "sharded_detach": merge(DETACH, FSDP2),
    "sharded_packed": merge(PACKED, FSDP2),
    "sharded_bfloat16": merge(BFLOAT16, FSDP2),
    "sharded_constant": merge(HALF, FSDP2),
    **{f"sharded_{name}": merge(change, FSDP2) for name, change in UNTIED.items()},
    "sharded_resumed": merge(merge(CONSTANT, FSDP2), {"training": {"resume": "auto"}}),
    **{f"sharded-{family}": FSDP2 for family in OTHER_FAMILIES},
}


@dataclass(frozen=True)
class Run:
    """start: weights of its checkpoint. weights: whole, by rank. steps: as logged.

    rates: learning rates by parameter. pushed: what process 0 would push. gathered: dtypes of a
        layer's weight in its forwards.
    """

    folder: Path
    start: dict[str, Tensor]
    weights: list[dict[str, Tensor]]
    rates: list[dict[str, float]]
    steps: list[dict[str, float]]
    pushed: dict[str, Tensor]
    gathered: set[torch.dtype]

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


@dataclass(frozen=True)
class World:
    """models: by the end of the names of configs, after a hyphen; the others have `model`."""

    folder: Path
    models: dict[str, Path]
    data: ToyData

    def configs(self, group: str, changes: dict[str, dict[str, Any]]) -> list[Path]:
        (self.folder / group).mkdir()
        files = []
        for name, change in changes.items():
            own = "sharded_constant" if name == "sharded_resumed" else name
            model = name.partition("-")[2] or "model"
            mapping = small_mapping(
                self.models[model], self.data, self.folder / group / f"run-{own}"
            )
            mapping["rollout_matching"] = HF
            mapping["training"] |= SHORT
            files.append(self.folder / group / f"{name}.yaml")
            files[-1].write_text(dump_mapping(merge(mapping, change)))
        return files

    def runs(self, group: str, files: list[Path]) -> dict[str, Run]:
        return {file.stem: self._read(file) for file in files}

    def _read(self, file: Path) -> Run:
        states = [torch.load(path) for path in sorted(file.parent.glob(f"{file.stem}-[0-9].pt"))]
        config = load_config(file)
        folder = Path(config.training.output_dir)
        return Run(
            folder,
            dict(
                AutoModelForImageTextToText.from_pretrained(config.model.model).named_parameters()
            ),
            [state["weights"] for state in states],
            [state["rates"] for state in states],
            metric_lines(folder, "loss"),
            states[0]["pushed"],
            states[0]["gathered"],
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("processes")
    models = {name: folder / name for name in ("model", "untied", *OTHER_FAMILIES)}
    make_model(models["model"], seed=0)
    make_model(models["untied"], seed=0, tie=False)
    for family in OTHER_FAMILIES:
        make_model(models[family], seed=0, family=family)
    data = make_data(folder / "data", train=24, val=4, seed=0)
    return World(folder, models, data)


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, Run]:
    files = world.configs(
        "alone",
        ALSO_ALONE
        | {f"whole_{name}": change for name, change in UNTIED.items()}
        | {f"whole-{family}": {} for family in OTHER_FAMILIES},
    )
    for file in files:
        run(SINGLE_PROCESS, file, file.parent)
    return world.runs("alone", files)


@pytest.fixture(scope="module")
def two(world: World) -> dict[str, Run]:
    files = world.configs("of_2", OF_TWO)
    program = ["tests.integration.process_run", str(world.folder / "of_2"), *map(str, files)]
    printed = torchrun("-m", *program, environment={"PYTHONFAULTHANDLER": "1"}, timeout_s=RUN_S)
    assert "Warning" not in printed
    return world.runs("of_2", files)


def assert_same(one: Run, other: Run) -> None:
    """Losses differ by at most 1e-5, updates by at most 1e-5 of their size.

    Of an adapter the matrices that start from 0 are compared, to 1e-4.
    """
    assert other.losses() == pytest.approx(one.losses(), rel=1e-5)
    expected, found, limit = one.weights[0], other.weights[0], 1e-5
    assert found.keys() == expected.keys()
    if not expected.keys() <= one.start.keys():
        expected, limit = {name: w for name, w in expected.items() if "lora_B" in name}, 1e-4
    moved = squares(w - one.start.get(name, 0.0) for name, w in expected.items())
    off = squares(found[name] - w for name, w in expected.items())
    assert moved > 0
    assert off**0.5 <= limit * moved**0.5


def squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.detach().square().sum()) for tensor in tensors)


@pytest.mark.req("RES-14", "STEP-02", "DDP-02", "CHA-02", "RUN-02", "MET-01")
@pytest.mark.parametrize("name", ALSO_ALONE)
def test_two_processes_make_the_steps_of_one(
    alone: dict[str, Run], two: dict[str, Run], name: str
) -> None:
    assert_same(alone[name], two[name])
    assert two[name].rates == alone[name].rates * 2
    for step in two[name].steps:
        assert step["packing/post_rollout_segments"] == BATCH, "metrics are of all processes"


@pytest.mark.req("DDP-02", "CHA-02", "RUN-02")
@pytest.mark.parametrize("name", ["unroll", "detach", "packed"])
def test_sharded_steps_are_those_of_ddp(two: dict[str, Run], name: str) -> None:
    assert_same(two[name], two[f"sharded_{name}"])
    assert two[f"sharded_{name}"].rates == two[name].rates


@pytest.mark.req("DDP-02", "CHA-02", "RUN-02")
@pytest.mark.parametrize(
    "name", [*(f"_{name}" for name in UNTIED), *(f"-{family}" for family in OTHER_FAMILIES)]
)
def test_sharded_steps_of_other_models_are_those_of_one_process(
    alone: dict[str, Run], two: dict[str, Run], name: str
) -> None:
    assert_same(alone[f"whole{name}"], two[f"sharded{name}"])


@pytest.mark.req("FULL-03")
def test_sharded_steps_in_bfloat16_are_those_of_ddp_and_weights_stay_float32(
    two: dict[str, Run],
) -> None:
    """Within rounding: FSDP2 casts weights before it gathers them."""
    whole, sharded = two["bfloat16"], two["sharded_bfloat16"]
    assert sharded.losses()[0] == pytest.approx(whole.losses()[0], rel=2e-3)
    assert sharded.losses() == pytest.approx(whole.losses(), rel=5e-2)
    assert (whole.gathered, sharded.gathered) == ({torch.float32}, {torch.bfloat16})
    for weights in (*whole.weights, *sharded.weights):
        assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.req("SYNC-02", "SYNC-08")
def test_process_0_pushes_whole_weights_of_a_sharded_model(two: dict[str, Run]) -> None:
    sharded = two["sharded_unroll"]
    assert list(sharded.pushed) == list(two["unroll"].weights[0])
    assert all(torch.equal(sharded.pushed[name], w) for name, w in sharded.weights[0].items())


@pytest.mark.req("DDP-02")
@pytest.mark.parametrize("name", ["packed", "sharded_packed"])
def test_processes_with_unequal_numbers_of_packs_replay_some(
    two: dict[str, Run], name: str
) -> None:
    steps = two[name].steps
    assert sum(step["step/replays"] for step in steps) > 0
    assert all(torch.tensor(step["loss"]).isfinite() for step in steps)


@pytest.mark.req("DDP-02")
def test_all_processes_have_the_same_weights_after_every_kind_of_step(two: dict[str, Run]) -> None:
    for one in two.values():
        first, *others = one.weights
        assert all(torch.equal(own[name], first[name]) for own in others for name in first)


@pytest.mark.req("RUN-01")
def test_a_sharded_run_resumes_from_a_checkpoint_that_plain_transformers_loads(
    two: dict[str, Run],
) -> None:
    resumed = two["sharded_resumed"]
    assert [step["step"] for step in resumed.steps] == [1, 2]
    assert_same(two["constant"], resumed)
    checkpoint = resumed.folder / "checkpoint-2"
    loaded: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, resumed.weights[0][name]), name


def broken_for_process_1(
    world: World, folder: Path, on_bad_sample: str = "stop"
) -> tuple[Path, str]:
    """A run's YAML, and the name of an image that process 1 alone reads, in its second step."""
    data = make_data(folder / "data", train=24, val=4, seed=1)
    config = small_mapping(world.models["model"], data, folder / "run")
    config["training"] |= {"effective_batch_size": 8}
    config["data"] |= {"on_bad_sample": on_bad_sample}
    (folder / "run.yaml").write_text(dump_mapping(config))
    order = order_of(load_config(folder / "run.yaml"), 24, processes=2)
    (image,) = read_samples(data.train_jsonl, allow_poly=False)[order.rank_batch(1, 1)[0]].images
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    return folder / "run.yaml", image.name


@pytest.mark.req("DDP-01")
def test_an_error_of_one_process_ends_both_with_its_text(
    world: World, tmp_path: Path, started: Nursery
) -> None:
    yaml, broken = broken_for_process_1(world, tmp_path)
    ranks = started.start(yaml, 2)
    codes = ranks.wait(timeout_s=RUN_S)
    logs = [ranks.log(rank) for rank in range(2)]
    assert codes == [2, 2], logs
    assert all(f"{broken} cannot be decoded" in log for log in logs), logs
    assert len(metric_lines(tmp_path / "run")) == 1


@pytest.mark.req("DDP-01")
def test_a_sample_that_one_process_cannot_decode_is_replaced(
    world: World, tmp_path: Path, started: Nursery
) -> None:
    yaml, broken = broken_for_process_1(world, tmp_path, "skip")
    ranks = started.start(yaml, 2)
    codes = ranks.wait(timeout_s=RUN_S)
    assert codes == [0, 0], ranks.tails()
    assert [line["step"] for line in metric_lines(tmp_path / "run", "loss")] == [1, 2, 3]
    (listed,) = (tmp_path / "run" / "bad_samples.rank1.jsonl").read_text().splitlines()
    assert broken in json.loads(listed)["reason"]
