"""Which GPUs serve and which train, as a person gave them to `learner launch`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.gpu_use import CUDA_VISIBLE

SERVER_GPUS, TRAIN_GPUS, PROCESSES = "--server-gpus", "--train-gpus", "--train-processes"


@dataclass(frozen=True)
class Asked:
    """The options as they were given; None or empty: not at all."""

    device: str
    server_gpus: tuple[str, ...] = ()
    train_gpus: str | None = None
    train_processes: int | None = None


@dataclass(frozen=True)
class Split:
    """servers: GPU ids of each server, in the order of the config; none on the CPU.

    learner: GPU ids of the learner, one for each process; none on the CPU.
    """

    servers: tuple[tuple[int, ...], ...]
    learner: tuple[int, ...]
    processes: int

    @property
    def on_gpus(self) -> bool:
        return bool(self.learner)


def split_devices(
    asked: Asked, servers: int, tensor_parallel_size: int, visible: Sequence[int]
) -> Split:
    """The split that was asked for.

    servers: how many the config has. tensor_parallel_size: GPUs of one replica.
    visible: ids of the GPUs there are for this process.

    Raises:
        ContractErrors: everything that is wrong with it.
    """
    if asked.device == "cpu":
        errors = list(_beside_cpu(asked))
    elif asked.device == "gpu":
        errors = list(_on_gpus(asked, servers, tensor_parallel_size, visible))
    else:
        errors = [ContractError("--device", f"{asked.device!r}", "Give gpu or cpu")]
    if errors:
        raise ContractErrors(errors)
    if asked.device == "cpu":
        return Split(((),) * servers, (), asked.train_processes or 1)
    learner = _ids(asked.train_gpus)
    return Split(tuple(map(_ids, asked.server_gpus)), learner, len(learner))


def learner_count(asked: Asked) -> int:
    """How many learner processes are meant, as far as can be told of a split with faults."""
    if asked.device == "cpu":
        return max(asked.train_processes or 1, 1)
    return len(_ids(asked.train_gpus)) if _is_list(asked.train_gpus) else 1


def _beside_cpu(asked: Asked) -> Iterator[ContractError]:
    for option, given in ((SERVER_GPUS, asked.server_gpus), (TRAIN_GPUS, asked.train_gpus)):
        if given:
            shown = given if isinstance(given, str) else " and ".join(given)
            yield ContractError(option, f"{shown}, and --device is cpu", "Give one of the two")
    if asked.train_processes is not None and asked.train_processes < 1:
        yield ContractError(PROCESSES, f"{asked.train_processes}", "Give 1 or more")


def _on_gpus(
    asked: Asked, servers: int, tensor_parallel_size: int, visible: Sequence[int]
) -> Iterator[ContractError]:
    if asked.train_processes is not None:
        yield ContractError(
            PROCESSES,
            f"{asked.train_processes}, and on GPUs each of {TRAIN_GPUS} has one process",
            "Leave it out, or give --device cpu",
        )
    yield from _server_count(asked, servers)
    lists = [(SERVER_GPUS, text) for text in asked.server_gpus]
    lists += [(TRAIN_GPUS, asked.train_gpus)] if asked.train_gpus is not None else []
    if asked.train_gpus is None:
        do = "Name the GPUs of the learner, as in 3 or 2,3; or give --device cpu"
        yield ContractError(TRAIN_GPUS, "not given", do)
    for option, text in lists:
        if not _is_list(text):
            yield ContractError(option, f"{text!r} is no list of GPU ids", "Write it like 0,1,2")
    good = [(option, _ids(text)) for option, text in lists if _is_list(text)]
    yield from _double(good)
    yield from _absent(good, visible)
    for option, ids in good:
        if option == SERVER_GPUS and len(ids) % tensor_parallel_size:
            yield ContractError(
                option,
                f"{len(ids)} GPUs ({_shown(ids)}) do not split into replicas of "
                f"tensor_parallel_size {tensor_parallel_size}",
                f"Give a multiple of {tensor_parallel_size}",
            )


def _server_count(asked: Asked, servers: int) -> Iterator[ContractError]:
    given = len(asked.server_gpus)
    if given == servers:
        return
    found = "not given" if not given else f"given {given} times"
    if servers == 1:
        do = "Give it once, with all GPUs of the server, as in 0,1,2; or give --device cpu"
    else:
        do = f"Give it {servers} times, in the order of the servers, as in {SERVER_GPUS} 0,1"
    config = "rollout_matching.vllm.server.servers"
    plural = "server" if servers == 1 else "servers"
    yield ContractError(SERVER_GPUS, f"{found}, and {config} has {servers} {plural}", do)


def _double(lists: Sequence[tuple[str, Sequence[int]]]) -> Iterator[ContractError]:
    """Every GPU belongs to one server, or to one process of the learner."""
    uses = Counter(gpu for _, ids in lists for gpu in ids)
    for gpu, count in sorted(uses.items()):
        if count > 1:
            places = " and ".join(f"{option} {_shown(ids)}" for option, ids in lists if gpu in ids)
            where = SERVER_GPUS if SERVER_GPUS in places else TRAIN_GPUS
            yield ContractError(
                where, f"GPU {gpu} is named {count} times: {places}", "Name every GPU once"
            )


def _absent(
    lists: Sequence[tuple[str, Sequence[int]]], visible: Sequence[int]
) -> Iterator[ContractError]:
    if lists and not visible:
        found = f"gpu, and no GPU is here that {CUDA_VISIBLE} does not hide"
        yield ContractError("--device", found, "Give cpu, or start it on a machine with GPUs")
        return
    for option, ids in lists:
        if missing := sorted(set(ids) - set(visible)):
            yield ContractError(
                option,
                f"no GPU {_shown(missing)} here, there are {_shown(visible)}",
                f"Name GPUs that this machine has and {CUDA_VISIBLE} does not hide",
            )


def _is_list(text: str | None) -> bool:
    return text is not None and all(part.strip().isdecimal() for part in text.split(","))


def _ids(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text is not None else ()


def _shown(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
