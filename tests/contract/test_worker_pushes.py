"""Which way a worker loads a push: vLLM's loaders or the plan's copies, push after push."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from rollout_server.engines.vllm.weight_engines import GlooUpdateInfo, GlooWeightTransferEngine
from rollout_server.engines.vllm.worker_extension import WorkerExtension
from tests.contract.test_replay import Model, after_loading, assert_equal, held, weights_of
from tests.contract.weight_sender import Weights, manifest


class Direct(GlooWeightTransferEngine):
    """vLLM's engine of ours, to which `coming` comes without a group; breaks after `breaks_at`."""

    coming: Weights
    breaks_at: int | None = None

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        names = [parameter["name"] for parameter in update_info.parameters]
        for name in names[: self.breaks_at]:
            cast(Any, self.model).load_weights([(name, self.coming[name].clone())])
        if self.breaks_at is not None:
            raise RuntimeError("the learner is gone")


class BareWorker(WorkerExtension, Worker):
    """vLLM's worker with our extension, of which nothing is started but the model."""

    def __init__(self) -> None:
        self.vllm_config = VllmConfig()
        self.rank = 0
        self.model = Model()
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        self.model_config = config.model_config
        runner: Any = SimpleNamespace(get_model=lambda: self.model, reset_lora_state=lambda: None)
        self.model_runner = runner
        none: Any = None
        self.engine = Direct(none, config, torch.device("cpu"), self.model)
        self.weight_transfer_engine = self.engine
        self._weight_update_active = self._weight_update_is_draft = False

    def phase(self, name: str, **arguments: Any) -> Any:
        failure, answer = self.weight_phase(name, arguments)
        if failure is not None:
            raise RuntimeError(failure)
        return answer

    def push(self, weights: Weights, breaks_at: int | None = None) -> int:
        """A push of full weights; how many parameters have come through the loaders."""
        before = self.model.loaded
        self.engine.coming, self.engine.breaks_at = weights, breaks_at
        parameters = [each.model_dump() for each in manifest(weights)]
        assert self.phase("open_weight_update", parameters=parameters, dtype="float32") == []
        self.phase("receive_weights", transport="gloo", parameters=parameters)
        self.phase("complete_load")
        return self.model.loaded - before


COUNT = len(weights_of(0))


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker for the CPU has nothing to wait for, either."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


@pytest.mark.req("SYNC-03", "SYNC-06")
def test_the_first_push_runs_the_loaders_and_later_ones_do_not() -> None:
    worker = BareWorker()
    assert [worker.push(weights_of(seed)) for seed in range(4)] == [COUNT, 0, 0, 0]
    assert_equal(held(worker.model), after_loading(3))


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize("breaks_at", [0, 1, 4, 6, 7])
def test_after_a_push_that_broke_the_loaders_load_everything(breaks_at: int) -> None:
    """Also where it broke when all had come."""
    worker = BareWorker()
    worker.push(weights_of(0))
    with pytest.raises(RuntimeError, match="the learner is gone"):
        worker.push(weights_of(1), breaks_at)
    worker.phase("abandon_weight_update")
    assert worker.push(weights_of(2)) == COUNT
    assert_equal(held(worker.model), after_loading(2))
    assert worker.push(weights_of(3)) == 0
    assert_equal(held(worker.model), after_loading(3))


@pytest.mark.req("SYNC-05")
def test_a_first_push_that_broke_leaves_no_plan_to_replay() -> None:
    worker = BareWorker()
    with pytest.raises(RuntimeError, match="the learner is gone"):
        worker.push(weights_of(1), 4)
    worker.phase("abandon_weight_update")
    assert [worker.push(weights_of(seed)) for seed in (2, 3)] == [COUNT, 0]
    assert_equal(held(worker.model), after_loading(3))


def in_another_order(weights: Weights) -> Weights:
    return dict(reversed(weights.items()))


def under_another_name(weights: Weights) -> Weights:
    return {name.replace("embed", "head"): weight for name, weight in weights.items()}


def in_another_type(weights: Weights) -> Weights:
    return weights | {"plain.bias": weights["plain.bias"].double()}


@pytest.mark.req("SYNC-05")
@pytest.mark.parametrize("change", [in_another_order, under_another_name, in_another_type])
def test_another_manifest_has_a_plan_of_its_own(change: Any) -> None:
    worker = BareWorker()
    assert [worker.push(weights_of(seed)) for seed in (0, 1)] == [COUNT, 0]
    assert [worker.push(change(weights_of(seed))) for seed in (2, 3)] == [COUNT, 0]
    assert_equal(held(worker.model), after_loading(3))
    assert [worker.push(weights_of(seed)) for seed in (4, 5)] == [COUNT, 0]
    assert_equal(held(worker.model), after_loading(5))


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_is_refused_changes_nothing() -> None:
    worker = BareWorker()
    worker.push(weights_of(0))
    parameters = [each.model_dump() for each in manifest(weights_of(1))][:-1]
    assert worker.phase("open_weight_update", parameters=parameters, dtype="float32")
    worker.phase("abandon_weight_update")
    assert_equal(held(worker.model), after_loading(0))
    assert [worker.push(weights_of(seed)) for seed in (2, 3)] == [COUNT, 0]
    assert_equal(held(worker.model), after_loading(3))


@pytest.mark.req("SYNC-05")
def test_the_loaders_run_for_a_model_with_other_tensors() -> None:
    worker = BareWorker()
    worker.push(weights_of(0))
    plain = worker.model.plain
    plain.weight = torch.nn.Parameter(plain.weight.clone(), requires_grad=False)
    assert worker.push(weights_of(1)) == COUNT
    assert_equal(held(worker.model), after_loading(1))
    assert worker.push(weights_of(2)) == 0
    assert_equal(held(worker.model), after_loading(2))


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_what_comes_beside_the_model_is_neither_loaded_nor_replayed() -> None:
    """A trial between two pushes, and the check of an adapter's base."""
    worker = BareWorker()
    worker.push(weights_of(0))
    trial: Weights = {"plain.a": torch.ones(3, 2)}
    worker.engine.coming = trial
    parameters = [each.model_dump() for each in manifest(trial)]
    worker.phase("open_trial", parameters=parameters)
    worker.phase("receive_weights", transport="gloo", parameters=parameters)
    worker.phase("complete_load")
    assert_equal(held(worker.model), after_loading(0))
    assert worker.push(weights_of(1)) == 0
    assert_equal(held(worker.model), after_loading(1))
    parameters = [each.model_dump() for each in manifest(weights_of(2))]
    assert worker.phase("check_base", parameters=parameters, dtype="float32", asked=[])[0] == []
    assert_equal(held(worker.model), after_loading(1))
    assert [worker.push(weights_of(seed)) for seed in (2, 3)] == [COUNT, 0]
    assert_equal(held(worker.model), after_loading(3))
