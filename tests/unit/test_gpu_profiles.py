"""The shipped profiles for GPUs, on the real widths: what docs/full-size.md says of them holds."""

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.models.gpus import GPUS, gpu_named
from learner.objectives.logit_stats import HEAD_ELEMENTS
from learner.operate.estimate.report import Estimate, as_json, estimate
from tests.unit.full_size_models import VOCABULARY, WIDTHS, make_full_size, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.req("FULL-05")]

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "configs" / "stage2_two_channel" / "gpu"
PAGE = ROOT / "docs" / "full-size.md"
GIB = 2**30
NO_CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 0.0}}}


@dataclass(frozen=True)
class Row:
    """Of the table: a profile, its learner GPUs, and the numbers behind them."""

    profile: str
    gpu: str
    gpus: int
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.profile}-{self.gpu}"


def lines() -> Iterator[list[str]]:
    """The cells of the page's lines that begin with a profile."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| `\w+` \|", line):
            yield [cell.strip(" `") for cell in line.strip("|").split("|")]


def rows() -> Iterator[Row]:
    for profile, gpu, gpus, *numbers in lines():
        if gpu in GPUS:
            values = tuple(float(number.replace(",", "")) for number in numbers)
            yield Row(profile, gpu, int(gpus), values)


FIRST = next(rows())


def shared() -> dict[str, tuple[float, ...]]:
    """Of the table of one GPU for all: by profile the fraction, GiB that are kept and left,
    sequences."""
    return {
        profile: (float(fraction), *map(float, numbers))
        for profile, fraction, *numbers in lines()
        if fraction not in GPUS
    }


def told(found: Estimate) -> tuple[float, ...]:
    """The numbers of a row, in the order of the table."""
    cost = found.largest
    parts = (cost.weights, cost.gradients, cost.moments, cost.working, cost.total)
    assert found.sequences is not None
    memory = (part / GIB for part in parts)
    seconds = (found.step_s(cost), found.messages_s(cost), found.push_s)
    return (*memory, cost.tokens, *seconds, found.sequences)


Counted = Callable[[Row], Estimate]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """The estimate of a row. Rows of one profile and number of GPUs share a count."""

    @cache
    def on_first_gpu(profile: str, gpus: int) -> Estimate:
        """Channel B is as large as A, which the first row of the table shows for all."""
        folder = tmp_path_factory.mktemp(profile)
        first = (profile, gpus) == (FIRST.profile, FIRST.gpus)
        config = config_of(profile, folder, {} if first else NO_CHANNEL_B)
        gc.collect()
        return estimate(config, make_samples(folder, 32), gpu_named(FIRST.gpu), gpus)

    return lambda row: replace(on_first_gpu(row.profile, row.gpus), gpu=gpu_named(row.gpu))


def config_of(profile: str, folder: Path, *changes: dict[str, Any]) -> Config:
    """A shipped profile with a model that is there."""
    size = profile[:2]
    model = make_full_size(folder / size, size)
    mapping = merge(load_mapping(PROFILES / f"{profile}.yaml"), {"model": {"model": str(model)}})
    for change in changes:
        mapping = merge(mapping, change)
    return parse_config(mapping)


def test_the_table_has_every_profile_and_each_begins_with_its_total() -> None:
    totals = {row.profile: row.numbers[4] for row in rows()}
    assert totals.keys() == {path.stem for path in PROFILES.glob("*.yaml")}
    for profile, total in totals.items():
        comment = (
            (PROFILES / f"{profile}.yaml").read_text(encoding="utf-8").partition("\nextends")[0]
        )
        assert f" {total:.3g} GiB" in comment
        assert "16 bytes a parameter" in comment


@pytest.mark.req("FULL-01", "FULL-02")
@pytest.mark.parametrize("row", list(rows()), ids=str)
def test_a_profile_fits_with_the_numbers_of_the_page(row: Row, counted: Counted) -> None:
    found = counted(row)
    config = found.config
    assert list(found.refusals()) == []
    assert config.model.gradient_checkpointing
    assert config.model.torch_dtype == "bfloat16"
    assert found.largest.tokens > 0.95 * config.global_max_length
    assert found.costs.keys() == ({"A", "B"} if row == FIRST else {"A"})
    for cost in found.costs.values():
        assert cost.total == pytest.approx(found.largest.total, rel=0.01)
        assert not [shape for shape in cost.shapes if shape.count(cost.tokens) > 1]
        chunks = {shape[-2] for shape in cost.shapes if len(shape) > 1 and shape[-1] == VOCABULARY}
        chunks -= {WIDTHS[row.profile[:2]]}  # of the head itself
        assert max(chunks) in range(2, HEAD_ELEMENTS // VOCABULARY + 1)
    if row.gpu == "H100" and row.profile in shared():
        holds_beside_a_server(found, config, *shared()[row.profile])
    numbers = told(found)
    cells = " | ".join(f"{number:,.4g}" for number in numbers)
    assert numbers == pytest.approx(row.numbers, rel=0.03), f"the page should have | {cells} |"


def holds_beside_a_server(
    found: Estimate, config: Config, fraction: float, kept: float, left: float, sequences: float
) -> None:
    """The same run with a colocated server."""
    rollout = config.rollout_matching
    vllm = rollout.vllm.model_copy(
        update={"mode": "colocate", "server": None, "gpu_memory_utilization": fraction}
    )
    own = config.model_copy(update={"rollout_matching": rollout.model_copy(update={"vllm": vllm})})
    beside = replace(found, config=own)
    assert beside.room / GIB == pytest.approx(69.6)
    assert (beside.kept / GIB, beside.left / GIB) == pytest.approx((kept, left), rel=0.01)
    assert beside.sequences == pytest.approx(sequences, rel=0.03)
    assert list(beside.refusals()) == []


def test_4b_with_all_weights_on_one_gpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    alone = {"training": {"data_parallel": "ddp"}, **NO_CHANNEL_B}
    config = config_of("4b_full_fsdp2", tmp_path, alone)
    found = estimate(config, make_samples(tmp_path, 32), gpu_named("H100"), 1)
    assert not as_json(found)["fits"]
    (refused,) = found.refusals()
    assert re.search(r"needs 7\d\.\d GiB .*; 73\.6 GiB of the H100", refused.found)
    assert "lower global_max_length, or use training.data_parallel: fsdp2" in refused.do
    (told_of_it,) = re.findall(r"it needs ([\d.]+) GiB", PAGE.read_text(encoding="utf-8"))
    assert found.largest.total / GIB == pytest.approx(float(told_of_it), rel=0.03)
