"""Who has the memory of a GPU that a learner and its colocated server share, without vLLM."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from learner.models.load import Offload
from learner.rollout.colocate import ColocatedBackend
from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest

# --- Room on the device -----------------------------------------------------------------


class Trained:
    """A small model after an optimizer step, with gradients of the next one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.backward()
        self.optimizer.step()
        self.backward()

    def backward(self) -> None:
        self.model(torch.arange(15.0).view(5, 3)).square().sum().backward()

    def tensors(self) -> list[torch.Tensor]:
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        gradients = [p.grad for p in self.model.parameters()]
        return [*self.model.parameters(), *self.model.buffers(), *state, *gradients]


def places(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def all_equal(one: Trained, other: Trained) -> bool:
    return all(map(torch.equal, one.tensors(), other.tensors()))


class Buffers:
    """Notes each buffer that it makes, as long as something holds it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty_like(tensor)
        self.made.append(weakref.ref(buffer))
        return buffer

    @property
    def alive(self) -> list[torch.Tensor]:
        return [buffer for made in self.made if (buffer := made()) is not None]


@pytest.mark.req("ROLL-03")
def test_what_was_moved_away_comes_back_as_it_was() -> None:
    trained, twin, buffers = Trained(), Trained(), Buffers()
    objects = [id(tensor) for tensor in trained.tensors()]
    offload = Offload(trained.model, trained.optimizer, buffers)
    with offload.room():
        assert places(trained.tensors()) == places(buffers.alive)
        assert all_equal(trained, twin), "a push sends what is in host memory"
    assert [id(tensor) for tensor in trained.tensors()] == objects
    assert all_equal(trained, twin)
    for moved, kept in zip(trained.tensors(), twin.tensors(), strict=True):
        assert (moved.dtype, moved.device) == (kept.dtype, kept.device)
    for each in (trained, twin):
        each.optimizer.step()
    assert all_equal(trained, twin)


@pytest.mark.req("ROLL-03")
def test_the_buffers_of_the_host_are_used_again_and_go_with_their_tensors() -> None:
    trained, twin, buffers = Trained(), Trained(), Buffers()
    offload = Offload(trained.model, trained.optimizer, buffers)
    seen = []
    for _ in range(3):
        with offload.room():
            seen.append(places(trained.tensors()))
            assert all_equal(trained, twin)
        assert not places(trained.tensors()) & seen[0], "a step must not change the buffers"
        for each in (trained, twin):
            each.optimizer.step()
    assert seen[0] == seen[1] == seen[2]
    assert len(buffers.made) == len(trained.tensors())
    trained.optimizer.zero_grad()
    gone = len(buffers.made) - len(buffers.alive)
    assert gone == len(list(trained.model.parameters())), "those of the gradients"


@pytest.mark.req("ROLL-03")
def test_what_is_on_the_host_stays_where_it_is() -> None:
    trained = Trained()
    before = places(trained.tensors())
    with Offload(trained.model, trained.optimizer).room():
        assert places(trained.tensors()) == before
    assert places(trained.tensors()) == before


@pytest.mark.req("ROLL-03")
def test_only_what_is_asked_for_is_moved_and_an_error_brings_it_back() -> None:
    trained = Trained()
    before = [tensor.data_ptr() for tensor in trained.tensors()]
    with Offload(None, None, torch.empty_like).room():
        assert [tensor.data_ptr() for tensor in trained.tensors()] == before
    weights = [weight.clone() for weight in trained.model.parameters()]
    with pytest.raises(RunError), Offload(trained.model, None, torch.empty_like).room():
        raise RunError("the push broke")
    assert all(map(torch.equal, trained.model.parameters(), weights))
    states = [v for s in trained.optimizer.state.values() for v in s.values()]
    assert {state.data_ptr() for state in states} <= set(before)


# --- The backend ------------------------------------------------------------------------


class Scene:
    """Notes, in order, what the backend does and has done around it.

    fails: how many rollouts fail; restarts: whether the server is started anew then. keeps: how
    many times the server cannot give its memory up.
    """

    def __init__(
        self, fails: int = 0, gone: bool = False, restarts: bool = False, keeps: int = 0
    ) -> None:
        self.told: list[str] = []
        self.keeps = keeps
        self.fails = fails
        self.gone = gone
        self.restarts = restarts
        self.starts = 1

    def await_ready(self) -> None:
        self.told.append(f"start {self.starts} is ready")

    @contextmanager
    def room(self) -> Iterator[None]:
        self.told.append("room")
        try:
            yield
        finally:
            self.told.append("restored")

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.told.append("rollout")
        if self.fails:
            self.fails -= 1
            self.starts += self.restarts
            raise RunError("nobody answers")
        return []

    def push_weights(self, version: int) -> None:
        self.told.append(f"push {version}")

    def sleep(self) -> None:
        self.told.append("sleep")
        if self.keeps:
            self.keeps -= 1
            self.starts += self.restarts
            raise RunError("its memory is stuck")

    def wake_up(self) -> None:
        self.told.append("wake up")

    def close(self) -> None:
        self.told.append("close")
        if self.fails:
            raise RunError("nobody to say goodbye to")

    def check(self) -> None:
        if self.gone:
            raise RunError("the server died too often")

    def stop(self) -> None:
        self.told.append("stop")

    @property
    def moves(self) -> list[str]:
        """All that was told, without the waiting for a start."""
        return [told for told in self.told if not told.startswith("start")]


def colocated(scene: Scene) -> ColocatedBackend:
    """As on the CPU, where the server keeps its memory."""
    return ColocatedBackend(scene, scene, scene.room)


def on_one_gpu(scene: Scene) -> ColocatedBackend:
    return ColocatedBackend(scene, scene, scene.room, scene)


@pytest.mark.req("ROLL-03")
def test_room_is_made_once_for_a_push_with_its_rollouts_and_restored_before_a_forward() -> None:
    scene = Scene()
    backend = colocated(scene)
    with backend.serving():
        backend.push_weights(3)
        backend.rollout([], RequestConfig())
    backend.rollout([], RequestConfig())
    backend.close()
    assert scene.moves == [
        *("room", "push 3", "rollout", "restored"),
        *("room", "rollout", "restored"),
        *("close", "stop"),
    ]


@pytest.mark.req("ROLL-03", "FULL-06")
def test_on_a_gpu_the_server_sleeps_while_the_learner_has_its_memory() -> None:
    """It gives the memory up before the learner takes its own back; a push wakes it, too."""
    scene = Scene()
    backend = on_one_gpu(scene)
    backend.sleep()
    for version in (1, 2):
        with backend.serving():
            backend.push_weights(version)
            backend.rollout([], RequestConfig())
            backend.rollout([], RequestConfig())
    backend.rollout([], RequestConfig())
    assert scene.moves == [
        "sleep",
        *("room", "push 1", "rollout", "rollout", "sleep", "restored"),
        *("room", "push 2", "rollout", "rollout", "sleep", "restored"),
        *("room", "wake up", "rollout", "sleep", "restored"),
    ]


@pytest.mark.req("ROLL-03")
def test_a_rollout_that_fails_says_so_and_not_that_the_server_cannot_sleep() -> None:
    scene = Scene(fails=1, keeps=1)
    with pytest.raises(RunError, match="nobody answers"):
        on_one_gpu(scene).rollout([], RequestConfig())
    assert scene.moves == ["room", "rollout", "sleep", "restored"]


@pytest.mark.req("ROLL-03")
def test_a_server_that_slept_after_a_failure_is_woken_for_the_next_rollout() -> None:
    scene = Scene(fails=1)
    backend = on_one_gpu(scene)
    with pytest.raises(RunError, match="nobody answers"):
        backend.rollout([], RequestConfig())
    backend.rollout([], RequestConfig())
    turn = ["room", "rollout", "sleep", "restored"]
    assert scene.moves == [*turn, "room", "wake up", *turn[1:]]


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize("restarts", [True, False])
def test_a_server_that_keeps_its_memory_ends_the_run_unless_it_was_restarted(
    restarts: bool,
) -> None:
    scene = Scene(keeps=1, restarts=restarts)
    ends = nullcontext() if restarts else pytest.raises(RunError, match="memory is stuck")
    with ends:
        on_one_gpu(scene).rollout([], RequestConfig())
    sleeps = ["sleep"] * (1 + restarts)
    assert scene.moves == ["room", "rollout", *sleeps, "restored"]


@pytest.mark.req("ROLL-03")
@pytest.mark.parametrize(("gone", "said"), [(True, "died too often"), (False, "nobody answers")])
def test_a_failed_rollout_says_whether_the_server_is_gone(gone: bool, said: str) -> None:
    scene = Scene(fails=1, gone=gone)
    with pytest.raises(RunError, match=said):
        colocated(scene).rollout([], RequestConfig())
    assert scene.told[-1] == "restored"


@pytest.mark.req("ROLL-03")
def test_a_rollout_that_a_new_start_broke_is_asked_again_when_it_is_ready() -> None:
    scene = Scene(fails=2, restarts=True)
    assert colocated(scene).rollout([], RequestConfig()) == []
    asked = [f"start {start} is ready" for start in (1, 2, 3)]
    assert [told for told in scene.told if told != "rollout"] == ["room", *asked, "restored"]


@pytest.mark.req("ROLL-03")
def test_the_server_is_stopped_even_when_it_cannot_be_left_in_order() -> None:
    scene = Scene(fails=1)
    with pytest.raises(RunError):
        colocated(scene).close()
    assert scene.told[-1] == "stop"
