"""Several ranks as threads of one process, over a store in memory."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from learner.distributed.peers import Peers, StorePeers

T = TypeVar("T")


def in_ranks(count: int, work: Callable[[Peers], T]) -> list[Future[T]]:
    """What `work` returned or raised in each rank."""
    from torch.distributed import HashStore  # a second, which runs of one rank can do without

    store = HashStore()

    def run(rank: int) -> T:
        return work(StorePeers(rank, count, lambda: store, end=lambda code: None))

    with ThreadPoolExecutor(count) as ranks:
        return [ranks.submit(run, rank) for rank in range(count)]
