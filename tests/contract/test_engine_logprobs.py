"""Training and serving compute the same: log-probabilities of the learner and of an engine."""

from pathlib import Path

import pytest

from learner.data.toy import ToyData
from tests.contract.log_probabilities import differences

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.req("ROLL-01", "PACK-04")
def test_the_learner_gives_answers_the_probabilities_that_the_engine_gives_them(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """In float32 on the CPU; `tests/gpu` has the same in bfloat16 on a GPU.

    Of every run, tests/integration/test_loop.py shows so for the answers of real pushes.
    """
    apart = differences(toy_checkpoint, toy_data, tmp_path, "float32")
    assert len(apart) > 60
    assert max(apart) < 1e-4
