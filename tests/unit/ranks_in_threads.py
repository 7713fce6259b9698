"""Several ranks as threads of one process, over gloo and a store in memory."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from learner.distributed.peers import Peers

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


def gloo_groups(store: "Store", count: int, timeout_s: float = 60.0) -> list[Any]:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # the import takes a second

    def join(rank: int) -> Any:
        timeout = timedelta(seconds=timeout_s)
        gloo: Any = ProcessGroupGloo
        return gloo(PrefixStore("group", store), rank, count, timeout)

    with ThreadPoolExecutor(count) as ranks:
        return list(ranks.map(join, range(count)))


def keep(groups: list[Any]) -> None:
    """Never delete these groups: that waits for pending collectives, with the GIL held."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def in_ranks(count: int, work: Callable[[Peers], T]) -> list[Future[T]]:
    from torch.distributed import HashStore

    from learner.distributed.process_group import GroupPeers

    store = HashStore()
    groups = gloo_groups(store, count)

    def run(rank: int) -> T:
        return work(GroupPeers(rank, count, store, groups[rank], end=lambda code: None))

    with ThreadPoolExecutor(count) as ranks:
        results = [ranks.submit(run, rank) for rank in range(count)]
    if any(result.exception() for result in results):
        keep(groups)
    return results
