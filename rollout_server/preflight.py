"""What can be known to fail before anything expensive starts (SRV-04)."""

import errno
import importlib.util
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_server.gpu_use import check_unused
from rollout_server.secret import check_access
from rollout_server.settings import ServerSettings
from shared_contracts.errors import ContractError
from shared_contracts.gpu_use import CUDA_VISIBLE, GPU_DEVICES, query_gpu_use

# Pillow takes larger images for an attack, whatever the setting says.
DECODER_MEGAPIXELS = 178.0


def check_settings(settings: ServerSettings) -> None:
    """Raises ContractError for a model, a GPU, memory or a token that is not there."""
    check_checkpoint(settings.model)
    check_access(settings)
    check_media(settings)
    if settings.distributed_executor_backend == "ray":
        check_ray()
    elif settings.device == "gpu":
        check_gpus(settings.gpus, os.environ)
        use = None if settings.share_gpus else query_gpu_use()
        if use is not None:
            check_unused(settings.gpus, use)
    else:
        check_memory(settings)


def check_media(settings: ServerSettings) -> None:
    """What images may be must be possible, and lie where there is something."""
    for directory in settings.allowed_media_dirs:
        if not os.path.isdir(directory):  # which is false where nobody may look
            raise ContractError(
                "allowed_media_dirs", f"{directory} is no directory", "Name existing directories"
            )
    if settings.allowed_media_hosts and not settings.allow_media_urls:
        raise ContractError(
            "allowed_media_hosts", "no URL is fetched", "Give --allow-media-urls, or leave it out"
        )
    if settings.max_image_megapixels > DECODER_MEGAPIXELS:
        raise ContractError(
            "max_image_megapixels",
            f"{settings.max_image_megapixels:g} are more than the decoder takes",
            f"Give at most {DECODER_MEGAPIXELS:g}",
        )


def check_ray() -> None:
    """Ray places the replicas on GPUs of its own cluster; here it must only be installed."""
    if importlib.util.find_spec("ray") is None:
        raise ContractError(
            "distributed_executor_backend", "ray is not installed", "Install ray, or use mp"
        )


def check_checkpoint(model: Path) -> None:
    """A checkpoint has a readable config.json that names an architecture, and weights."""
    if not os.path.isdir(model):
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
    weights = list(model.glob("*.safetensors"))
    if not weights:
        raise ContractError(
            "model", f"{model} holds no *.safetensors file", "Save the weights as safetensors"
        )
    for file in weights:
        if not os.path.isfile(file):
            raise ContractError(
                "model", f"{file} is a link to nothing, or cannot be looked at", "Copy the weights"
            )


def check_gpus(gpus: Sequence[int], environment: Mapping[str, str]) -> None:
    """The driver must know every GPU that is named, and vLLM mean the same ones.

    vLLM counts among the GPUs of `CUDA_VISIBLE_DEVICES`, where that is set.
    """
    visible = environment.get(CUDA_VISIBLE)
    if visible is not None:
        named = visible.split(",")
        if any(named[gpu : gpu + 1] != [str(gpu)] for gpu in gpus):
            raise ContractError(
                CUDA_VISIBLE,
                f"it is {visible!r}, and --gpus names GPUs of the machine",
                "Unset it for the server, and name the GPUs with --gpus",
            )
    present = len(list(GPU_DEVICES.iterdir())) if GPU_DEVICES.is_dir() else 0
    missing = [gpu for gpu in gpus if gpu >= present or gpu < 0]
    if missing:
        raise ContractError(
            "gpus",
            f"GPU {missing[0]} is not there: this machine has {present}",
            "Name GPUs it has, or use --device cpu",
        )


def check_memory(settings: ServerSettings) -> None:
    """The weights and KV caches of all replicas must fit into the memory that is free now."""
    weights_gib = sum(file.stat().st_size for file in settings.model.glob("*.safetensors")) / 2**30
    needed_gib = (weights_gib + settings.kv_cache_gib) * settings.num_replicas
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    free_gib = int(available) / 2**20
    if needed_gib > free_gib:
        raise ContractError(
            "kv_cache_gib",
            f"weights and KV caches of {settings.num_replicas} replica(s) take "
            f"{needed_gib:.1f} GiB, and {free_gib:.1f} GiB are free",
            "Lower kv_cache_gib or replicas, or free memory",
        )


def bind(host: str, port: int) -> socket.socket:
    """Take the port now, so that nobody waits for a model to learn that it is busy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, TypeError) as error:  # the latter for a name that cannot be encoded
        listener.close()
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = error.strerror if isinstance(error, OSError) else error
        raise ContractError(
            f"--host {host} --port {port}",
            "the port is in use" if busy else f"cannot be bound ({reason})",
            "Stop what listens there or give another --port"
            if busy
            else "Give an address and a port of this machine",
        ) from None
    return listener
