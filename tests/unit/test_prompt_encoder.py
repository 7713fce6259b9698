"""Prompts are encoded ahead, in threads, each once, into a bounded number of bytes."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor, ProcessorMixin

from learner.models.prompts import PromptEncoder
from learner.types import Sample
from tests.unit.fleets import wait_until
from tests.unit.refusals import refused
from tests.unit.watched_processor import WatchedProcessor

pytestmark = pytest.mark.req("STEP-03", "FULL-08")

PROMPT = "Detect every object in the image."


@pytest.fixture(scope="module")
def processor(toy_checkpoint: Path) -> ProcessorMixin:
    found: ProcessorMixin = AutoProcessor.from_pretrained(toy_checkpoint)
    return found


@pytest.fixture(scope="module")
def samples(scenes: list[Sample]) -> list[Sample]:
    return scenes[:8]


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


def test_an_error_is_raised_to_each_caller_until_the_image_is_mended(
    processor: ProcessorMixin, samples: list[Sample], tmp_path: Path
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None)
    whole, *good = samples
    image = tmp_path / "broken.png"
    image.write_bytes(whole.images[0].read_bytes()[:60])
    bad = replace(whole, sample_id="broken", images=(image,))
    with encoder.ahead([bad, *good]):
        watched.wait_for(len(good))
        for _ in range(2):
            with refused("broken", "cannot be decoded"):
                encoder(bad)
        shutil.copy(whole.images[0], image)
        assert encoder(bad).num_bytes == encoder(whole).num_bytes
