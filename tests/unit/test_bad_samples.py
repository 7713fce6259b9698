"""Samples with unusable images: named before a run, or replaced in it (`data.on_bad_sample`)."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor

from learner.data.order import BadSampleLog, ReplacedSamples
from learner.data.toy import ToyData
from learner.models.prompts import PromptEncoder
from learner.operate.eval_plan import plan_evaluation
from learner.training.input_checks import check_inputs
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.data_files import LYING, paint
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf, metric_lines, run_quietly, small_config

pytestmark = pytest.mark.req("DATA-01", "STEP-02")


@pytest.fixture
def data(toy_data: ToyData, tmp_path: Path) -> ToyData:
    """A copy of the toy scenes, 24 and 4, that a test may damage."""
    folder = tmp_path / "data"
    shutil.copytree(toy_data.train_jsonl.parent, folder)
    return ToyData.under(folder)


def image_of(file: Path, line: int) -> Path:
    record = json.loads(file.read_text().splitlines()[line - 1])
    return file.parent / str(record["images"][0])


def edit(file: Path, line: int, **changes: Any) -> None:
    lines = file.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | changes)
    file.write_text("".join(f"{one}\n" for one in lines))


def damage(data: ToyData) -> dict[str, str]:
    """Break samples of both files in every way that a header shows. Returns errors by sample."""
    train, val = data.train_jsonl, data.val_jsonl
    text, gone, tiff, lying, long = (image_of(train, n) for n in range(2, 7))
    text.write_text("no image")
    gone.unlink()
    Image.new("RGB", (64, 64)).save(tiff, "TIFF")
    paint(lying.with_suffix(".jpg"), (64, 32), orientation=LYING).rename(lying)
    Image.new("RGB", (4000, 10)).save(long)
    edit(train, 6, width=4000, height=10)
    edit(val, 3, width=63)
    return {
        f"{train}:2": "is no image of a known format",
        f"{train}:3": "cannot be read (No such file or directory)",
        f"{train}:4": "is no image of a known format (PNG, JPEG, WEBP, BMP)",
        f"{train}:5": "has 32x64 pixels once it is turned upright",
        f"{train}:6": "has 4000x10 pixels, and the model's processor refuses sides of a ratio",
        f"{val}:3": "width x height is 63x64, and image",
    }


STOP = {"on_bad_sample": "stop"}


@pytest.fixture
def config_of(toy_checkpoint: Path, data: ToyData, tmp_path: Path) -> ConfigOf:
    """A run on `data` that skips bad samples, if it is not to stop."""
    of = partial(small_config, toy_checkpoint, data, tmp_path / "run")
    return partial(of, data={"on_bad_sample": "skip"})


def test_all_bad_samples_are_named_before_a_run_starts(config_of: ConfigOf, data: ToyData) -> None:
    errors = damage(data)
    with pytest.raises(ContractErrors) as caught:
        check_inputs(config_of(data=STOP))
    found = {error.where: error.found for error in caught.value.errors}
    assert found.keys() == errors.keys()
    assert all(words in found[where] for where, words in errors.items())
    assert all("data.on_bad_sample: skip" in error.do for error in caught.value.errors)


def test_the_check_refuses_the_sides_that_the_processor_refuses(
    config_of: ConfigOf, data: ToyData
) -> None:
    """The processor is real. One image is within its bound, the other is above it."""
    config = config_of()
    processor = AutoProcessor.from_pretrained(config.model.model)
    prompt = PromptEncoder(processor, config.template.prompt, None)
    image, sample_id = image_of(data.train_jsonl, 1), f"{data.train_jsonl}:1"
    for width, narrow in [(2000, False), (2010, True)]:
        Image.new("RGB", (width, 10)).save(image)
        edit(data.train_jsonl, 1, width=width, height=10)
        assert (sample_id in check_inputs(config).bad) == narrow
        sample = Sample(f"{sample_id}.{width}", (image,), width, 10, ())
        if not narrow:
            assert prompt(sample).pixel_values is not None
            continue
        with refused(sample.sample_id, "the model's processor refuses it"):
            prompt(sample)


def listed(folder: Path) -> dict[str, str]:
    records = map(json.loads, (folder / "bad_samples.jsonl").read_text().splitlines())
    return {f"{record['file']}:{record['line']}": record["reason"] for record in records}


EPOCH = {"effective_batch_size": 8, "max_steps": 3, "save_steps": 1}


@pytest.mark.req("RUN-01")
def test_a_run_that_skips_bad_samples_makes_whole_steps_also_after_a_resume(
    config_of: ConfigOf, data: ToyData, tmp_path: Path
) -> None:
    errors = damage(data)
    cut = image_of(data.train_jsonl, 9)  # its header is whole
    cut.write_bytes(cut.read_bytes()[:-40])
    whole = run_quietly(config_of(training=EPOCH | {"output_dir": str(tmp_path / "whole")}))
    steps = metric_lines(whole, "loss")
    assert [step["packing/post_rollout_segments"] for step in steps] == [8, 8, 8]
    assert sum(step["data/bad_samples"] for step in steps) == 6  # of one epoch
    found = listed(whole)
    assert found.keys() == errors.keys() | {f"{data.train_jsonl}:9"}
    for where, words in errors.items():
        assert words in found[where]
    assert "cannot be decoded" in found[f"{data.train_jsonl}:9"]
    for last in (1, 3):
        training = EPOCH | {"max_steps": last, "resume": "auto"}
        parts = run_quietly(config_of(training=training))
    again = metric_lines(parts, "loss")
    assert [step["loss"] for step in again] == [step["loss"] for step in steps]
    assert (parts / "bad_samples.jsonl").read_bytes() == (whole / "bad_samples.jsonl").read_bytes()


def test_an_evaluation_names_bad_samples_or_leaves_them_out(
    config_of: ConfigOf, data: ToyData
) -> None:
    damage(data)
    stop, skip = config_of(data=STOP), config_of()
    inputs = check_inputs(skip)
    assert [sample.sample_id for sample in inputs.val] == [
        f"{data.val_jsonl}:{line}" for line in (1, 2, 4)
    ]
    assert len(inputs.train) == 24
    with pytest.raises(ContractErrors) as caught:
        plan_evaluation(stop)
    assert [error.where for error in caught.value.errors] == [f"{data.val_jsonl}:3"]
    assert len(plan_evaluation(skip).samples) == 3
    for line in range(1, 5):
        image_of(data.val_jsonl, line).write_text("no image")
    with pytest.raises(ContractError, match="none of 4 samples can be used"):
        plan_evaluation(skip)


@pytest.mark.parametrize(("name", "samples"), [("train", 24), ("val", 4)])
def test_a_file_without_a_good_sample_is_refused(
    config_of: ConfigOf, data: ToyData, name: str, samples: int
) -> None:
    file = {"train": data.train_jsonl, "val": data.val_jsonl}[name]
    for line in range(1, samples + 1):
        image_of(file, line).write_text("no image")
    with refused(str(file), f"none of {samples} samples can be used"):
        check_inputs(config_of())


def samples(count: int) -> list[Sample]:
    return [Sample(f"d.jsonl:{n}", (), 1, 1, ()) for n in range(1, count + 1)]


def stand_ins(
    of: Sequence[Sample], bad: set[str], seed: int = 0, noted: list[ContractError] | None = None
) -> ReplacedSamples:
    """bad: ids of bad samples. They are looked at when they are taken."""

    def look(sample: Sample) -> ContractError | None:
        return ContractError(sample.sample_id, "bad", "") if sample.sample_id in bad else None

    return ReplacedSamples(of, {}, seed, look, (noted if noted is not None else []).append)


def test_good_samples_keep_their_places_and_replacements_are_spread() -> None:
    every = samples(200)
    bad = {sample.sample_id for sample in every[50:100]}
    noted: list[ContractError] = []
    taken = stand_ins(every, bad, noted=noted)
    got = [taken[place] for place in range(200)]
    assert [*got[:50], *got[100:]] == every[:50] + every[100:]
    assert not bad & {sample.sample_id for sample in got}
    assert len({sample.sample_id for sample in got[50:100]}) > 30
    assert taken.take_replaced() == 50
    assert taken.take_replaced() == 0
    assert {fault.where for fault in noted} == bad
    assert len(noted) == 50


def test_without_a_good_sample_the_bad_one_is_named() -> None:
    every = samples(3)
    taken = stand_ins(every, {sample.sample_id for sample in every})
    with refused("d.jsonl:2"):
        taken[1]


def test_the_list_has_each_fault_once_also_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        log = BadSampleLog(tmp_path, rank=1)
        for line in (7, 8, 7):
            log.add(ContractError(f"/data/d:{line}.jsonl:{line}", 'is "bad"', ""))
    lines = (tmp_path / "bad_samples.rank1.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file": f"/data/d:{n}.jsonl", "line": n, "reason": 'is "bad"'} for n in (7, 8)
    ]


def test_a_description_that_the_answer_format_cannot_have_is_refused_before_the_run(
    config_of: ConfigOf, data: ToyData
) -> None:
    """Channel A would end the run at this sample, and channel B leave it out."""
    edit(data.train_jsonl, 7, objects=[{"desc": "red\nbox", "bbox_2d": [1, 2, 3, 4]}])
    check_inputs(config_of(data=STOP))
    with refused(f"{data.train_jsonl}:7", r'"red\nbox" has "\n", which ends an ent'):
        check_inputs(config_of(data=STOP, custom={"answer_format": "compact"}))
