"""Checks before anything expensive starts (SRV-04, SRV-06)."""

import errno
import importlib.util
import ipaddress
import json
import logging
import math
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr
from safetensors import SafetensorError, safe_open

from rollout_server.settings.options import BYTES_PER_PIXEL, ServerSettings
from shared_contracts.adapters import checkpoint_chain
from shared_contracts.errors import ContractError
from shared_contracts.footprint import (
    GIB,
    MIB,
    cache_elements,
    engine_share,
    text_config,
)
from shared_contracts.machine import (
    CUDA_VISIBLE,
    GPU_DEVICES,
    IDLE_MIB,
    GpuUse,
    in_gib,
    query_gpu_use,
    visible_gpus,
)
from shared_contracts.server_info import TOKEN_VARIABLE, given_token, given_token_files


def check_unused(gpus: Sequence[int], use: GpuUse) -> None:
    """Raise ContractError with the process that uses one of `gpus`, if it can be seen."""
    for gpu in use.gpus:
        if gpu.index not in gpus:
            continue
        holders = [process for process in use.processes if process.gpu_uuid == gpu.uuid]
        if holders:
            raise _occupied(f"GPU {gpu.index} is used by {' and '.join(map(str, holders))}")
        if gpu.used_mib > IDLE_MIB:
            raise _occupied(
                f"{in_gib(gpu.used_mib)} of GPU {gpu.index} are used by a process that cannot "
                "be seen from here, such as one in another container"
            )


def _occupied(found: str) -> ContractError:
    return ContractError("gpus", found, "Stop it, name other GPUs, or give --share-gpus")


logger = logging.getLogger(__name__)


def read_token(settings: ServerSettings, environment: Mapping[str, str]) -> SecretStr | None:
    """Return the token of `token_file` or of the environment; raises as `given_token`."""
    token = given_token(environment, settings.token_file, refuse_empty=True)
    return None if token is None else SecretStr(token)


def check_access(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ContractError if other machines can reach the server without a token.

    Warns of a token file that other users can read.
    """
    for path in given_token_files(environment, settings.token_file).values():
        if os.path.isfile(path) and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("other users can read the token in %s; run chmod 600 on it", path)
    if read_token(settings, environment) is None and not is_loopback(settings.host):
        raise ContractError(
            "--host",
            f"{settings.host!r} can be reached from other machines, and there is no token",
            f"Give --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Pillow takes larger images for an attack, whatever the setting says.
DECODER_MEGAPIXELS = 178.0


def check_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings, with the fraction of the GPUs that engines take (`fit_gpus`).

    Raises ContractError for a missing model, GPU, memory or token.
    """
    check_checkpoint(checkpoint_chain(settings.model, "model")[-1])
    check_access(settings)
    check_media(settings)
    if settings.distributed_executor_backend == "ray":
        check_ray()
    elif settings.device == "gpu":
        check_gpus(settings.gpus, os.environ)
        use = query_gpu_use()
        if use is not None:
            if not settings.share_gpus:
                check_unused(settings.gpus, use)
            return fit_gpus(settings, use)
    else:
        check_memory(settings)
    return settings


def fit_gpus(settings: ServerSettings, use: GpuUse) -> ServerSettings:
    """Return the settings with the fraction of the smallest GPU that engines take.

    Raises ContractError, with the numbers, where the weights and the KV cache of one sequence do
    not fit into that.
    """
    known = {gpu.index: gpu.total_mib * MIB for gpu in use.gpus}
    totals = [known[gpu] for gpu in settings.gpus if gpu in known]
    if not totals:
        return settings
    total, element, parts = min(totals), _element(settings), settings.tensor_parallel_size
    sizes = weight_elements(checkpoint_chain(settings.model, "model")[-1])
    weights = element * sum(sizes) / parts
    share = settings.gpu_memory_utilization or engine_share(total, element * max(sizes, default=0))
    found = (
        f"engines take {share:g} of a GPU of {total / GIB:.3g} GiB, which is "
        f"{share * total / GIB:.3g} GiB; the weights are {weights / GIB:.3g} GiB on each"
    )
    if weights >= share * total:
        do = "Raise gpu_memory_utilization or tensor_parallel_size, or use larger GPUs"
        raise ContractError("gpu_memory_utilization", found, do)
    text = text_config(settings.model)
    length = settings.max_model_len or text.get("max_position_embeddings")
    try:
        token = element * cache_elements(text) / parts
    except (LookupError, TypeError, ZeroDivisionError):
        token = 0.0  # vLLM will say what it makes of this config
    if isinstance(length, int) and weights + length * token > share * total:
        raise ContractError(
            "max_model_len",
            f"{found}, and the KV cache of one sequence of {length:,} tokens is "
            f"{length * token / GIB:.3g} GiB ({token / 1024:.3g} KiB a token)",
            f"Give at most {int((share * total - weights) / token):,} "
            "(rollout_matching.vllm.max_model_len, or --max-model-len), or raise "
            "gpu_memory_utilization or tensor_parallel_size",
        )
    return settings.model_copy(update={"gpu_memory_utilization": share})


def _element(settings: ServerSettings) -> int:
    """Return the bytes of a weight; vLLM makes 16 bits of float32, unless it is stated."""
    return 4 if settings.dtype == "float32" else 2


def weight_elements(checkpoint: Path) -> list[int]:
    """Return the elements of each tensor, by the headers of the safetensors files.

    Raises ContractError for a file that is none.
    """
    found = []
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np") as tensors:
                names = list(tensors.keys())
                found += [math.prod(tensors.get_slice(name).get_shape()) for name in names]
        except (OSError, SafetensorError) as error:
            raise ContractError(
                "model", f"{file} is no safetensors file ({error})", "Copy the weights again"
            ) from None
    return found


def check_media(settings: ServerSettings) -> None:
    """Check the limits of images, and that their folders exist."""
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
    needed = settings.max_image_megapixels * 10**6 * BYTES_PER_PIXEL / 2**20
    if settings.max_decoded_mib < needed:
        raise ContractError(
            "max_decoded_mib",
            f"{settings.max_decoded_mib:g} are too few for one image of max_image_megapixels",
            f"Give at least {math.ceil(needed)}, or allow smaller images",
        )


def check_ray() -> None:
    """Check that ray is installed; ray itself places the replicas on the GPUs of its cluster."""
    if importlib.util.find_spec("ray") is None:
        raise ContractError(
            "distributed_executor_backend", "ray is not installed", "Install ray, or use mp"
        )


def check_checkpoint(model: Path) -> None:
    """Check that the checkpoint has weights, and a config.json that names an architecture."""
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
                "model", f"{file} is a broken link, or cannot be read", "Copy the weights"
            )


def check_gpus(
    gpus: Sequence[int], environment: Mapping[str, str], devices: Path = GPU_DEVICES
) -> None:
    """Check that the driver knows every GPU, and that vLLM uses the same ones.

    vLLM counts among the GPUs of `CUDA_VISIBLE_DEVICES`, where that is set.
    """
    present = len(visible_gpus({}, devices))
    named = environment.get(CUDA_VISIBLE)
    if named is not None and present:
        visible = visible_gpus(environment, devices)
        if any(visible[gpu : gpu + 1] != [gpu] for gpu in gpus):
            raise ContractError(
                CUDA_VISIBLE,
                f"it is {named!r}, and --gpus names GPUs of the machine",
                "Unset it for the server, and name the GPUs with --gpus",
            )
    missing = [gpu for gpu in gpus if gpu >= present or gpu < 0]
    if missing:
        raise ContractError(
            "gpus",
            f"GPU {missing[0]} is not there: this machine has {present}",
            "Name GPUs it has, or use --device cpu",
        )


def check_memory(settings: ServerSettings) -> None:
    """Check that the weights and KV caches of all replicas fit into the free memory."""
    checkpoint = checkpoint_chain(settings.model, "model")[-1]
    weights_gib = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 2**30
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
    """Bind the port before the model is loaded, so that a busy port is reported at once."""
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
