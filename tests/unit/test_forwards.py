"""Ranks with different packs run the same forwards; threads are the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner.forwards import Forwards, PlainEngine
from learner.losses.supervision import Supervision
from learner.metrics import PhaseClock
from learner.model.packed_forward import Pack
from learner.packing import Chunk
from learner.peers import ALONE, Peers
from tests.unit.ranks_in_threads import in_ranks

# Per rank, per chunk: the samples of each of its packs.
Chunks = list[list[int]]
# Every example has threads that talk to each other.
FEWER = settings(max_examples=settings().max_examples // 5)


def pack(samples: int, name: str = "own") -> Pack:
    none = torch.zeros(0)
    nothing = Supervision(none, none, none, none, none, none)
    return Pack([name] * samples, none, none, none, None, None, nothing)


@dataclass
class Ran:
    """What one rank ran. forwards: (name, samples, share) each; synced: by backward."""

    forwards: list[tuple[str, int, float]] = field(default_factory=list)
    synced: list[bool] = field(default_factory=list)
    loss: float = 0.0
    replays: int = 0
    gradient: float | None = None


class Recording(PlainEngine):
    """Notes which backwards would synchronize."""

    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self._syncs = True

    def backward(self, loss: Tensor) -> None:
        self._ran.synced.append(self._syncs)
        loss.backward()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        self._syncs = False
        yield
        self._syncs = True

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._unsynced()


def run(peers: Peers, chunks: Chunks) -> Ran:
    """A step whose loss is the weight, for every sample; 1 at the start."""
    ran = Ran()
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def pack_loss(pack: Pack, share: float) -> Tensor:
        ran.forwards.append((pack.sample_ids[0], len(pack.sample_ids), share))
        return share * model.weight.sum()

    samples = sum(map(sum, chunks))
    packs = (
        Chunk([pack(count) for count in chunk], number == len(chunks))
        for number, chunk in enumerate(chunks, 1)
    )
    spare: Callable[[], Pack] = lambda: pack(1, "spare")  # noqa: E731
    forwards = Forwards(
        model, Recording(ran), peers, pack_loss, spare, max(samples, 1), PhaseClock()
    )
    ran.loss = forwards.run(packs).item()
    ran.replays = forwards.replays
    ran.gradient = None if model.weight.grad is None else model.weight.grad.item()
    return ran


def runs(ranks: Sequence[Chunks]) -> list[Ran]:
    found = in_ranks(len(ranks), lambda peers: run(peers, ranks[peers.rank]))
    return [ran.result() for ran in found]


def before_the_last_chunk(ranks: Sequence[Chunks]) -> int:
    """Packs that every rank has before the last chunk of the rank with the most chunks."""
    last = max(map(len, ranks)) - 1
    return min(sum(map(len, chunks[: max(last, 0)])) for chunks in ranks)


@pytest.mark.req("DDP-02", "STEP-02")
@FEWER
@given(
    st.lists(st.lists(st.lists(st.integers(1, 3), max_size=3), max_size=4), min_size=1, max_size=3)
)
def test_every_rank_runs_as_many_forwards_and_synchronizes_once_in_the_last(
    ranks: list[Chunks],
) -> None:
    packs = [[count for chunk in chunks for count in chunk] for chunks in ranks]
    most = max(map(len, packs))
    # Where the last chunks are empty, all there is was run before: one more synchronizes.
    most += 0 < most == before_the_last_chunk(ranks)
    for own, ran in zip(packs, runs(ranks), strict=True):
        assert ran.synced == [False] * (most - 1) + [True] * (most > 0)
        first = ran.forwards[: len(own)]
        assert first == [("own", count, count / sum(own)) for count in own]
        replayed = ("own", own[-1], 0.0) if own else ("spare", 1, 0.0)
        assert ran.forwards[len(own) :] == [replayed] * (most - len(own))
        assert ran.replays == most - len(own)
        assert ran.loss == pytest.approx(1.0 if own else 0.0)
        assert ran.gradient == (pytest.approx(ran.loss) if most else None)


@pytest.mark.req("DDP-02")
def test_a_rank_without_packs_replays_and_where_nobody_has_any_nothing_runs() -> None:
    none, three = runs([[[]], [[1, 1, 1]]])
    assert (none.replays, none.loss, none.gradient) == (3, 0.0, 0.0)
    assert three.replays == 0
    assert three.loss == pytest.approx(1.0)
    assert [ran.forwards for ran in runs([[], [[]]])] == [[], []]


@pytest.mark.req("DDP-02", "STEP-03")
def test_packs_of_the_first_chunks_run_before_the_last_is_there() -> None:
    ran_before: list[int] = []
    ran = Ran()
    model = nn.Linear(1, 1, bias=False)

    def packs() -> Iterator[Chunk[Pack]]:
        for number in range(3):
            ran_before.append(len(ran.forwards))
            yield Chunk([pack(1), pack(1)], number == 2)

    def pack_loss(pack: Pack, share: float) -> Tensor:
        ran.forwards.append(("own", 1, share))
        return share * model.weight.sum()

    Forwards(model, Recording(ran), ALONE, pack_loss, lambda: pack(1), 6, PhaseClock()).run(packs())
    assert ran_before == [0, 2, 4]
    assert ran.synced == [False] * 5 + [True]
    assert ran.replays == 0


@pytest.mark.req("DDP-01", "DDP-02")
def test_packs_that_fail_to_come_on_one_rank_end_the_step_on_all() -> None:
    def broken(peers: Peers) -> Ran:
        def packs() -> Iterator[Chunk[Pack]]:
            yield Chunk([pack(1)], last=False)
            if peers.rank == 1:
                raise ValueError("a corrupt image")
            yield Chunk([pack(1)], last=True)

        model = nn.Linear(1, 1)
        loss: Callable[[Pack, float], Tensor] = lambda _, share: share * model.weight.sum()  # noqa: E731
        Forwards(model, PlainEngine(), peers, loss, lambda: pack(1), 2, PhaseClock()).run(packs())
        return Ran()

    zero, one = in_ranks(2, broken)
    assert isinstance(one.exception(), ValueError)
    assert str(zero.exception()) == "learner process 1 failed: ValueError: a corrupt image"
