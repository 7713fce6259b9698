"""The process group of a run: one process, or as many as torchrun has started (DDP-01).

Gradients go over NCCL between GPUs and over gloo between CPUs; everything else over a store
of its own, which rank 0 holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import TCPStore

from learner.distributed.peers import SINGLE_PROCESS, Peers, StorePeers
from shared_contracts.errors import ContractError, RunError

# Of one collective. It is long, as processes wait for each other in the store before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_CONNECT_S = 60.0
# In what the transports of collectives raise.
_TRANSPORTS = ("gloo", "NCCL")


@contextmanager
def open_peers(processes: int) -> Iterator[Peers]:
    """Join the other learner processes; what one of them raises ends all of them.

    processes: as torchrun says.

    Raises ContractError where nobody has told this process how to find the others.
    """
    if processes == 1:
        yield SINGLE_PROCESS
        return
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ContractError(
            "WORLD_SIZE",
            f"says {processes} learner processes, and {', '.join(missing)} are not set",
            "Start the learner with torchrun, or unset WORLD_SIZE",
        )
    cpu = not torch.cuda.is_available()
    # On GPUs some state of a sharded model is gathered on the CPU.
    backend = "gloo" if cpu else "cuda:nccl,cpu:gloo"
    PartialState(cpu=cpu, backend=backend, timeout=COLLECTIVE_TIMEOUT)
    with _connected().guarded() as peers, _connections_told():
        yield peers
    dist.destroy_process_group()


@contextmanager
def _connections_told() -> Iterator[None]:
    """Tell in words what gloo and NCCL say when a process they wait for is gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(name in str(error) for name in _TRANSPORTS):
            (reason, *_) = str(error).splitlines()
            raise RunError(f"a learner process is gone, the connection broke: {reason}") from error
        raise


def _connected() -> StorePeers:
    rank, count = dist.get_rank(), dist.get_world_size()
    host = os.environ["MASTER_ADDR"]
    held = _store(host, 0, is_master=True) if rank == 0 else None
    told: list[int] = [0 if held is None else held.port]
    dist.broadcast_object_list(told, src=0)
    (port,) = told
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return StorePeers(
        rank, count, lambda: _store(host, port, is_master=False), launcher=launcher, held=held
    )


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
