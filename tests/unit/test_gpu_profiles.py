"""The numbers of docs/gpus.md about the shipped profiles for GPUs, on the real widths.

CI counts one profile of each kind: all weights, sharded weights, adapters. `make nightly` counts
all profiles.
"""

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
from learner.operate.estimate.report import Estimate, estimate
from learner.operate.estimate.sizes import USABLE
from tests.unit.full_size_models import WIDTHS, large, make_full_size, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.req("FULL-05")]

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "configs" / "stage2_two_channel" / "gpu"
PAGE = ROOT / "docs" / "gpus.md"
GIB = 2**30
NO_CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 0.0}}}
COUNTED = ("2b_full", "2b_full_fsdp2", "4b_lora")


@dataclass(frozen=True)
class Row:
    """A line of the table: a profile, its learner GPUs, and the numbers behind them.

    numbers: GiB of weights, gradients, moments, working memory, total; the longest pack; seconds.
    """

    profile: str
    gpu: str
    gpus: int
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.profile}-{self.gpu}"


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def lines() -> Iterator[list[str]]:
    """The cells of the page's lines that begin with a profile."""
    for line in text().splitlines():
        if re.match(r"\| `\w+` \|", line):
            yield [cell.strip(" `") for cell in line.strip("|").split("|")]


def rows() -> Iterator[Row]:
    for profile, gpu, gpus, *numbers in lines():
        if gpu in GPUS:
            values = tuple(float(number.replace(",", "")) for number in numbers)
            yield Row(profile, gpu, int(gpus), values)


FIRST = next(rows())


def shared() -> dict[str, tuple[float, ...]]:
    """By profile of the table of one shared GPU: fraction, GiB kept, GiB left, sequences."""
    return {
        profile: (float(fraction), *map(float, numbers))
        for profile, fraction, *numbers in lines()
        if fraction not in GPUS
    }


def numbers_of(found: Estimate) -> tuple[float, ...]:
    """The numbers of a row, in the order of the table."""
    cost = found.largest
    parts = (cost.weights, cost.gradients, cost.moments, cost.working, cost.total)
    assert found.sequences is not None
    memory = (part / GIB for part in parts)
    seconds = (found.step_s(cost), found.messages_s(cost), found.push_s)
    return (*memory, cost.tokens, *seconds, found.sequences)


Counted = Callable[..., Estimate]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """The estimate of a profile. A count holds for every kind of GPU, and is made once."""

    @cache
    def on_first_gpu(profile: str, gpus: int) -> Estimate:
        """Channel B is as large as A, which the first row of the table shows for all."""
        folder = tmp_path_factory.mktemp(profile)
        first = (profile, gpus) == (FIRST.profile, FIRST.gpus)
        config = config_of(profile, folder, {} if first else NO_CHANNEL_B)
        gc.collect()
        return estimate(config, make_samples(folder, 32), gpu_named(FIRST.gpu), gpus)

    def on(profile: str, gpu: str, gpus: int) -> Estimate:
        return replace(on_first_gpu(profile, gpus), gpu=gpu_named(gpu))

    return on


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
@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=() if r.profile in COUNTED else pytest.mark.nightly) for r in rows()],
    ids=str,
)
def test_a_profile_fits_with_the_numbers_of_the_page(row: Row, counted: Counted) -> None:
    found = counted(row.profile, row.gpu, row.gpus)
    config = found.config
    assert list(found.refusals()) == []
    assert config.model.gradient_checkpointing
    assert config.model.torch_dtype == "bfloat16"
    assert config.rollout_matching.backend == "server"  # on GPUs of its own
    assert found.largest.tokens > 0.95 * config.global_max_length
    assert found.costs.keys() == ({"A", "B"} if row == FIRST else {"A"})
    for cost in found.costs.values():
        assert cost.total == pytest.approx(found.largest.total, rel=0.01)
        assert cost.flops == pytest.approx(found.largest.flops, rel=0.02)
        assert list(large(cost.shapes, cost.tokens, WIDTHS[row.profile[:2]])) == []
    if row.gpu == "H100" and row.profile in shared():
        holds_beside_a_server(found, config, *shared()[row.profile])
    numbers = numbers_of(found)
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


def row_of(profile: str, gpu: str = "H100") -> Row:
    (row,) = [row for row in rows() if (row.profile, row.gpu) == (profile, gpu)]
    return row


def test_the_rows_agree_with_each_other() -> None:
    """The memory of a profile is the same on every GPU; AdamW has two moments of a gradient."""
    for row in rows():
        weights, gradients, moments, working, total, *_ = row.numbers
        assert row.numbers[:6] == next(r for r in rows() if r.profile == row.profile).numbers[:6]
        assert moments == pytest.approx(2 * gradients, rel=0.01)
        assert weights + gradients + moments + working == pytest.approx(total, rel=0.01)
        assert total * GIB < gpu_named(row.gpu).memory * USABLE
        if "full" in row.profile:
            assert weights == gradients
    assert row_of("8b_lora").numbers[3] > row_of("4b_lora").numbers[3]


def test_4b_and_8b_with_all_weights_do_not_fit_on_one_gpu_of_80_gb() -> None:
    pattern = r"it needs ([\d.]+) GiB, and\s+([\d.]+) GiB can be used"
    ((needed, usable),) = re.findall(pattern, text())
    assert float(usable) == pytest.approx(gpu_named("H100").memory * USABLE / GIB, abs=0.05)
    states, working = sum(row_of("4b_full_fsdp2").numbers[:3]), row_of("4b_full_fsdp2").numbers[3]
    assert 2 * states + working < float(needed) < 2 * (states + working)
    assert float(needed) > float(usable)
    assert 4 * sum(row_of("8b_full_fsdp2").numbers[:3]) > float(usable)


def test_the_page_names_every_gpu() -> None:
    (named,) = re.findall(r"`--gpu` knows ([^.]+)\.", text())
    assert set(re.split(r", | and ", named)) == GPUS.keys()
