"""The adapter is pushed until that fails, in whatever way; then full weights, for good."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast, get_args

import pytest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import DistBackendError

from learner.config.schema import SyncMode as Mode
from learner.rollout.client import ServerUnreachable
from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.weights import (
    AdapterWeights,
    MergedWeights,
    SourceChoice,
    SyncMode,
    Weights,
)
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.weights import AdapterMeta, DtypeName, ParameterMeta


class Source:
    """Weights by name only."""

    adapter: AdapterMeta | None = None
    base: Weights | None = None

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return []

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        return iter(())


FULL, ADAPTER = Source(), Source()

# What a push was seen to raise, and what none should.
FAILURES = [
    WeightSyncError("server", "http://a", "start", "rank 64 is too large"),
    ProblemError(Problem.of("adapter-refused", "DoRA", "adapter")),
    ServerUnreachable("GET /info/: connection refused"),
    RunError("the model trains embed_tokens too"),
    ContractError("x", "y", "z"),
    DistBackendError("gloo: connection closed by peer"),
    RuntimeError("CUDA error"),
    TimeoutError("no answer"),
    ConnectionResetError(104, "reset"),
    OSError(28, "disk full"),
    MemoryError("out of it"),
    ValueError("bad"),
    KeyError("lora_A"),
    AssertionError("the manifest says a, the model b"),
    StopIteration(),
    ExceptionGroup("two servers", [RuntimeError("a"), ValueError("b")]),
    asyncio.InvalidStateError("not a subclass of anything here"),
]


def kind(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize("error", FAILURES, ids=kind)
def test_any_failure_of_the_adapter_switches_to_full_for_good(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
    assert (mode.current(), mode.mode, mode.fallback) == (ADAPTER, "adapter", None)
    with caplog.at_level(logging.WARNING):
        assert mode.failed(ADAPTER, error) is True
    assert (mode.current(), mode.mode) == (FULL, "full")
    assert mode.fallback == f"{type(error).__name__}: {error}"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert type(error).__name__ in caplog.text


@pytest.mark.req("SYNC-01")
def test_only_the_first_failure_is_told_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
    with caplog.at_level(logging.WARNING):
        assert mode.failed(ADAPTER, RuntimeError("first"))
        assert mode.failed(ADAPTER, RuntimeError("second"))
    assert mode.fallback == "RuntimeError: first"
    assert len(caplog.records) == 1


@pytest.mark.req("SYNC-01")
def test_a_full_push_that_fails_is_not_tried_again() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
    assert mode.failed(FULL, RuntimeError("x")) is False
    assert (mode.mode, mode.fallback) == ("adapter", None)
    mode.failed(ADAPTER, RuntimeError("y"))
    assert mode.failed(FULL, RuntimeError("z")) is False
    only_full = SyncMode(FULL, None, fallback_to_full=True)
    assert (only_full.current(), only_full.mode) == (FULL, "full")
    assert only_full.failed(FULL, RuntimeError("x")) is False
    assert only_full.fallback is None


@pytest.mark.req("SYNC-01")
@pytest.mark.parametrize("error", FAILURES, ids=kind)
def test_without_fallback_the_first_failure_is_raised_with_what_to_do(error: Exception) -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=False)
    with pytest.raises(ContractError) as caught:
        mode.failed(ADAPTER, error)
    assert caught.value.where == "rollout_matching.vllm.sync.mode"
    assert f"{type(error).__name__}: {error}" in caught.value.found
    assert "fallback_to_full" in caught.value.do
    assert caught.value.__cause__ is error
    assert (mode.mode, mode.fallback) == ("adapter", None)
    with pytest.raises(ContractError) as again:
        mode.failed(ADAPTER, RuntimeError("a later one"))
    assert "a later one" not in again.value.found


@pytest.mark.req("SYNC-01")
def test_pushes_that_fail_at_once_switch_together_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = 16
    for _ in range(20):
        caplog.clear()
        mode = SyncMode(FULL, ADAPTER, fallback_to_full=True)
        together = Barrier(servers)

        def fail(number: int, mode: SyncMode = mode, together: Barrier = together) -> bool:
            together.wait()
            again = mode.failed(ADAPTER, RuntimeError(f"server {number}"))
            return again and mode.current() is FULL

        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(servers) as threads:
            assert all(threads.map(fail, range(servers)))
        assert len(caplog.records) == 1
        assert mode.fallback is not None
        assert mode.fallback in caplog.text


@pytest.mark.req("SYNC-01")
def test_the_sources_of_a_model() -> None:
    plain, layers = nn.Sequential(nn.Linear(4, 4)), cast(Any, nn.Sequential(nn.Linear(4, 4)))
    adapted = get_peft_model(layers, LoraConfig(target_modules=["0"]))
    assert {SyncMode.of(m, "full", True).mode for m in (plain, adapted)} == {"full"}
    choice: SourceChoice = SyncMode.of(adapted, "adapter", True)
    assert isinstance(choice.current(), AdapterWeights)
    choice.failed(choice.current(), RuntimeError("x"))
    assert isinstance(choice.current(), MergedWeights)
    with pytest.raises(ContractError, match="tuner"):
        SyncMode.of(plain, "adapter", True)
    assert get_args(Mode) == ("full", "adapter")
