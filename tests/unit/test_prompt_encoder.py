"""Prompts are encoded ahead, in threads, each once, into a bounded number of bytes."""

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, ProcessorMixin

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.prompts import ENCODING_THREADS, PromptEncoder
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.fleets import wait_until
from tests.unit.watched_processor import WatchedProcessor

pytestmark = pytest.mark.req("STEP-03", "FULL-08")

PROMPT = "Detect every object in the image."
HALF_A_SECOND = 0.5


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


def test_prompts_are_encoded_before_a_caller_asks_for_them(
    processor: ProcessorMixin, samples: list[Sample]
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None)
    plain = PromptEncoder(processor, PROMPT, None)
    with encoder.ahead(samples):
        watched.wait_for(len(samples))
        for sample in samples:
            ahead, asked = encoder(sample), plain(sample)
            assert torch.equal(ahead.ids, asked.ids)
            assert ahead.pixel_values is not None
            assert asked.pixel_values is not None
            assert torch.equal(ahead.pixel_values, asked.pixel_values)
    assert watched.begun == len(samples)


def test_as_many_are_encoded_at_once_as_there_are_threads(
    processor: ProcessorMixin, samples: list[Sample]
) -> None:
    watched = WatchedProcessor(processor, at_once=ENCODING_THREADS)
    encoder = PromptEncoder(watched, PROMPT, None)
    with encoder.ahead(samples[:ENCODING_THREADS]):
        watched.wait_for(ENCODING_THREADS)


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
        threading.Event().wait(HALF_A_SECOND)
        assert watched.begun == 3  # two wait, in the place of the one that was used
        for taken, sample in enumerate(wanted):
            encoder(sample)
            watched.wait_for(min(taken + 4, len(alike)))
            wait_until(lambda: len(watched.tensors) <= 2)
    assert watched.begun == len(alike)


def test_an_encoding_larger_than_the_cache_is_made_for_its_caller(
    processor: ProcessorMixin, alike: list[Sample], size: int
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None, cache_bytes=size - 1)
    encoder(alike[0])
    with encoder.ahead(alike):
        for sample in alike:
            assert encoder(sample).num_bytes == size
    wait_until(lambda: not watched.tensors)


def test_what_nobody_has_asked_for_gives_way_after_the_block(
    processor: ProcessorMixin, alike: list[Sample], size: int
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None, cache_bytes=size)
    first, second = alike[:2]
    with encoder.ahead([first]):
        wait_until(lambda: encoder(second) is not encoder(second))
    assert encoder(second) is encoder(second)
    with encoder.ahead([second]):  # it is there already, and now waits for its caller
        assert encoder(first) is not encoder(first)


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


def test_a_bad_sample_that_nobody_asks_for_stops_nothing(
    processor: ProcessorMixin, samples: list[Sample], tmp_path: Path
) -> None:
    watched = WatchedProcessor(processor)
    encoder = PromptEncoder(watched, PROMPT, None)
    bad = [replace(broken(samples[0], tmp_path), sample_id=f"bad {i}") for i in range(8)]
    with encoder.ahead([*bad, *samples]):
        watched.wait_for(len(samples))


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("encoder")}


def test_the_threads_end_with_their_encoder(
    processor: ProcessorMixin, samples: list[Sample]
) -> None:
    others = threads()  # of encoders that other tests keep
    encoder = PromptEncoder(processor, PROMPT, None)
    with encoder.ahead(samples):
        own = threads() - others
        assert own
    del encoder
    wait_until(lambda: not own & threads())


ENDS_EARLY = """
import sys
from dataclasses import replace
from pathlib import Path
from transformers import AutoProcessor
from learner.data.jsonl import read_samples
from learner.models.prompts import PromptEncoder
sample = read_samples(Path(sys.argv[2]), allow_poly=False)[0]
encoder = PromptEncoder(AutoProcessor.from_pretrained(sys.argv[1]), "Detect.", None)
block = encoder.ahead([replace(sample, sample_id=str(number)) for number in range(100_000)])
block.__enter__()
print("ends")
"""


@pytest.mark.slow
def test_a_process_ends_without_what_it_would_encode_ahead(
    toy_checkpoint: Path, toy_data: ToyData
) -> None:
    """All of them would take minutes."""
    command = [sys.executable, "-c", ENDS_EARLY, str(toy_checkpoint), str(toy_data.train_jsonl)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "ends\n"
    assert "Traceback" not in ended.stderr
