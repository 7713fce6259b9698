"""Checks of settings, checkpoint, GPUs, memory and port before anything loads (SRV-04, SRV-06)."""

import errno
import importlib.util
import ipaddress
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr
from safetensors import SafetensorError, safe_open

from rollout_server.settings.options import ServerSettings
from shared_contracts.checkpoints import (
    GIB,
    MIB,
    cache_elements,
    checkpoint_chain,
    engine_share,
    text_config,
    weight_files,
)
from shared_contracts.errors import ContractError
from shared_contracts.machine import (
    CUDA_VISIBLE,
    GPU_DEVICES,
    GpuUse,
    available_ram,
    query_gpu_use,
    visible_gpus,
)
from shared_contracts.server_info import TOKEN_VARIABLE, given_token


def check_settings(settings: ServerSettings) -> ServerSettings:
    """Check settings and machine; return the settings with the GPU share of `fit_gpus`.

    Raises ContractError for a missing model, GPU, memory or token.
    """
    check_checkpoint(checkpoint_chain(settings.model, "model")[-1])
    check_cpu_build(settings)
    check_access(settings)
    check_media(settings)
    if settings.distributed_executor_backend == "ray":  # Ray places the replicas
        if importlib.util.find_spec("ray") is None:
            where = "distributed_executor_backend"
            raise ContractError(where, "ray is not installed", "Install ray, or use mp")
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


def check_checkpoint(model: Path) -> None:
    """Check that the checkpoint has weights and an architecture in config.json."""
    config, name_folder = model / "config.json", "Name a checkpoint directory"
    if not os.path.isdir(model):
        raise ContractError("model", f"there is no directory {model}", name_folder)
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = f"{config} cannot be read ({error})"
        raise ContractError("model", found, name_folder) from None
    if not isinstance(content, dict) or not content.get("architectures"):
        found = f"{config} names no architecture"
        raise ContractError("model", found, "Name a checkpoint of a model class")
    for file in weight_files(model, "model"):
        if not os.path.isfile(file):
            found = f"{file} is a broken link, or cannot be read"
            raise ContractError("model", found, "Copy the weights")


def check_cpu_build(settings: ServerSettings) -> None:
    """Check the limits of vLLM's CPU build: experts, and linear attention (Qwen3.5)."""
    if settings.device != "cpu":
        return
    text = text_config(settings.model)
    if settings.enable_lora and text.get("num_experts_per_tok"):
        found = "the model has experts, for which vLLM has no kernels with adapters on a CPU"
        raise ContractError("enable_lora", found, "Give --no-lora; full weights can be pushed")
    if "linear_attention" not in (text.get("layer_types") or ()):
        return
    folder = checkpoint_chain(settings.model, "model")[-1]
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = content.get("dtype") or content.get("torch_dtype")
    if (own if settings.dtype == "auto" else settings.dtype) != "bfloat16":
        found = "the model has linear attention, which vLLM computes in bfloat16 alone on a CPU"
        raise ContractError("dtype", found, "Give --dtype bfloat16")
    if settings.enable_prefix_caching:
        found = "the model has linear attention, whose state vLLM does not cache on a CPU"
        do = "Give --no-prefix-caching, and set rollout_matching.vllm.enable_prefix_caching: false"
        raise ContractError("enable_prefix_caching", found, do)


def read_token(settings: ServerSettings, environment: Mapping[str, str]) -> SecretStr | None:
    """Return the token of `token_file` or of the environment; raises as `given_token`."""
    token = given_token(environment, settings.token_file, refuse_empty=True)
    return None if token is None else SecretStr(token)


def check_access(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ContractError if other machines can reach the server without a token."""
    if read_token(settings, environment) is None and not is_loopback(settings.host):
        found = f"{settings.host!r} can be reached from other machines, and there is no token"
        do = f"Give --token-file or {TOKEN_VARIABLE}, or listen on 127.0.0.1"
        raise ContractError("--host", found, do)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_media(settings: ServerSettings) -> None:
    for directory in settings.allowed_media_dirs:
        if not os.path.isdir(directory):  # False without permission
            raise ContractError(
                "allowed_media_dirs", f"{directory} is no directory", "Name existing directories"
            )


def check_gpus(
    gpus: Sequence[int], environment: Mapping[str, str], devices: Path = GPU_DEVICES
) -> None:
    """Check that the driver knows every GPU, and that vLLM gives them the same ids.

    vLLM's ids are indices into `CUDA_VISIBLE_DEVICES`, if that is set.
    """
    present, value = len(visible_gpus({}, devices)), environment.get(CUDA_VISIBLE)
    if value is not None and present:
        visible = visible_gpus(environment, devices)
        if any(visible[gpu : gpu + 1] != [gpu] for gpu in gpus):
            found = f"it is {value!r}, and --gpus names GPUs of the machine"
            do = "Unset it for the server, and name the GPUs with --gpus"
            raise ContractError(CUDA_VISIBLE, found, do)
    if missing := [gpu for gpu in gpus if not 0 <= gpu < present]:
        found = f"GPU {missing[0]} is not there: this machine has {present}"
        raise ContractError("gpus", found, "Name GPUs it has, or use --device cpu")


def check_unused(gpus: Sequence[int], use: GpuUse) -> None:
    for _, found in use.faults(gpus):
        raise ContractError("gpus", found, "Stop it, name other GPUs, or give --share-gpus")


def fit_gpus(settings: ServerSettings, use: GpuUse) -> ServerSettings:
    """Return the settings with the engines' share of the smallest GPU.

    Raises ContractError, with the numbers, unless the weights and the KV cache of one sequence fit.
    """
    known = {gpu.index: gpu.total_mib * MIB for gpu in use.gpus}
    totals = [known[gpu] for gpu in settings.gpus if gpu in known]
    if not totals:
        return settings
    total, parts = min(totals), settings.tensor_parallel_size
    element = 4 if settings.dtype == "float32" else 2  # bytes; `auto` has 16 bits on GPUs
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
        token = 0.0  # vLLM reports the fault of this config
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


def weight_elements(checkpoint: Path) -> list[int]:
    """Return the number of elements of each tensor, from the headers of the safetensors files.

    Raises ContractError for a file of another format.
    """
    sizes = []
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np") as tensors:
                names = list(tensors.keys())
                sizes += [math.prod(tensors.get_slice(name).get_shape()) for name in names]
        except (OSError, SafetensorError) as error:
            found = f"{file} is no safetensors file ({error})"
            raise ContractError("model", found, "Copy the weights again") from None
    return sizes


def check_memory(settings: ServerSettings) -> None:
    """Raise ContractError unless weights and KV caches of all replicas fit into free memory."""
    checkpoint, replicas = checkpoint_chain(settings.model, "model")[-1], settings.num_replicas
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    needed, free = (weights + settings.kv_cache_gib * GIB) * replicas, available_ram()
    if free is not None and needed > free:
        found = (
            f"weights and KV caches of {replicas} replica(s) take {needed / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} GiB are free"
        )
        do = "Lower kv_cache_gib or replicas, or free memory"
        raise ContractError("kv_cache_gib", found, do)


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen before the model is loaded; raises ContractError for a busy port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, TypeError) as error:  # TypeError: a name that cannot be encoded
        listener.close()
        found = f"cannot be bound ({getattr(error, 'strerror', error)})"
        do = "Give an address and a port of this machine"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            found, do = "the port is in use", "Stop what listens there or give another --port"
        raise ContractError(f"--host {host} --port {port}", found, do) from None
    return listener
