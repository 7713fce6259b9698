"""The arithmetic of the campaign of docs/reliability.md; what it measures is measured elsewhere."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.reliability.infer_bodies import infer_bodies
from benchmarks.reliability.samples import Held, growth
from benchmarks.reliability.suites import matches
from benchmarks.reliability.tables import held_table
from rollout_server.serving.infer import read_conversation
from shared_contracts.infer import InferCall

MINUTES = [60.0 * minute for minute in range(61)]


def test_growth_is_that_of_a_line_after_the_warm_up() -> None:
    values = [100.0 if minute < 15 else 200.0 + (minute - 15) for minute in range(61)]
    grown = growth(MINUTES, values)
    assert (grown.first, grown.last) == (205.0, 240.0)
    assert grown.slope_percent == pytest.approx(100 * 45 / 200)
    assert grown.medians_percent == pytest.approx(100 * 35 / 205)


def test_what_stays_has_not_grown() -> None:
    grown = growth(MINUTES, [7.0] * 61)
    assert grown.slope_percent == pytest.approx(0.0)
    assert grown.medians_percent == 0.0


def held(**more: float) -> Held:
    fields = {"rss_mib": 100.0, "pss_mib": 50.0, "threads": 4, "sockets": 2, "other_files": 9}
    return Held(**fields | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "faults"),
    [
        ({"a": held()}, {"a": held(rss_mib=101.9, sockets=1)}, []),
        ({"a": held()}, {"a": held(rss_mib=103.0)}, ["a grew by 3.00 %"]),
        ({"a": held()}, {"a": held(other_files=10)}, ["a has more other_files: 9 -> 10"]),
        ({"a": held()}, {}, ["a was there only once"]),
    ],
)
def test_what_is_more_the_second_time_is_a_fault(
    before: dict[str, Held], after: dict[str, Held], faults: list[str]
) -> None:
    found: list[str] = []
    held_table(before, after, found)
    assert found == faults


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_made_bodies_are_valid(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    media = tmp_path_factory.mktemp("media")
    call = InferCall.model_validate(data.draw(infer_bodies(media)))
    for request in call.infer_requests:
        assert len(read_conversation(request).sources) == len(request.images)


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("unit/test_a.py", True),
        ("unit/test_a.py::killed", True),
        ("unit/test_a.py::left", False),
        ("unit/test_b.py::killed", False),
    ],
)
def test_a_row_of_faults_finds_its_tests(test: str, found: bool) -> None:
    assert matches(test, "unit/test_a.py::test_who_is_killed[left]") == found
