"""Tokenizers and toy files that the tests of the pure stages share."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from learner.coords import COORD_BINS, coord_token
from learner.data.toy import ToyData, make_data
from learner.tokens import IM_END
from tests.unit.toy_bpe import train_toy_tokenizer


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
    """Each of the two in turn."""
    chosen: PreTrainedTokenizerFast = request.getfixturevalue(f"{request.param}_tokenizer")
    return chosen


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model with its processor, seed 0."""
    from learner.model.toy import make_model  # seconds, which the pure tests can do without

    path = tmp_path_factory.mktemp("toy_checkpoint") / "model"
    make_model(path, seed=0)
    return path


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    """24 scenes to train on and 4 held out, seed 0."""
    return make_data(tmp_path_factory.mktemp("toy_data") / "data", train=24, val=4, seed=0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one core: small models gain nothing from more, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
