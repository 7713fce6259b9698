"""Scenarios of whole steps of a two-channel run on the toy model (seed 001)."""

import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.rollout.policy import OpenBackend, Policy, asking_of
from learner.stages.formats.coord_json import serialize_append
from learner.stages.schedule import channel_for_step
from learner.training.backends import open_backend
from learner.training.run_log import CallLog, ProgressDisplay, open_run_folder
from learner.training.start_checks import read_inputs
from learner.training.train import RunParts, build_runner, build_trainer
from learner.training.trainer import StepTrainer, build_optimizer
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode, text_of
from tests.unit.config_faults import changed, only_error
from tests.unit.scenarios.test_training_step import World
from tests.unit.small_run import rollout, small_config, written
from tests.unit.test_private_imports import private_imports
from tests.unit.test_step import Parts, Scripted

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[3]
SURFACE = [
    "learner.training.channels",
    "learner.training.channels",
    "learner.training.step",
    "learner.training.train",
]
BATCH, STEPS, SAVED_AT = 4, 4, 2
B = "stage2_ab/channel_b"


class Asked(Scripted):
    """A scripted backend that tells how many samples it was asked for."""

    def __init__(self, samples: Sequence[Sample], parts: Parts, events: list[str]) -> None:
        super().__init__(samples, parts)
        self.events = events

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.events.append(f"{len(requests)} rollouts")
        return super().rollout(requests, request_config)


class Run:
    """A whole run of the real trainer.

    events: rollouts, forwards of the model and updates of the optimizer, as they happened.
    """

    def __init__(self, config: Config, checkpoint: Path | None = None) -> None:
        self.config = config
        self.events: list[str] = []
        parts, inputs = Parts(config), read_inputs(config)
        model, folder = parts.loaded.model, open_run_folder(config, None)
        optimizer = build_optimizer(model, config.training)
        model.register_forward_hook(lambda *_: self.events.append("forward"))
        optimizer.register_step_post_hook(lambda *_: self.events.append("update"))
        policy = Policy(OpenBackend(Asked(inputs.train, parts, self.events)), asking_of(config))
        run = RunParts(config, inputs, parts.loaded, optimizer, policy, CallLog(folder))
        display = ProgressDisplay(Console(file=io.StringIO()), "run")
        self.trainer = build_trainer(run, build_runner(run), lambda step: {}, display)
        self.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        logged = (folder / "metrics.jsonl").read_text().splitlines()
        self.steps = [line for line in map(json.loads, logged) if "loss" in line]

    @property
    def channels(self) -> str:
        return "".join("B" if step["step/channel_b"] else "A" for step in self.steps)

    @property
    def by_step(self) -> list[list[str]]:
        """The events up to and without each update."""
        *steps, after = " ".join(self.events).split("update")
        assert after == "", "nothing happens after the last update"
        return [step.split() for step in steps]


def mixed_config(model: Path, data: ToyData, out: Path) -> Config:
    """A: two forwards a pack. Packs hold about two samples. Steps A, B, B, A."""
    return small_config(
        model,
        data,
        out,
        training={"max_steps": STEPS, "save_steps": SAVED_AT, "effective_batch_size": BATCH},
        stage2_ab={"schedule": {"b_ratio": 0.7}, "n_softctx_iter": 2},
        global_max_length=170,
    )


@pytest.fixture(scope="module")
def mixed(toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(mixed_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("mixed")))


@pytest.mark.req("RES-02")
def test_selecting_the_trainer_variant(mixed: Run) -> None:
    assert mixed.config.custom.trainer_variant == "stage2_two_channel"
    assert isinstance(mixed.trainer, StepTrainer)
    assert set(mixed.channels) == {"A", "B"}, "and both of its channels have trained"
    error = only_error(changed("custom.trainer_variant", "stage2_ab_training"))
    assert error.do == "Use stage2_two_channel"


@pytest.mark.req("RES-01", "RES-02", "CHA-01", "STEP-01")
def test_selecting_the_trainer_variant_with_typed_stage2_ab(mixed: Run) -> None:
    assert mixed.channels == "ABBA", "of stage2_ab.schedule.b_ratio"
    for channel, step, events in zip(mixed.channels, mixed.steps, mixed.by_step, strict=True):
        forwards = 2 if channel == "A" else 1  # of stage2_ab.n_softctx_iter
        assert events.count("forward") == forwards * step["packing/post_rollout_packs"]


@pytest.mark.req("STEP-02")
def test_every_step_of_either_channel_takes_its_samples_whole_and_updates_once(mixed: Run) -> None:
    assert len(mixed.by_step) == len(mixed.steps) == STEPS
    packs = [step["packing/post_rollout_packs"] for step in mixed.steps]
    assert all(1 < count < BATCH for count in packs), "packs are neither samples nor steps"
    for channel, step, events in zip(mixed.channels, mixed.steps, mixed.by_step, strict=True):
        assert step["packing/post_rollout_segments"] == BATCH
        asked = [str(BATCH), "rollouts"] if channel == "B" else []
        assert events == asked + ["forward"] * events.count("forward")


@pytest.mark.req("STEP-01", "RUN-01")
def test_channel_selection_continues_across_checkpoint_resume(
    mixed: Run, toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """From the step of the checkpoint: from the beginning it would be A and then B."""
    whole = Path(mixed.config.training.output_dir)
    resumed = Run(
        mixed_config(toy_checkpoint, toy_data, tmp_path), whole / f"checkpoint-{SAVED_AT}"
    )
    assert [step["step"] for step in resumed.steps] == [3, 4]
    ratio = resumed.config.b_ratio
    expected = "".join(channel_for_step(step, ratio) for step in range(SAVED_AT, STEPS))
    assert resumed.channels == mixed.channels[SAVED_AT:] == expected == "BA"
    assert [step["loss"] for step in resumed.steps] == [
        step["loss"] for step in mixed.steps[SAVED_AT:]
    ]


@pytest.mark.req("STEP-02", "PACK-03")
def test_32_raw_rollouts_pack_into_fewer_than_32_packed_sequences(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    config = small_config(
        toy_checkpoint,
        make_data(tmp_path / "data", train=32, val=1, seed=0),
        tmp_path / "run",
        training={"max_steps": 1, "save_strategy": "no", "effective_batch_size": 32},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        global_max_length=12000,
    )
    run = Run(config)
    (step,) = run.steps
    packs = int(step["packing/post_rollout_packs"])
    assert step["packing/post_rollout_segments"] == 32
    assert packs < 32
    assert run.events == ["32 rollouts", *["forward"] * packs, "update"]


# --- One step of channel B --------------------------------------------------------------


@pytest.fixture
def world(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> World:
    return World(toy_checkpoint, toy_data, tmp_path)


def taught(world: World, sample: Sample, said: str) -> tuple[str, list[bool]]:
    """The text of a target without its EOS, and of each object it teaches whether it matched."""
    answer = rollout(world.encode(sample).ids.tolist(), encode(world.loaded.tokenizer, said))
    (segment,), _ = world.channel_b().segments([sample], [answer])
    target = segment.target
    text = text_of(world.loaded.tokenizer, target.token_ids[:-1])
    return text, [group.matched for group in target.coord_groups]


@pytest.mark.req("RES-06", "RES-08", "CHB-01")
def test_default_stage_2_ab_run_uses_unified_channel_b_semantics(world: World) -> None:
    """The rollout is kept as it is, what it missed is appended, and one forward teaches both."""
    sample = next(sample for sample in world.samples if len(sample.objects) == 2)
    first, second = sample.objects
    assert taught(world, sample, written(second)) == (
        written(second).removesuffix("}") + ", " + serialize_append("{", [first], 2, "desc_first"),
        [True, False],
    )
    metrics = world.step()
    assert len(world.forwards) == metrics["packing/post_rollout_packs"]


# --- Rollouts of a step -----------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Rows of each forward of one step of channel B, by who asked for it."""

    generating: set[int]
    learning: list[int]


def decoded(model: Path, data: ToyData, out: Path, decode_batch_size: int) -> Decoded:
    """Four samples, answered by the learner's own model."""
    config = small_config(
        model,
        data,
        out,
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "rollout_backend": "hf",
            "decode_batch_size": decode_batch_size,
            "max_new_tokens": 2,
        },
    )
    parts, seen = Parts(config), Decoded(set(), [])

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        rows = kwargs["input_ids"].shape[0]
        if kwargs["use_cache"]:
            seen.generating.add(rows)
        else:
            seen.learning.append(rows)

    parts.loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    samples = read_samples(data.train_jsonl, allow_poly=False)[:4]
    policy = Policy(open_backend(config, parts.loaded, [], out, samples), asking_of(config))
    parts.step(parts.runner(config, policy), samples)
    return seen


@pytest.mark.req("CFG-05")
def test_rollout_decode_batch_size_2_with_learner_microbatch_1(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    seen = decoded(toy_checkpoint, toy_data, tmp_path, 2)
    assert seen.generating == {2}
    assert set(seen.learning) == {1}


@pytest.mark.req("CFG-05", "RES-01")
def test_rollout_decode_batch_size_4_with_learner_microbatch_1(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    seen = decoded(toy_checkpoint, toy_data, tmp_path, 4)
    assert seen.generating == {4}
    assert set(seen.learning) == {1}
    old = "custom.extra.rollout_matching.decode_batch_size"
    assert only_error(changed(old, 4)).do == "Use rollout_matching.decode_batch_size"


# --- Public names alone -----------------------------------------------------------------


@pytest.mark.req("ARCH-01", "ARCH-02")
def test_private_rollout_helper_removal_does_not_break_stage_2_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in [*sys.modules.items()]:
        if name.startswith("learner."):
            for private in [n for n in vars(module) if n.startswith("_") and n[:2] != "__"]:
                monkeypatch.delattr(module, private)
    for name in SURFACE:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.req("ARCH-01")
def test_validation_fails_when_a_private_rollout_helper_import_is_reintroduced(
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "learner", tmp_path / "learner")
    assert private_imports(tmp_path).returncode == 0
    files = [f"{name.replace('.', '/')}.py" for name in SURFACE]
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write(
                "from learner.stages.formats.coord_json import (  # noqa\n    _entry as entry,\n)\n"
            )
    done = private_imports(tmp_path)
    assert done.returncode == 1
    found = [line.partition(":")[0] for line in done.stdout.splitlines() if "_entry" in line]
    assert sorted(found) == sorted(files)
