"""Parts of parameters, read back from several workers, put together and compared."""

import pytest

from rollout_server.engines.verification import Difference, RawPart, differ, differences
from shared_contracts.digests import written
from shared_contracts.weights import ParameterDigest, ParameterMeta

PARAMETERS = {"a": ParameterMeta(name="a", dtype="float32", shape=[4, 3])}
DIGEST = ParameterDigest(name="a", digest=written(10))


def part(row: int, rows: int, subtotal: int, module: str = "m") -> RawPart:
    return (module, row, 0, rows, 3, subtotal)


def compared(*workers: list[RawPart]) -> list[Difference]:
    return differences(1, [DIGEST], PARAMETERS, [[parts] for parts in workers])


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    "workers",
    [
        [[part(0, 4, 10)]],
        [[part(0, 2, 4)], [part(2, 2, 6)]],
        [[part(0, 2, 4), part(2, 2, 6)]],
        [[part(0, 4, 10)], [part(0, 4, 10)]],
        [[part(0, 4, 10), part(0, 4, 10, "head")]],
        [[part(0, 2, 2**64 - 5)], [part(2, 2, 15)]],
    ],
    ids=["whole", "shards", "fused", "replicated", "tied", "wraps around"],
)
def test_parts_that_make_up_what_was_sent(workers: list[list[RawPart]]) -> None:
    assert compared(*workers) == []


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    ("workers", "detail"),
    [
        ([[part(0, 4, 11)]], f"{written(10)} was sent, {written(11)} is held"),
        ([[part(0, 2, 10)]], "6 of its 12 elements can be read back"),
        ([[]], "0 of its 12 elements can be read back"),
        ([[part(0, 4, 10)], [part(0, 4, 9)]], "the copies of it differ (m)"),
        (
            [[part(0, 4, 10, "embed"), part(0, 4, 9, "head")]],
            "the copies of it differ (embed and head)",
        ),
    ],
)
def test_parts_that_do_not(workers: list[list[RawPart]], detail: str) -> None:
    assert compared(*workers) == [Difference(1, "a", detail)]


@pytest.mark.req("SYNC-06")
def test_a_problem_names_the_replica_the_phase_and_each_parameter() -> None:
    found = [Difference(2, f"p{i}", "d") for i in range(100)]
    problem = differ(found, 300, "verify at 127.0.0.1:1").problem
    assert (problem.kind, problem.where) == ("weights-differ", "verify at 127.0.0.1:1")
    assert "replica 2" in problem.detail
    assert "p0" in problem.detail
    assert "100 difference(s), 300 parameter(s)" in problem.detail
    assert problem.errors is not None
    assert [each["where"] for each in problem.errors] == [f"p{i}" for i in range(32)]
