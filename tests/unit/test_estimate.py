"""`learner estimate`, logged FLOPs and the memory of servers: against real steps and counts."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.full_size import peak_of
from learner.cli import app
from learner.config import load_config, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.flops import DeviceUse
from learner.models.gpus import GPUS, Gpu, gpu_named
from learner.models.load import load_model
from learner.operate.estimate import Estimate, Serving, estimate
from learner.operate.step_cost import StepCost, longest_pack, meta_model, step_costs
from learner.training.channels import recipe_of
from learner.training.checkpoint_checks import context_of_run, lengths_of_run, longest_prompt
from learner.training.input_checks import read_inputs
from learner.training.step import StepRunner
from learner.training.trainer import build_optimizer
from learner.types import Sample
from shared_contracts.checkpoints import (
    GIB,
    MIB,
    PROOF_TOKENS,
    cache_elements,
    engine_share,
    run_context,
)
from shared_contracts.errors import ContractError
from tests.unit.fake_step import fake_step, fake_steps, step_model
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.small_run import ConfigOf, RunYaml

pytestmark = pytest.mark.req("FULL-05")

LORA = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "train_coordinate_rows": False}
H100 = gpu_named("H100")


def real_peak(config: Config, samples: list[Sample]) -> int:
    """Bytes that a real step of a real model allocates at most, as torch's profiler sees it."""
    loaded = load_model(config)
    loaded.model.train()
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe.channel_a.segments(samples))
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


@pytest.mark.slow
@pytest.mark.parametrize(("tuner", "count"), [({"train_type": "full"}, 8), (LORA, 4)])
def test_memory_is_that_of_a_real_step(
    config_of: ConfigOf, scenes: list[Sample], tuner: dict[str, Any], count: int
) -> None:
    config = config_of(tuner=tuner, global_max_length=1000)
    faked = fake_step(config, scenes[:count], "A", device="cpu")
    real = real_peak(config, scenes[:count])
    assert faked.working == pytest.approx(real, rel=0.1)
    found = step_costs(config, meta_model(config), scenes[:count])["A"]
    assert found.total == pytest.approx(found.total - found.working + real, rel=0.1)


def test_states_are_those_of_a_real_model(config_of: ConfigOf, scenes: list[Sample]) -> None:
    for tuner in ({"train_type": "full"}, LORA):
        config = config_of(tuner=tuner)
        cost = step_costs(config, meta_model(config), scenes[:1])["A"]
        weights = list(load_model(config).model.parameters())
        trained = sum(w.numel() for w in weights if w.requires_grad)
        assert cost.weights == sum(w.numel() * w.element_size() for w in weights)
        assert (cost.gradients, cost.moments) == (4 * trained, 8 * trained)


PROFILES = Path(__file__).parents[2] / "configs" / "stage2_two_channel" / "gpu"
NOTHING_AGAIN = {"model": {"gradient_checkpointing": False}}


@pytest.mark.parametrize(
    ("size", "profile", "processes", "changes"),
    [
        pytest.param("4b", "4b_lora", 1, {}, id="lora"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "lora, nothing again": ("4b", "4b_lora", 1, NOTHING_AGAIN),
                "full": ("2b", "2b_full", 1, {}),
                "fsdp2": ("4b", "4b_full_fsdp2", 2, {}),
                "fsdp2, untied": ("8b", "8b_full_fsdp2", 4, {}),
                "experts": ("30b-a3b", "2b_full", 1, {}),
                "linear attention": ("3.5-4b", "4b_lora", 1, NOTHING_AGAIN),
                "self-context": ("4b", "4b_lora", 1, {"stage2_ab": {"n_softctx_iter": 3}}),
            }.items()
        ),
    ],
)
def test_a_step_costs_what_a_step_on_fake_tensors_does(
    tmp_path: Path, size: str, profile: str, processes: int, changes: dict[str, Any]
) -> None:
    """The real widths, and four layers."""
    own = {"model": {"model": str(make_full_size(tmp_path / "model", size, layers=4))}}
    config = parse_config(merge(merge(load_mapping(PROFILES / f"{profile}.yaml"), own), changes))
    linear = size == "3.5-4b"  # its own functions take longer than the bound of a kernel
    loaded, samples = step_model(config), make_samples(tmp_path, 4 if linear else 8, side=512)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe.channel_a.segments(samples))
    found = step_costs(config, loaded, samples, processes)["A"]
    counted = fake_steps(config, loaded, recipe, pack, ["A"], processes)["A"]
    assert found.weights == pytest.approx(counted.weights, rel=0.01)
    assert found.working == pytest.approx(counted.working, rel=0.1)
    several = 0.1 if "stage2_ab" in changes else 0.03  # forwards between read few logits
    assert found.flops == pytest.approx(counted.flops, rel=several)
    seconds = found.flops / H100.flops + found.moved / H100.bandwidth
    assert linear or seconds == pytest.approx(counted.seconds(H100), rel=0.1)
    assert seconds < 1.1 * counted.seconds(H100)
    assert found.sent == pytest.approx(counted.sent, rel=0.01)


# 0.5 and 0.1 s of an H100's memory.
COST = StepCost(
    tokens=100,
    packs=2,
    weights=10 * 2**30,
    start=0,
    gradients=2**30,
    moments=335 * 2 * 10**9 // 7,
    working=2**30,
    flops=0.0,
    useful=5e12,
    moved=335 * 10**9 * 5,
    sent=0.0,
)
SERVED = Serving(sequence=2**30, length=4096, context=4096)


def estimate_of(
    config: Config,
    cost: StepCost,
    served: Serving | None = None,
    gpu: Gpu = H100,
    processes: int = 1,
    pushed: int = 2**30,
) -> Estimate:
    return Estimate(config, gpu, processes, 8, {"A": cost}, 1, pushed, 0, served)


def test_step_time_is_packs_and_update(config_of: ConfigOf) -> None:
    found = estimate_of(config_of(), COST)
    assert found.step_s(COST) == pytest.approx(1.1)
    assert found.mfu(COST) == pytest.approx(10e12 / (1.1 * 989e12))
    assert found.step_s(replace(COST, flops=989e12)) == pytest.approx(3.1)
    for sent, seconds in ((225, 1.1), (900, 4.1)):  # computation hides messages
        assert found.step_s(replace(COST, sent=sent * 1e9)) == pytest.approx(seconds)


@pytest.mark.req("GROUP-01", "GROUP-04")
def test_groups_count_each_answer_and_the_starting_model(
    toy_checkpoint: Path, scenes: list[Sample]
) -> None:
    smoke = PROFILES.parents[1] / "stage2_group_relative" / "smoke"
    profile = load_mapping(smoke / "default.yaml")
    own = {"model": {"model": str(toy_checkpoint)}, "training": {"packing": False}}

    def of_group(size: int, kl_weight: float, tuner: dict[str, Any]) -> Estimate:
        mapping = merge(profile, own | {"tuner": tuner, "group_relative": {"group_size": size}})
        (module,) = mapping["stage2_ab"]["pipeline"]["objective"]
        module["config"]["kl_weight"] = kl_weight
        return estimate(parse_config(mapping), scenes, H100, 1)

    def seconds(found: Estimate) -> list[float]:
        return [step["answers_seconds"] for step in found.served_steps().values()]

    full = {"train_type": "full"}
    four, eight, pulled = (of_group(*of, full) for of in ((4, 0.0), (8, 0.0), (4, 0.1)))
    one, two, more = (found.costs["B"] for found in (four, eight, pulled))
    assert (one.packs, two.packs) == (2 * 4, 2 * 8)
    assert seconds(eight)[0] > seconds(four)[0]
    assert (one.start, more.start) == (0, one.weights)
    assert more.total == one.total + one.weights
    assert more.flops > one.flops
    assert more.moved > one.moved
    assert of_group(4, 0.1, LORA).costs["B"].start == 0, "the adapters are disabled"


def test_estimate_that_does_not_fit_is_refused_with_the_numbers(config_of: ConfigOf) -> None:
    small = gpu_named("rtx4090")
    found = estimate_of(config_of(), COST, SERVED, small, pushed=30 * 2**30)
    (server,) = [error for error in found.refusals() if error.where != "--gpu"]
    assert (found.sequences, server.where) == (0, "rollout_matching.vllm")
    assert "30 GiB of weights" in server.found
    large = replace(COST, weights=30 * 2**30, working=0)
    (learner,) = estimate_of(config_of(), large, gpu=small).refusals()
    assert "22.1 GiB of the RTX4090 can be used" in learner.found


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize(
    ("offload", "kept"), [(None, 30), ("offload_optimizer", 10), ("offload_model", 20)]
)
def test_kept_states_must_fit_beside_a_working_server(
    config_of: ConfigOf, offload: str | None, kept: int
) -> None:
    cost = replace(COST, gradients=10 * 2**30, moments=20 * 2**30)
    vllm = {"mode": "colocate", "server": None, "gpu_memory_utilization": 0.6}
    moves = {"enabled": True, offload: True} if offload else {}
    config = config_of(rollout_matching={"vllm": vllm, "offload": moves})
    found = estimate_of(config, cost, SERVED)
    assert found.kept == kept * 2**30
    assert found.left == pytest.approx((0.92 - 0.6) * 80 * 2**30)
    text = "a learner keeps 30 GiB of weights and optimizer; the server leaves 25.6 GiB of the H100"
    assert [text in error.found for error in found.refusals()] == [True] * (kept == 30)


def test_command_estimates_a_step_of_samples_from_the_whole_file(
    run_yaml: RunYaml, toy_data: ToyData, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in toy_data.train_jsonl.read_text().splitlines()]
    for line in lines:
        line["images"] = [str(toy_data.train_jsonl.parent / line["images"][0])]
        line["objects"] = line["objects"][:1]
    lines[-6]["objects"] *= 9
    data = tmp_path / "long_last.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = run_yaml(data={"train_jsonl": str(data)}, training={"packing": False})
    printed = CliRunner().invoke(app, ["estimate", str(file), "--gpu", "h100", "--json"]).stdout
    measure, longest = lengths_of_run(load_config(file)), read_samples(data, allow_poly=False)[-6]
    tokens = json.loads(printed)["channels"]["A"]["pack_tokens"]
    assert tokens == measure.prompt(longest) + measure.target(longest)


def test_command_prints_tables_or_json_and_refuses_bad_input(
    run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["estimate", str(run_yaml()), "--gpu", "h100"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "Real steps reach 55% to 69% of a bound" in shown.stdout
    uneven = CliRunner().invoke(app, [*words, "--gpus", "3"])
    assert "effective_batch_size" in str(uneven.exception)
    run_yaml(stage2_ab={"schedule": {"b_ratio": 0.5}})
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (document["gpu"], document["fits"]) == ("H100", True)
    assert document["channels"].keys() == {"A", "B"}
    server = document["server"]
    assert server["token_bytes"] * server["sequence_tokens"] == server["sequence_bytes"]
    assert document["push_bytes"] == document["channels"]["A"]["weights_bytes"]
    steps = [document["served_steps_seconds_at_best"][str(count)] for count in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] >= document["channels"]["B"]["step_seconds_at_best"]
    assert "Steps of channel B" in CliRunner().invoke(app, words).stdout
    monkeypatch.setitem(GPUS, "H100", Gpu("H100", 2**20, 1e12, 1e12, 1e12, 1e12))
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, ContractError)
    assert "a learner needs" in str(refused.exception)


@pytest.mark.req("FULL-09")
@pytest.mark.parametrize(
    ("tuner", "context"),
    [
        ({"train_type": "full"}, {"n_softctx_iter": 1}),
        (LORA, {"n_softctx_iter": 1}),
        (LORA, {"n_softctx_iter": 3, "softctx_grad_mode": "em_detach"}),
        (LORA, {"n_softctx_iter": 3, "softctx_grad_mode": "unroll"}),
    ],
    ids=["full", "lora", "detached", "unrolled"],
)
def test_flops_of_a_pack_are_those_of_its_operations(
    config_of: ConfigOf, scenes: list[Sample], tuner: dict[str, Any], context: dict[str, Any]
) -> None:
    config = config_of(tuner=tuner, stage2_ab=context, global_max_length=1000)
    loaded = meta_model(config)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe.channel_a.segments(scenes[:4]))
    counted = fake_step(config, scenes[:4], "A").flops
    # Middle forwards read slots alone, and the mean embedding is a product: both small.
    assert recipe.flops(loaded.model, pack, "A") == pytest.approx(counted, rel=0.05)
    several = context["n_softctx_iter"] > 1
    assert (recipe.flops(loaded.model, pack, "B") < 0.7 * counted) is several, "one forward"


@pytest.mark.req("FULL-09")
def test_step_logs_tokens_memory_and_use_of_a_known_gpu(
    config_of: ConfigOf, scenes: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(DeviceUse):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.gpu = Gpu("slow", 1, 1e9, 1.0, 1.0, 1.0)

    def step() -> dict[str, float]:
        loaded = load_model(config_of())
        loaded.model.train()
        runner = StepRunner(config_of(), recipe_of(config_of(), loaded), None)
        _, report = runner.run(loaded.model, scenes[:4], 0, PlainAccelerator())
        return report.metrics

    plain = step()
    tokens, seconds = plain["packing/post_rollout_selected_total_len"], plain["time/learn_s"]
    assert plain["perf/tokens_per_s"] == pytest.approx(tokens / seconds)
    assert plain["perf/peak_memory_gib"] > 0
    assert "perf/mfu" not in plain
    monkeypatch.setattr("learner.training.step.DeviceUse", Known)
    known = step()
    flops = known["perf/mfu"] * 1e9 * known["time/learn_s"]
    assert 1e6 < flops / known["packing/post_rollout_selected_total_len"] < 1e8


OF_4B = {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 2560}
OF_4B |= {"num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.req("FULL-06")
def test_cache_of_a_token_is_a_key_and_a_value_in_every_layer() -> None:
    assert 2 * cache_elements(OF_4B) == 144 * 1024
    assert 2 * cache_elements(OF_4B) * 262144 == 36 * GIB
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert cache_elements(plain) == 2 * 2 * 64
    with pytest.raises(LookupError):
        cache_elements({})


def described(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.req("FULL-06")
def test_context_is_rounded_up_to_at_most_that_of_the_model(tmp_path: Path) -> None:
    model = described(tmp_path / "m", text_config={"max_position_embeddings": 4500})
    assert run_context(model, 1077, 3072) == 4352
    assert run_context(model, 1280, 3072) == 4352
    assert run_context(model, 1281, 3072) == 4500
    assert run_context(model, 20, 24) == 512, "the proof of a push fits, too"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(model)})
    )
    assert run_context(adapter, 9000, 1) == 4500
    for unknown in (tmp_path / "none", described(tmp_path / "n"), described(tmp_path / "l", x=[])):
        assert run_context(unknown, 9000, 1) == 9216


@pytest.mark.req("FULL-06")
@pytest.mark.parametrize(
    ("total", "largest", "share"),
    [
        (24 * GIB, 100 * MIB, 0.9),  # 2.1 GiB needed
        (24 * GIB, 0.73 * GIB, 0.86),  # 3.2
        (1 * GIB, 0.73 * GIB, 0.01),
    ],
)
def test_engine_leaves_room_for_a_push(total: float, largest: float, share: float) -> None:
    assert engine_share(total, largest) == share


@pytest.mark.req("FULL-06")
def test_context_of_a_run_follows_from_its_longest_prompt(config_of: ConfigOf) -> None:
    config = config_of(stage2_ab={"schedule": {"b_ratio": 0.5}})
    samples = read_inputs(config).train
    measure = lengths_of_run(config)
    longest = max(measure.prompt(sample) for sample in samples)
    assert longest_prompt(config, samples) == longest
    context = context_of_run(config, samples)
    assert longest + 16 < PROOF_TOKENS <= context < PROOF_TOKENS + 256
    narrow = replace(samples[0], width=1, height=10**6)
    assert longest_prompt(config, [narrow, *samples]) == longest, "no model can be shown it"
    served = estimate(config, samples, H100, 1).served
    assert served is not None
    assert served.context == context
    stated = config_of(rollout_matching={"vllm": {"max_model_len": 99}})
    assert context_of_run(stated, samples) == 99
