"""Training and serving on a GPU compute the same, up to what bfloat16 rounds."""

import statistics
from pathlib import Path

import pytest

from learner.data.toy import ToyData
from tests.contract.log_probabilities import differences


@pytest.mark.gpu
@pytest.mark.req("ROLL-01", "PACK-04")
def test_the_learner_gives_answers_the_probabilities_that_the_engine_gives_them(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    apart = differences(toy_checkpoint, toy_data, tmp_path, "bfloat16")
    assert statistics.mean(apart) < 0.05
    assert max(apart) < 0.5
