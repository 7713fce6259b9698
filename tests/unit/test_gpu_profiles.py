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
from learner.operate.estimate.report import Estimate, as_json, estimate
from learner.operate.estimate.speeds import speeds_at_best
from learner.operate.simulate import Setting, simulate
from learner.operate.simulate.inputs import OfData, Speeds, declared_shape
from learner.training.start_checks import lengths_of_run
from tests.unit.full_size_models import VOCABULARY, WIDTHS, large, make_full_size, make_samples

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


@dataclass(frozen=True)
class Team:
    """Of the tables of whole runs: the GPUs of a profile, and the seconds of its steps."""

    gpus: int
    gpu: str
    profile: str
    learner_gpus: int
    servers: int
    seconds: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.profile}-{self.gpus}x{self.gpu}"


def teams() -> Iterator[Team]:
    pattern = r"^\| (\d+) x (\w+) \| `(\w+)` \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$"
    for gpus, gpu, profile, learner, servers, a, b in re.findall(pattern, text(), re.MULTILINE):
        seconds = float(a), float(b)
        yield Team(int(gpus), gpu, profile, int(learner), int(servers), seconds)


Counted = Callable[..., Estimate]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """The estimate of a profile. The count is the same on every kind of GPU, and made once."""

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
@pytest.mark.parametrize("row", list(rows()), ids=str)
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
    assert refused.do.startswith("Lower global_max_length, use training.data_parallel: fsdp2 over")
    (told_of_it,) = re.findall(r"it needs ([\d.]+) GiB", text())
    cost = found.largest
    assert cost.total / GIB == pytest.approx(float(told_of_it), rel=0.03)
    assert cost.tokens > 11_500
    assert cost.working <= 12 * GIB
    assert cost.largest[0][:2] == ((VOCABULARY, WIDTHS["4b"]), "float32")


def test_8b_with_all_weights_does_not_fit_on_one_gpu_of_80_gb(counted: Counted) -> None:
    """By its weights, gradients and moments alone."""
    split = counted("8b_full_fsdp2", "H100", 4)
    assert 4 * split.largest.states > split.room


def test_four_gpus_of_24_gb_take_the_profiles_of_the_page(counted: Counted) -> None:
    (section,) = re.findall(r"^## Four GPUs of 24 GB\n(.*?)^## ", text(), re.MULTILINE | re.DOTALL)
    plain, number = " ".join(section.split()), {"one": 1, "two": 2, "three": 3}
    known = {row.profile: row for row in rows() if row.gpu == "RTX4090"}
    split = r"`(\w+)`,? with (\w+) GPUs? for the learner and (\w+) for servers"
    said = re.findall(split, plain)
    assert {profile for profile, *_ in said} == known.keys()
    for profile, learner, servers in said:
        assert (known[profile].gpus, number[learner] + number[servers]) == (number[learner], 4)
    (at_once,) = re.findall(r"A server holds \d+ sequences at once, so set .*? to (\d+)", plain)
    assert known["4b_lora"].numbers[-1] == float(at_once)
    refused, *_ = counted("8b_lora", "RTX4090", 1).refusals()
    (usable,) = re.findall(r"`8b_lora` needs more memory than the ([\d.]+ GiB)", plain)
    assert f"{usable} of the RTX4090 can be used" in refused.found


def test_eight_gpus_are_split_as_the_profiles_are_made() -> None:
    made = {row.profile: row.gpus for row in rows() if row.gpu == "H100"}
    pattern = r"^\| [^|]+ \| (\d) \| (\d) \| (`[^|]+`) \|$"
    split = re.findall(pattern, text(), re.MULTILINE)
    found = {name: int(gpus) for gpus, _, names in split for name in re.findall(r"`(\w+)`", names)}
    assert found == made
    assert all(int(learner) + int(servers) == 8 for learner, servers, _ in split)


@pytest.mark.parametrize("team", list(teams()), ids=str)
def test_a_whole_run_takes_the_seconds_of_the_page(
    team: Team, counted: Counted, tmp_path: Path
) -> None:
    assert team.learner_gpus + team.servers == team.gpus
    found = counted(team.profile, team.gpu, team.learner_gpus)
    (cost,) = found.costs.values()  # the first row of the table shows that B is as large as A
    both = replace(found, costs={"A": cost, "B": cost})
    shipped = load_mapping(PROFILES / f"{team.profile}.yaml")
    at_once = {"decode_batch_size": min(64, found.sequences or 0)}
    changes = {"model": {"model": str(found.config.model.model)}, "rollout_matching": at_once}
    config = parse_config(merge(shipped, changes))
    speeds = speeds_at_best(both, Speeds(server=declared_shape(config)))
    lengths = OfData(make_samples(tmp_path, 32), lengths_of_run(config))
    outcome = simulate(Setting(config, speeds, lengths, team.servers, team.learner_gpus, 50))
    assert (outcome.step_s("A"), outcome.step_s("B")) == pytest.approx(team.seconds, rel=0.03)


def test_the_page_names_every_gpu_and_each_kind_of_run() -> None:
    (named,) = re.findall(r"`--gpu` knows ([^.]+)\.", text())
    assert set(re.split(r", | and ", named)) == GPUS.keys()
    assert {(team.gpus, team.gpu) for team in teams()} == {(8, "H100"), (4, "RTX4090")}
