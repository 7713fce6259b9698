"""Adapters are pushed until the first failure of such a push, full weights afterwards."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from learner.rollout.sync.weights import (
    AdapterWeights,
    MergedWeights,
    SyncMode,
)
from shared_contracts.errors import ContractError

pytestmark = pytest.mark.req("SYNC-01")


FULL, ADAPTER = cast(Any, "full weights"), cast(Any, "an adapter")


def test_without_fallback_the_first_failure_is_raised_with_a_remedy() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=False)
    for error in ("rank 64 is too large", "a later one"):
        with pytest.raises(ContractError, match="RuntimeError: rank 64 is too large") as caught:
            mode.failed(ADAPTER, RuntimeError(error))
        assert caught.value.where == "rollout_matching.vllm.sync.mode"
        assert "fallback_to_full" in caught.value.do
    assert (mode.mode, mode.fallback) == ("adapter", None)


def test_adapters_that_fail_together_switch_to_full_weights_together_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = 16
    mode, together = SyncMode(FULL, ADAPTER, fallback_to_full=True), Barrier(servers)
    assert mode.failed(FULL, RuntimeError("not of the adapter")) is False
    assert (mode.current(), mode.mode, mode.fallback) == (ADAPTER, "adapter", None)

    def fail(number: int) -> bool:
        together.wait()
        again = mode.failed(ADAPTER, RuntimeError(f"server {number}"))
        return again and mode.current() is FULL

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(servers) as threads:
        assert all(threads.map(fail, range(servers)))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(mode.fallback).startswith("RuntimeError: server ")
    assert str(mode.fallback) in caplog.text


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
