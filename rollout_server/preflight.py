"""What can be known to fail before anything expensive starts (SRV-04)."""

import errno
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from rollout_server.settings import ServerSettings
from shared_contracts.errors import ContractError

GPU_DEVICES = Path("/proc/driver/nvidia/gpus")


def check_settings(settings: ServerSettings) -> None:
    """Raises ContractError for a model, a GPU or memory that is not there."""
    check_checkpoint(settings.model)
    for directory in settings.allowed_media_dirs:
        if not directory.is_dir():
            raise ContractError(
                "allowed_media_dirs", f"{directory} is no directory", "Name existing directories"
            )
    if settings.device == "gpu":
        check_gpus(settings.gpus)
    else:
        check_memory(settings.kv_cache_gib * settings.num_replicas)


def check_checkpoint(model: Path) -> None:
    """A checkpoint has a readable config.json that names an architecture, and weights."""
    if not model.is_dir():
        raise ContractError(
            "model", f"there is no directory {model}", "Name a checkpoint directory"
        )
    config = model / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(
            "model", f"{config} cannot be read ({error})", "Name a checkpoint directory"
        ) from None
    if not isinstance(content, dict) or not content.get("architectures"):
        raise ContractError(
            "model", f"{config} names no architecture", "Name a checkpoint of a model class"
        )
    if not any(model.glob("*.safetensors")):
        raise ContractError(
            "model", f"{model} holds no *.safetensors file", "Save the weights as safetensors"
        )


def check_gpus(gpus: Sequence[int]) -> None:
    present = len(list(GPU_DEVICES.iterdir())) if GPU_DEVICES.is_dir() else 0
    missing = [gpu for gpu in gpus if gpu >= present or gpu < 0]
    if missing:
        raise ContractError(
            "gpus",
            f"GPU {missing[0]} is not there: this machine has {present}",
            "Name GPUs it has, or use --device cpu",
        )


def check_memory(kv_cache_gib: float) -> None:
    """The KV caches of all replicas must fit into the memory that is free now."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    free_gib = int(available) / 2**20
    if kv_cache_gib > free_gib:
        raise ContractError(
            "kv_cache_gib",
            f"the KV caches take {kv_cache_gib:g} GiB and {free_gib:.1f} GiB are free",
            "Lower kv_cache_gib or replicas",
        )


def bind(host: str, port: int) -> socket.socket:
    """Take the port now, so that nobody waits for a model to learn that it is busy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, socket.gaierror) as error:
        listener.close()
        busy = error.errno == errno.EADDRINUSE
        raise ContractError(
            f"--host {host} --port {port}",
            "the port is in use" if busy else f"cannot be bound ({error.strerror})",
            "Stop what listens there or give another --port"
            if busy
            else "Give an address and a port of this machine",
        ) from None
    return listener
