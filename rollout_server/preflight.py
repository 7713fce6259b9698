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
    """Raises ContractError for a model or a GPU that is not there."""
    check_checkpoint(settings.model)
    for directory in settings.allowed_media_dirs:
        if not directory.is_dir():
            raise ContractError(
                "allowed_media_dirs", f"{directory} is no directory", "Name existing directories"
            )
    if settings.device == "gpu":
        check_gpus(settings.gpus)


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
