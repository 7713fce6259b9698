"""Adapters are pushed until the first failure of such a push, full weights afterwards."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast, get_args

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed import DistBackendError

from learner.config.schema import SyncMode as Mode
from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.weights import (
    AdapterWeights,
    MergedWeights,
    SyncMode,
)
from shared_contracts.errors import ContractError, Problem, ProblemError

pytestmark = pytest.mark.req("SYNC-01")


FULL, ADAPTER = cast(Any, "full weights"), cast(Any, "an adapter")

# An error of each kind that a push raises.
FAILURES = [
    WeightSyncError("server", "http://a", "start", "rank 64 is too large"),
    ProblemError(Problem.of("adapter-refused", "DoRA", "adapter")),
    ContractError("x", "y", "z"),
    DistBackendError("gloo: connection closed by peer"),
    OSError(28, "disk full"),
    ExceptionGroup("two servers", [RuntimeError("a"), ValueError("b")]),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_first_failure_of_an_adapter_switches_to_full_and_warns_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
    assert (mode.current(), mode.mode, mode.fallback) == (ADAPTER, "adapter", None)
    with caplog.at_level(logging.WARNING):
        assert mode.failed(ADAPTER, error) is True
        assert mode.failed(ADAPTER, RuntimeError("a later one")) is True
    assert (mode.current(), mode.mode) == (FULL, "full")
    assert mode.fallback == f"{type(error).__name__}: {error}"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert type(error).__name__ in caplog.text


def test_a_full_push_that_fails_is_not_repeated() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
    assert mode.failed(FULL, RuntimeError("x")) is False
    assert (mode.mode, mode.fallback) == ("adapter", None)


def test_without_fallback_the_first_failure_is_raised_with_a_remedy() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=False)
    for error in (FAILURES[0], RuntimeError("a later one")):
        with pytest.raises(ContractError) as caught:
            mode.failed(ADAPTER, error)
        assert caught.value.where == "rollout_matching.vllm.sync.mode"
        assert f"{type(FAILURES[0]).__name__}: {FAILURES[0]}" in caught.value.found
        assert "fallback_to_full" in caught.value.do
    assert (mode.mode, mode.fallback) == ("adapter", None)


def test_pushes_that_fail_together_switch_together_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = 16
    mode, together = SyncMode(FULL, ADAPTER, fallback_to_full=True), Barrier(servers)

    def fail(number: int) -> bool:
        together.wait()
        again = mode.failed(ADAPTER, RuntimeError(f"server {number}"))
        return again and mode.current() is FULL

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(servers) as threads:
        assert all(threads.map(fail, range(servers)))
    assert len(caplog.records) == 1
    assert mode.fallback is not None
    assert mode.fallback in caplog.text


def test_the_sources_of_a_model() -> None:
    plain, layers = nn.Sequential(nn.Linear(4, 4)), cast(Any, nn.Sequential(nn.Linear(4, 4)))
    adapted = get_peft_model(layers, LoraConfig(target_modules=["0"]))
    assert {SyncMode.of(m, "full", True).mode for m in (plain, adapted)} == {"full"}
    choice = SyncMode.of(adapted, "adapter", True)
    assert isinstance(choice.current(), AdapterWeights)
    choice.failed(choice.current(), RuntimeError("x"))
    assert isinstance(choice.current(), MergedWeights)
    with pytest.raises(ContractError, match="tuner"):
        SyncMode.of(plain, "adapter", True)
    assert get_args(Mode) == ("full", "adapter")
