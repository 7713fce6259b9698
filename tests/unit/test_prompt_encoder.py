"""Prompts are encoded ahead, in threads, each once, into a bounded number of bytes."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor, ProcessorMixin

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.prompts import PromptEncoder
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.fleets import wait_until
from tests.unit.watched_processor import WatchedProcessor

pytestmark = pytest.mark.req("STEP-03", "FULL-08")

PROMPT = "Detect every object in the image."


@pytest.fixture(scope="module")
def processor(toy_checkpoint: Path) -> ProcessorMixin:
    found: ProcessorMixin = AutoProcessor.from_pretrained(toy_checkpoint)
    return found


@pytest.fixture(scope="module")
def samples(toy_data: ToyData) -> list[Sample]:
    return read_samples(toy_data.train_jsonl, allow_poly=False)[:8]


@pytest.fixture(scope="module")
def alike(samples: list[Sample]) -> list[Sample]:
    """Samples whose encodings have the same size."""
    return [replace(samples[0], sample_id=str(number)) for number in range(6)]


@pytest.fixture(scope="module")
def size(processor: ProcessorMixin, alike: list[Sample]) -> int:
    """Bytes of one of them."""
    return PromptEncoder(processor, PROMPT, None)(alike[0]).num_bytes


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_that_many_callers_ask_for_is_encoded_once(
    processor: ProcessorMixin, samples: list[Sample], ahead: bool
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None)
    callers = 8
    together = threading.Barrier(callers)

    def ask_for_all(caller: int) -> list[int]:
        together.wait(60)
        turned = samples[caller:] + samples[:caller]
        found = {sample.sample_id: id(encoder(sample)) for sample in turned}
        return [found[sample.sample_id] for sample in samples]

    with encoder.ahead(samples if ahead else []), ThreadPoolExecutor(callers) as pool:
        first, *others = pool.map(ask_for_all, range(callers))
    assert watched.begun == len(samples)
    assert all(other == first for other in others)


def test_what_waits_for_its_caller_is_kept_and_no_more_than_fits(
    processor: ProcessorMixin, alike: list[Sample], size: int
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None, cache_bytes=2 * size)
    used, *wanted = alike
    encoder(used)
    with encoder.ahead(wanted):
        watched.wait_for(3)
        wait_until(lambda: len(watched.tensors) == 2)
        assert watched.begun == 3  # two wait, in the place of the one that was used
        for taken, sample in enumerate(wanted):
            encoder(sample)
            watched.wait_for(min(taken + 4, len(alike)))
            wait_until(lambda: len(watched.tensors) <= 2)
    assert watched.begun == len(alike)


def broken(sample: Sample, folder: Path) -> Sample:
    image = folder / "broken.png"
    image.write_bytes(sample.images[0].read_bytes()[:60])
    return replace(sample, sample_id="broken", images=(image,))


def test_an_error_is_raised_to_each_caller_until_the_image_is_mended(
    processor: ProcessorMixin, samples: list[Sample], tmp_path: Path
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None)
    bad, good = broken(samples[0], tmp_path), samples[1:]
    with encoder.ahead([bad, *good]):
        watched.wait_for(len(good))
        for _ in range(2):
            with pytest.raises(ContractError, match="cannot be decoded") as caught:
                encoder(bad)
            assert caught.value.where == "broken"
        shutil.copy(samples[0].images[0], bad.images[0])
        assert encoder(bad).num_bytes == encoder(samples[0]).num_bytes
