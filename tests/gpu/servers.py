"""Options of the servers that tests start on GPUs; `tests/rehearsal` starts them without any."""

SMALL_PART = ("--gpu-memory-utilization", "0.2")
ON_0 = ("--gpus", "0", *SMALL_PART)
OF_TWO_WORKERS = ("--gpus", "0,1", "--tensor-parallel-size", "2", *SMALL_PART)
SHARED_0 = (*ON_0, "--share-gpus")
# Of the GPU, what a server has that sleeps while a learner trains.
FRACTION = 0.4
SLEEPS = ("--gpus", "0", "--share-gpus", "--gpu-memory-utilization", str(FRACTION))
LORA = ("--enable-lora", "--max-lora-rank", "8")


def over(transport: str) -> tuple[str, str]:
    return ("--weight-transport", transport)


# Every set of them, by what it is for.
STARTED = {
    "a push over NCCL": (*ON_0, *over("nccl")),
    "a push over IPC": (*SHARED_0, *over("ipc")),
    "a push to two workers": (*OF_TWO_WORKERS, *over("nccl")),
    "loaded": ON_0,
    "loaded by two workers": OF_TWO_WORKERS,
    "an adapter": (*SHARED_0, *LORA, *over("ipc")),
    "sleep": (*SLEEPS, *over("ipc")),
    "sleep with an adapter": (*SLEEPS, *LORA, *over("ipc")),
}
