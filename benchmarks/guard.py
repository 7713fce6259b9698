from benchmarks.processes import Peer
from benchmarks.results import Result


def guard_results(peer: Peer, rounds: int) -> list[Result]:
    raise NotImplementedError
