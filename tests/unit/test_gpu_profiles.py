"""The numbers of docs/gpus.md about the shipped profiles for GPUs, on the real widths."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.models.gpus import GPUS, gpu_named
from learner.operate.estimate import Estimate, estimate
from tests.unit.full_size_models import make_full_size, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.req("FULL-05")]

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "configs" / "stage2_two_channel" / "gpu"
PAGE = ROOT / "docs" / "gpus.md"
GIB = 2**30

# Of the table: profile, GPU, learner GPUs; GiB of weights, gradients, moments, working memory and
# total, the longest pack, seconds of a step, of its messages and of a push, sequences.
Row = tuple[str, str, int, tuple[float, ...]]


def lines() -> Iterator[list[str]]:
    """The cells of the page's lines that begin with a profile."""
    for line in PAGE.read_text("utf-8").splitlines():
        if re.match(r"\| `\w+` \|", line):
            yield [cell.strip(" `") for cell in line.strip("|").split("|")]


def rows() -> Iterator[Row]:
    for profile, gpu, gpus, *numbers in lines():
        if gpu in GPUS:
            values = tuple(float(number.replace(",", "")) for number in numbers)
            yield profile, gpu, int(gpus), values


def shared() -> dict[str, tuple[float, ...]]:
    """Table of one shared GPU by profile: fraction, GiB kept, GiB left, sequences."""
    return {
        profile: (float(fraction), *map(float, numbers))
        for profile, fraction, *numbers in lines()
        if fraction not in GPUS
    }


Counted = Callable[[str, str, int], Estimate]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """The estimate of a profile. It holds for every kind of GPU, and is made once."""

    @cache
    def of(profile: str, gpus: int) -> Estimate:
        folder, size = tmp_path_factory.mktemp(profile), profile[:2]
        own = {"model": {"model": str(make_full_size(folder / size, size))}}
        config = parse_config(merge(load_mapping(PROFILES / f"{profile}.yaml"), own))
        return estimate(config, make_samples(folder, 32), gpu_named("H100"), gpus)

    return lambda profile, gpu, gpus: replace(of(profile, gpus), gpu=gpu_named(gpu))


def test_the_table_has_every_profile_and_each_begins_with_its_total() -> None:
    totals = {profile: numbers[4] for profile, _, _, numbers in rows()}
    assert totals.keys() == {path.stem for path in PROFILES.glob("*.yaml")}
    for profile, total in totals.items():
        comment, *_ = (PROFILES / f"{profile}.yaml").read_text("utf-8").partition("\nextends")
        assert f" {total:.3g} GiB" in comment


@pytest.mark.req("FULL-10")
@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row[:2]))
def test_a_profile_fits_with_the_numbers_of_the_page(row: Row, counted: Counted) -> None:
    profile, gpu, gpus, wanted = row
    found = counted(profile, gpu, gpus)
    config = found.config
    assert list(found.refusals()) == []
    assert config.rollout_matching.backend == "server"  # on GPUs of its own
    assert found.largest.tokens > 0.95 * config.global_max_length
    of_a, of_b = found.costs["A"], found.costs["B"]
    assert of_a.total == pytest.approx(of_b.total, rel=0.01)
    assert of_a.flops == pytest.approx(of_b.flops, rel=0.02)
    if gpu == "H100" and profile in shared():
        holds_beside_a_server(found, config, *shared()[profile])
    cost = found.largest
    parts = (cost.weights, cost.gradients, cost.moments, cost.working, cost.total)
    seconds = (found.step_s(cost), found.messages_s(cost), found.push_s)
    numbers = (*(part / GIB for part in parts), cost.tokens, *seconds, found.sequences)
    assert numbers == pytest.approx(wanted, rel=0.03)


def test_the_range_to_expect_is_that_of_the_page(counted: Counted) -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text("utf-8"))
    found = re.search(r"(\S+) to (\S+) s for `(\w+)` on one (\w+), for the learner alone", text)
    assert found is not None
    low, high, profile, gpu = found.groups()
    cost = counted(profile, gpu, 1)
    assert cost.expected_s(cost.largest) == pytest.approx((float(low), float(high)), rel=0.03)


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
