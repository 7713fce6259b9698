"""`learner estimate`: a run's own step on fake tensors, against real steps and plain counts."""

import gc
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.full_size import peak_of
from learner.cli import app
from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.gpus import GPUS, Gpu, gpu_named
from learner.models.load import load_model
from learner.operate.estimate.fake import Work
from learner.operate.estimate.report import Estimate, as_json, estimate
from learner.operate.estimate.sizes import Serving, read_sizes
from learner.operate.estimate.speeds import speeds_at_best
from learner.operate.estimate.step import (
    StepCost,
    longest_pack,
    meta_model,
    recipe_of,
    step_cost,
    step_costs,
)
from learner.operate.simulate.inputs import Speeds
from learner.training.trainer import build_optimizer
from learner.types import Channel, Sample
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.req("FULL-05")

LORA = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "train_coordinate_rows": False}
H100 = gpu_named("H100")
Changed = Callable[..., Config]


@pytest.fixture
def changed(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Changed:
    """A small run with these sections."""
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    return lambda **sections: parse_config(merge(small, sections))


@pytest.fixture
def samples(toy_data: ToyData) -> list[Sample]:
    return read_samples(toy_data.train_jsonl, allow_poly=False)


def real_peak(config: Config, samples: list[Sample]) -> int:
    """Bytes that a real step of a real model allocates at most, as torch's profiler sees it."""
    loaded = load_model(config)
    loaded.model.train()
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe, samples)
    trained = [weight for weight in loaded.model.parameters() if weight.requires_grad]
    optimizer = build_optimizer(loaded.model, config.training, loaded.family)
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    recipe.loss(loaded.model, pack, "A")  # the first forward fills caches of the libraries
    gc.collect()

    def step() -> None:
        recipe.loss(loaded.model, pack, "A").total.backward()
        optimizer.step()

    return peak_of(step)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("tuner", [{"train_type": "full"}, LORA], ids=["full", "lora"])
def test_working_memory_is_that_of_a_real_step_on_the_cpu(
    changed: Changed, samples: list[Sample], tuner: dict[str, Any], count: int
) -> None:
    config = changed(tuner=tuner, global_max_length=1000)
    cost = step_cost(config, samples[:count], "A", device="cpu")
    assert cost.working == pytest.approx(real_peak(config, samples[:count]), rel=0.1)


def test_states_are_those_of_a_real_model(changed: Changed, samples: list[Sample]) -> None:
    for tuner in ({"train_type": "full"}, LORA):
        config = changed(tuner=tuner)
        cost = step_cost(config, samples[:1], "A")
        weights = list(load_model(config).model.parameters())
        trained = sum(w.numel() for w in weights if w.requires_grad)
        assert cost.weights == sum(w.numel() * w.element_size() for w in weights)
        assert (cost.gradients, cost.moments) == (4 * trained, 8 * trained)


def test_flops_are_those_of_the_plain_count(changed: Changed, samples: list[Sample]) -> None:
    """Two for each weight and row forward, twice that backward; attention by its squares."""
    config = changed(global_max_length=1000)
    cost = step_cost(config, samples[:4], "A")
    loaded = meta_model(config)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe, samples[:4])
    assert pack.pixel_values is not None
    assert pack.image_grid_thw is not None
    patches = len(pack.pixel_values)
    taught = recipe.objective.select(pack.supervision, "A")
    forward = 0.0
    for name, module in loaded.model.named_modules():
        rows = patches if "visual" in name else len(pack)
        if "merger" in name:
            rows = patches // 4
        if name == "lm_head":
            rows = taught.head_rows
        if name.endswith("patch_embed.proj") or isinstance(module, torch.nn.Linear):
            weight: Any = module.weight
            forward += 2 * rows * weight.numel()
            if name.endswith("patch_embed.proj"):  # pixels get no gradient
                forward -= 2 * rows * weight.numel() / 3
    own: Any = loaded.model.config
    text, vision = own.text_config, own.vision_config
    squares = float(pack.bounds.diff().double().square().sum())
    of_text = 2 * text.num_attention_heads * text.head_dim * squares * text.num_hidden_layers
    images = [float(t * h * w) ** 2 for t, h, w in pack.image_grid_thw.tolist()]
    of_images = 4 * vision.hidden_size * sum(images) * vision.depth
    plain = 3 * forward + 3.5 * (of_text + of_images)
    assert cost.flops == pytest.approx(plain, rel=0.02)


def test_fsdp2_splits_states_and_ddp_holds_gradients_twice(
    changed: Changed, samples: list[Sample]
) -> None:
    alone = step_cost(changed(), samples[:1], "A")
    sharded = changed(training={"data_parallel": "fsdp2"})
    split = step_cost(sharded, samples[:1], "A", processes=4)
    for name in ("weights", "gradients", "moments"):
        assert getattr(split, name) == pytest.approx(getattr(alone, name) / 4, rel=0.01)
    both = step_cost(changed(), samples[:1], "A", processes=2)
    assert (both.weights, both.gradients) == (alone.weights, 2 * alone.gradients)


def test_recomputed_activations_are_fewer_and_cost_a_forward_more(
    changed: Changed, samples: list[Sample]
) -> None:
    kept = step_cost(changed(), samples, "A")
    again = step_cost(changed(model={"gradient_checkpointing": True}), samples, "A")
    assert again.working < 0.7 * kept.working
    assert 1.2 * kept.flops < again.flops < 1.4 * kept.flops


@pytest.mark.req("FULL-01", "FULL-02")
def test_no_tensor_of_a_step_is_as_large_as_a_mask_or_as_whole_logits(
    changed: Changed, samples: list[Sample]
) -> None:
    several = {"n_softctx_iter": 3}
    config = changed(stage2_ab=several, global_max_length=1000)
    for channel in ("A", "B"):
        cost = step_cost(config, samples, channel)
        assert (cost.tokens, 1342) not in cost.shapes
        assert not any(shape.count(cost.tokens) > 1 for shape in cost.shapes)
        assert any(cost.tokens in shape for shape in cost.shapes)


IDLE = Work({})
# 0.5 and 0.1 s of an H100's memory.
COST = StepCost(
    channel="A",
    tokens=100,
    packs=2,
    weights=10 * 2**30,
    gradients=2**30,
    moments=2**30,
    working=2**30,
    largest=[],
    pack=Work({(1e12, 335 * 10**9): 5}),
    update=Work({(0.0, 335 * 10**9): 1}),
    shapes=frozenset(),
)


def test_an_operation_takes_the_slower_of_arithmetic_and_memory() -> None:
    work = Work({(989e12, 1): 3, (1.0, 335 * 10**10): 2})
    assert work.flops == pytest.approx(3 * 989e12)
    assert work.seconds(H100) == pytest.approx(5)


def test_a_step_is_its_packs_and_the_update(changed: Changed) -> None:
    found = Estimate(changed(), H100, 1, 8, {"A": COST}, 4, 9 * 10**9, None)
    assert found.step_s(COST) == pytest.approx(1.1)
    assert found.mfu(COST) == pytest.approx(10e12 / (1.1 * 989e12))
    assert found.messages_s(COST) == 0
    assert found.push_s == pytest.approx(9 / 450)
    other = replace(found, gpu=gpu_named("A100-40"))
    assert other.step_s(COST) == pytest.approx(1.1 * 3350 / 1555)


def test_messages_are_hidden_by_computation_until_they_take_longer(changed: Changed) -> None:
    config = changed(training={"data_parallel": "fsdp2"})
    for sent, seconds in ((225, 1.1), (900, 4.1)):
        cost = replace(COST, pack=replace(COST.pack, sent=sent * 1e9))
        found = Estimate(config, H100, 4, 8, {"A": cost}, 4, 9 * 10**9, None)
        assert found.messages_s(cost) == pytest.approx(2 * sent / 450)
        assert found.step_s(cost) == pytest.approx(seconds)
        told = as_json(found)["channels"]["A"]
        assert told["messages_seconds_at_best"] == found.messages_s(cost)
        learn = speeds_at_best(found, Speeds()).learner.a.learn
        assert learn.token_s == pytest.approx(max(0.5, sent / 450) / 100 / found.forwards)


def test_a_push_of_shards_gathers_them_and_passes_the_host(changed: Changed) -> None:
    config = changed(training={"data_parallel": "fsdp2"})
    found = Estimate(config, H100, 4, 8, {"A": COST}, 4, 9 * 10**9, None)
    assert found.gather_s == pytest.approx(9 * 0.75 / 450 + 9 / 64)
    assert found.push_s == pytest.approx(found.gather_s + 9 / 64)
    push, known = speeds_at_best(found, Speeds()).push, Speeds().push
    assert push.seconds == pytest.approx(known.fixed_s + found.push_s)


def test_fsdp2_sends_parameters_and_gradients_for_each_pack_and_ddp_gradients_once(
    changed: Changed, samples: list[Sample]
) -> None:
    """A ring of four sends 3/4: all weights forward, those of layers backward, all gradients."""
    sizes = read_sizes(changed())
    layers = sum(
        math.prod(shape)
        for name, shape in sizes.shapes.items()
        if ".layers." in name or ".blocks." in name
    )
    sharded = step_cost(changed(training={"data_parallel": "fsdp2"}), samples, "A", processes=4)
    whole = 4 * (2 * sizes.parameters + layers)
    assert sharded.pack.sent == pytest.approx(0.75 * whole, rel=0.01)
    assert sharded.update.sent == 0
    both = step_cost(changed(), samples, "A", processes=4)
    assert (both.pack.sent, both.update.sent) == (0, 1.5 * both.gradients / 2)
    alone = step_cost(changed(), samples, "A")
    assert (alone.pack.sent, alone.update.sent) == (0, 0)


def test_both_channels_are_counted_on_one_model_as_each_alone(
    changed: Changed, samples: list[Sample]
) -> None:
    config = changed(stage2_ab={"n_softctx_iter": 3}, training={"data_parallel": "fsdp2"})
    loaded = meta_model(config)
    recipe = recipe_of(config, loaded)
    together = step_costs(config, loaded, recipe, samples, ["A", "B"], processes=2)
    for channel, cost in together.items():
        alone = step_cost(config, samples, channel, processes=2)
        assert cost.pack.seconds(H100) == pytest.approx(alone.pack.seconds(H100), rel=0.01)
        assert (cost.flops, cost.pack.sent) == (alone.flops, alone.pack.sent)
        # FSDP2 sets itself up in the first forward.
        same = replace(cost, pack=alone.pack, shapes=alone.shapes, largest=alone.largest)
        assert same == alone
    assert together["A"].flops > 2 * together["B"].flops


def test_what_does_not_fit_is_refused_with_the_numbers(changed: Changed) -> None:
    small = gpu_named("rtx4090")
    served = Serving(
        weights=30 * 2**30, sequence=2**30, length=4096, at_once=8, largest=0, context=4096
    )
    found = Estimate(changed(), small, 1, 8, {"A": COST}, 1, 1, served)
    (server,) = found.refusals()
    assert (found.sequences, server.where) == (0, "rollout_matching.vllm")
    assert "30 GiB of weights" in server.found
    large = StepCost("A", 1, 1, 30 * 2**30, 0, 0, 0, [], IDLE, IDLE, frozenset())
    (learner,) = Estimate(changed(), small, 1, 8, {"A": large}, 1, 1, None).refusals()
    assert "fsdp2" in learner.do
    busy = StepCost("A", 1, 1, 2**30, 0, 0, 30 * 2**30, [], IDLE, IDLE, frozenset())
    (learner,) = Estimate(changed(), small, 1, 8, {"A": busy}, 1, 1, None).refusals()
    assert "gradient_checkpointing" in learner.do
    assert "22.1 GiB of the RTX4090 can be used" in learner.found


SERVER = {"base_url": "http://here:8000", "group_port": 51216}
SERVERS = {"vllm": {"mode": "server", "server": {"servers": [SERVER]}}}
COLOCATED = {"vllm": {"mode": "colocate", "server": None}}
IN_PROCESS = {"rollout_backend": "hf"}
ROOM = 20 * 2**30
LARGE_STATES = StepCost("A", 1, 1, 10 * 2**30, 2**34, 0, 0, [], IDLE, IDLE, frozenset())
LARGE_FROZEN = StepCost("A", 1, 1, 30 * 2**30, 0, 0, 0, [], IDLE, IDLE, frozenset())
LARGE_WORKING = StepCost("A", 1, 1, 2**30, 0, 0, 30 * 2**30, [], IDLE, IDLE, frozenset())
FSDP2, CHECKPOINTING = "training.data_parallel: fsdp2", "model.gradient_checkpointing: true"
LENGTH, ADAPTERS, RANK = "global_max_length", "tuner.train_type: lora", "tuner.lora_rank"
AUTO, MODE = "model.attn_implementation: auto", "vllm.mode: server"


@pytest.mark.parametrize(
    ("cost", "sections", "offered"),
    [
        (LARGE_STATES, {}, {FSDP2, ADAPTERS}),
        (LARGE_STATES, {"training": {"data_parallel": "fsdp2"}}, {FSDP2, ADAPTERS}),
        (LARGE_STATES, {"rollout_matching": COLOCATED}, {MODE, ADAPTERS}),
        (LARGE_STATES, {"rollout_matching": IN_PROCESS}, {ADAPTERS}),
        (LARGE_STATES, {"tuner": LORA}, {RANK}),
        (LARGE_FROZEN, {"tuner": LORA}, set()),
        (LARGE_FROZEN, {"tuner": LORA, "rollout_matching": COLOCATED}, {MODE}),
        (LARGE_WORKING, {}, {CHECKPOINTING, LENGTH, FSDP2, ADAPTERS}),
        (LARGE_WORKING, {"tuner": LORA}, {CHECKPOINTING, LENGTH}),
        (LARGE_WORKING, {"model": {"gradient_checkpointing": True}}, {LENGTH, FSDP2, ADAPTERS}),
        (
            LARGE_WORKING,
            {"tuner": LORA, "model": {"gradient_checkpointing": True}},
            {LENGTH},
        ),
        (
            LARGE_WORKING,
            {"tuner": LORA, "model": {"attn_implementation": "sdpa"}},
            {AUTO, CHECKPOINTING, LENGTH},
        ),
        (LARGE_WORKING, {"tuner": LORA, "training": {"packing": False}}, {CHECKPOINTING}),
    ],
)
def test_a_remedy_names_only_what_the_run_can_change(
    changed: Changed, cost: StepCost, sections: dict[str, Any], offered: set[str]
) -> None:
    generating = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}, "rollout_matching": SERVERS}
    config = changed(**{**generating, **sections})
    said = cost.remedy(config, ROOM)
    known = {FSDP2, CHECKPOINTING, LENGTH, ADAPTERS, RANK, AUTO, MODE}
    assert {key for key in known if key in said} == offered
    assert said.endswith("se a device with more memory")
    assert said[0].isupper()


def cost_of(weights: int, gradients: int, moments: int, working: int) -> dict[Channel, StepCost]:
    """In GiB."""
    w, g, m, beside = (part * 2**30 for part in (weights, gradients, moments, working))
    return {"A": StepCost("A", 1, 1, w, g, m, beside, [], COST.pack, COST.update, frozenset())}


@pytest.mark.req("FULL-05", "ROLL-03")
def test_learner_and_colocated_server_take_turns_on_the_gpu(changed: Changed) -> None:
    """For a step there is all but what a sleeping engine keeps."""
    served = Serving(weights=2**30, sequence=2**30, length=4096, at_once=8, largest=0, context=4096)
    for share in (None, 0.6):
        vllm = {"mode": "colocate", "server": None, "gpu_memory_utilization": share}
        config = changed(rollout_matching={"vllm": vllm})
        found = Estimate(config, H100, 1, 8, cost_of(20, 20, 4, 20), 1, 1, served)
        assert found.room == pytest.approx((0.92 * 80 - 4) * 2**30)
        assert found.left == pytest.approx((0.92 - (share or 0.45)) * 80 * 2**30)
        assert found.kept == 24 * 2**30
        assert found.sequences == int((share or 0.45) * 80 - 5)
        assert list(found.refusals()) == []
        assert as_json(found)["beside_server"]["kept_bytes"] == 24 * 2**30
    (learner,) = Estimate(config, H100, 1, 8, cost_of(20, 20, 0, 30), 1, 1, served).refusals()
    assert "69.6 GiB of the H100 can be used" in learner.found


@pytest.mark.req("FULL-05", "ROLL-03")
@pytest.mark.parametrize(
    ("offload", "kept"),
    [({}, 30), ({"offload_optimizer": True}, 10), ({"offload_model": True}, 20)],
)
def test_what_a_learner_keeps_beside_a_working_server_must_fit(
    changed: Changed, offload: dict[str, bool], kept: int
) -> None:
    served = Serving(weights=2**30, sequence=2**30, length=4096, at_once=8, largest=0, context=4096)
    vllm = {"mode": "colocate", "server": None, "gpu_memory_utilization": 0.6}
    moves = {"enabled": True, **offload} if offload else {}
    config = changed(rollout_matching={"vllm": vllm, "offload": moves})
    found = Estimate(config, H100, 1, 8, cost_of(10, 10, 20, 1), 1, 1, served)
    assert found.kept == kept * 2**30
    refused = [error.found for error in found.refusals()]
    said = "a learner keeps 30 GiB of weights and optimizer; the server leaves 25.6 GiB of the H100"
    assert [said in one for one in refused] == [True] * (kept == 30)


def test_an_estimate_tells_both_channels_push_and_servers(
    changed: Changed, samples: list[Sample]
) -> None:
    config = changed(stage2_ab={"schedule": {"b_ratio": 0.5}})
    found = as_json(estimate(config, samples, H100, 1))
    assert found["channels"].keys() == {"A", "B"}
    assert found["fits"]
    assert found["server"]["sequences"] > 100
    assert found["server"]["memory_share"] == 0.9
    assert (
        found["server"]["token_bytes"] * found["server"]["sequence_tokens"]
        == (found["server"]["sequence_bytes"])
    )
    assert found["server"]["max_model_len"] >= found["server"]["sequence_tokens"]
    assert found["push_bytes"] == found["channels"]["A"]["weights_bytes"]
    (only,) = estimate(changed(stage2_ab={"schedule": {"b_ratio": 0.0}}), samples, H100, 1).costs
    assert only == "A"


def test_a_simulation_takes_the_speeds_that_the_gpu_bounds(changed: Changed) -> None:
    served = Serving(
        weights=3.35e9, sequence=3.35e7, length=4096, at_once=8, largest=0, context=4096
    )
    config = changed(stage2_ab={"n_softctx_iter": 2})
    found = Estimate(config, H100, 1, 8, {"A": COST}, 10**9, 2 * 10**9, served)
    known = Speeds()
    best = speeds_at_best(found, known)
    assert best.learner.a.learn.token_s == pytest.approx(0.5 / 100 / 2)
    assert best.learner.a.target_s == known.learner.a.target_s
    assert best.learner.b == known.learner.b  # the run has no channel B
    assert best.engine.step_s == pytest.approx(1e-3)
    assert best.engine.step_per_sequence_s == pytest.approx(1e-5)
    assert best.engine.prefill_tokens_per_s == pytest.approx(989e12 / 2e9)
    assert best.push.seconds == pytest.approx(0.5 + 2 / 450)


def test_gpus_are_known_by_name_and_others_refused() -> None:
    assert {"A100-40", "A100-80", "H100", "H200", "L40S", "RTX4090"} <= GPUS.keys()
    assert gpu_named("h100") is gpu_named("H100")
    assert gpu_named("RTX 4090").memory == 24 * 2**30
    with pytest.raises(ContractError, match=r"--gpu: 'H1000'\. Use one of: A100-40"):
        gpu_named("H1000")


def test_the_command_prints_tables_or_json_and_refuses_a_run_that_does_not_fit(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(small_mapping(toy_checkpoint, toy_data, tmp_path / "run")))
    words = ["estimate", str(file), "--gpu", "h100"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "Memory of each of 1 learner GPU" in shown.stdout
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (told["gpu"], told["fits"]) == ("H100", True)
    tiny = Gpu("H100", 2**20, 1e12, 1e12, 1e12, 1e12)
    monkeypatch.setitem(GPUS, "H100", tiny)
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, ContractError)
    assert "a learner needs" in str(refused.exception)
    monkeypatch.undo()
    simulated = CliRunner().invoke(app, ["simulate", str(file), "--gpu", "H100", "--steps", "2"])
    assert simulated.exit_code == 0, simulated.output
    twice = CliRunner().invoke(app, ["simulate", str(file), "--gpu", "H100", "--speeds", "x.yaml"])
    assert "--gpu: given beside --speeds" in str(twice.exception)
    uneven = CliRunner().invoke(app, [*words, "--gpus", "3"])
    assert "effective_batch_size" in str(uneven.exception)
    unknown = CliRunner().invoke(app, ["estimate", str(file), "--gpu", "T4"])
    assert "Use one of" in str(unknown.exception)


@pytest.mark.req("FULL-02", "FULL-05")
def test_logits_are_widened_in_the_chunks_of_the_device_that_is_estimated(
    changed: Changed, samples: list[Sample]
) -> None:
    """64 MiB in float32 on a GPU, 4 MiB on a CPU: there 781 rows of a vocabulary of 1342."""
    config = changed(global_max_length=12_000)
    for device, split in (("cpu", True), ("cuda", False)):
        cost = step_cost(config, samples[:32] * 4, "A", device=device)
        rows = {shape[0] for shape in cost.shapes if shape[1:] == (1342,)}
        assert max(rows) > 2 * 781
        assert (781 in rows) == split
