"""Tokenizers and samples that tests share."""

from importlib.resources import files

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.stages.tokens import COORD_BINS, IM_END, coord_token
from learner.types import Sample
from tests.unit.mixed_samples import mixed_samples
from tests.unit.small_run import config_of as config_of  # a fixture
from tests.unit.small_run import run_yaml as run_yaml  # a fixture
from tests.unit.toy_bpe import train_toy_tokenizer
from tests.unit.trained_run import trained_run as trained_run  # a fixture


@pytest.fixture(scope="session")
def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Trained here: pieces such as `"]}}`, and tokens that hold part of a character."""
    return train_toy_tokenizer()


@pytest.fixture(scope="session")
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen's own BPE ranks with the coordinate tokens added."""
    ranks = files("dashscope") / "resources" / "qwen.tiktoken"
    tokenizer = TikTokenConverter(str(ranks), extra_special_tokens=[IM_END]).converted()
    tokenizer.add_tokens([coord_token(k) for k in range(COORD_BINS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END)


@pytest.fixture(scope="session", params=["toy", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """The toy tokenizer, then that of Qwen."""
    chosen: PreTrainedTokenizerFast = request.getfixturevalue(f"{request.param}_tokenizer")
    return chosen


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Samples that differ in all that a pack has to keep apart."""
    return mixed_samples(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="session")
def scenes(toy_data: ToyData) -> list[Sample]:
    """The 24 samples of `toy_data` to train on."""
    return read_samples(toy_data.train_jsonl, allow_poly=False)
