"""Adapters are pushed until the first failure of such a push, full weights afterwards."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from learner.rollout.sync.weights import SyncMode
from shared_contracts.errors import ContractError

pytestmark = pytest.mark.req("SYNC-01")


FULL, ADAPTER = cast(Any, "full weights"), cast(Any, "an adapter")


def test_without_fallback_a_failure_is_raised_with_a_remedy() -> None:
    mode = SyncMode(FULL, ADAPTER, fallback_to_full=False)
    with pytest.raises(ContractError, match="RuntimeError: rank 64 is too large") as caught:
        mode.adapter_failed(RuntimeError("rank 64 is too large"))
    assert caught.value.where == "rollout_matching.vllm.sync.mode"
    assert "fallback_to_full" in caught.value.do
    assert mode.state() == ("adapter", None)


def test_adapters_that_fail_together_switch_to_full_weights_together_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = 16
    mode, together = SyncMode(FULL, ADAPTER, fallback_to_full=True), Barrier(servers)
    assert (mode.adapter, mode.state()) == (ADAPTER, ("adapter", None))

    def fail(number: int) -> object:
        together.wait()
        mode.adapter_failed(RuntimeError(f"server {number}"))
        return mode.adapter

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(servers) as threads:
        assert set(threads.map(fail, range(servers))) == {None}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(mode.fallback).startswith("RuntimeError: server ")
    assert str(mode.fallback) in caplog.text


def test_the_sources_of_a_model() -> None:
    plain, layers = nn.Sequential(nn.Linear(4, 4)), cast(Any, nn.Sequential(nn.Linear(4, 4)))
    adapted = get_peft_model(layers, LoraConfig(target_modules=["0"]))
    assert {SyncMode.of(m, "full", True).adapter for m in (plain, adapted)} == {None}
    assert SyncMode.of(adapted, "adapter", True).state() == ("adapter", None)
    with pytest.raises(ContractError, match="tuner"):
        SyncMode.of(plain, "adapter", True)
