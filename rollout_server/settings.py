"""The server's settings in one typed class: YAML keys, and options but for those of the guard."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from rollout_server.repeat_config import INJECTION, repeat_config_from_environment
from rollout_server.run_config import RunConfig, read_run_config
from rollout_server.yaml_file import read_yaml
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.rollout_config import RepeatTerminate
from shared_contracts.strict_model import Refusal, StrictModel, contract_errors
from shared_contracts.weights import Transport

Device = Literal["cpu", "gpu"]
AnyPath = Annotated[Path, Field(strict=False)]

# The ranks vLLM has room for; an adapter takes the next one.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class ServerSettings(StrictModel):
    """What `rollout-server serve` can be told.

    model: checkpoint directory.
    gpus: physical GPU ids; each replica takes `tensor_parallel_size` of them in order.
    replicas: engines on the CPU, or in a Ray cluster; on GPUs it follows from `gpus`.
    distributed_executor_backend: how the workers of one replica are run; null is vLLM's
        choice on this machine, `ray` takes GPUs of a Ray cluster, on several nodes.
    share_gpus: start although other processes hold memory of the GPUs.
    dtype: auto is the checkpoint's own on the CPU; vLLM makes bfloat16 of float32 on GPUs.
    max_num_seqs: most sequences decoded at once per replica (`decode_batch_size`).
    max_num_batched_tokens: most tokens in one forward; null means enough for a full
        context, and on the CPU for several prompts.
    kv_cache_gib: size of the KV cache of one CPU replica.
    max_images_per_request: images one conversation may hold.
    allowed_media_dirs: the only directories local image paths may point into.
    allow_media_urls: fetch images by http(s) URL, from public addresses only.
    allowed_media_hosts: hosts that may be fetched from though their address is private.
    max_image_mib, max_image_megapixels: bounds of one image, as sent and decoded.
    token_file: file of the token calls must carry; ROLLOUT_SERVER_TOKEN says it as well.
    max_body_mib: bound of one HTTP body.
    max_requests_per_call, max_concurrent_calls: bounds of `/infer/`.
    repeat_terminate: when a sequence that repeats itself is ended.
    enable_lora: a LoRA adapter may be pushed instead of full weights; answers take longer
        with it, whatever was pushed.
    max_lora_rank: the largest rank of such an adapter, one of LORA_RANKS.
    weight_transport: null means `gloo` on the CPU and `nccl` on GPUs; `ipc` is for a learner on
        the same machine, on GPUs on the same GPU.
    grace_seconds: how long running calls may take to finish after SIGTERM.
    hang_seconds: an engine that gives no sign of life for so long is killed and rebuilt.
    seed: of the engine, for requests that bring none.
    parent_pid: the process that started the server; it stops when that one ends.
    """

    model: AnyPath
    device: Device = "gpu"
    gpus: tuple[int, ...] = Field(default=(), strict=False)
    replicas: int | None = Field(default=None, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    share_gpus: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    enable_prefix_caching: bool = True
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    max_images_per_request: int = Field(default=16, ge=1)
    allowed_media_dirs: tuple[AnyPath, ...] = Field(default=(), strict=False)
    allow_media_urls: bool = False
    allowed_media_hosts: tuple[str, ...] = Field(default=(), strict=False)
    max_image_mib: float = Field(default=32.0, gt=0.0)
    max_image_megapixels: float = Field(default=64.0, gt=0.0)
    token_file: AnyPath | None = None
    max_body_mib: float = Field(default=256.0, gt=0.0)
    max_requests_per_call: int = Field(default=4096, ge=1)
    max_concurrent_calls: int = Field(default=64, ge=1)
    repeat_terminate: RepeatTerminate = RepeatTerminateConfig()
    enable_lora: bool = False
    max_lora_rank: int = 16
    weight_transport: Transport | None = None
    grace_seconds: float = Field(default=10.0, ge=0.0)
    hang_seconds: float = Field(default=60.0, gt=0.0)
    seed: int = Field(default=0, ge=0)
    parent_pid: int | None = Field(default=None, ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @field_validator("max_lora_rank")
    @classmethod
    def _is_a_rank_of_vllm(cls, rank: int) -> int:
        if rank not in LORA_RANKS:
            raise Refusal(f"{rank}", f"Use one of {', '.join(map(str, LORA_RANKS))}")
        return rank

    @model_validator(mode="after")
    def _devices_fit(self) -> "ServerSettings":
        if self.device == "gpu":
            self._check_gpus()
            return self
        if self.gpus:
            raise Refusal("GPUs are given, but device is cpu", "Leave them out", "gpus")
        if self.weight_transport == "nccl":
            raise Refusal("nccl needs GPUs, and device is cpu", "Use gloo", "weight_transport")
        if self.distributed_executor_backend == "ray":
            raise Refusal("device is cpu", "Leave it out", "distributed_executor_backend")
        return self

    def _check_gpus(self) -> None:
        if self.distributed_executor_backend == "ray":
            if self.gpus:
                raise Refusal("Ray places the replicas", "Give replicas instead", "gpus")
            return
        if not self.gpus:
            raise Refusal("none given", "Name them (0,1,2), or set device to cpu", "gpus")
        if len(set(self.gpus)) != len(self.gpus):
            raise Refusal(f"{list(self.gpus)} names one twice", "Name each GPU once", "gpus")
        if len(self.gpus) % self.tensor_parallel_size:
            raise Refusal(
                f"{len(self.gpus)} GPUs do not split into groups of {self.tensor_parallel_size}",
                "Give a multiple of tensor_parallel_size",
                "gpus",
            )
        if self.replicas is not None:
            raise Refusal("follows from gpus on GPUs", "Leave it out", "replicas")

    @property
    def num_replicas(self) -> int:
        if self.device == "cpu" or self.distributed_executor_backend == "ray":
            return self.replicas or 1
        return len(self.gpus) // self.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        """Engine workers over all replicas: the world size the learner counts with."""
        return self.num_replicas * self.tensor_parallel_size

    @property
    def transport(self) -> Transport:
        return self.weight_transport or ("gloo" if self.device == "cpu" else "nccl")

    def gpus_of(self, replica: int) -> list[int]:
        size = self.tensor_parallel_size
        return list(self.gpus[replica * size : (replica + 1) * size])


def load_settings(
    config: Path | None,
    options: dict[str, Any],
    run_config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerSettings:
    """Command-line options over a YAML file of settings over a training YAML, validated.

    The environment may bring the repeat guard's settings too; it must not contradict.
    Raises ContractErrors naming every bad field.
    """
    from_file = read_yaml(config, "--config") if config is not None else {}
    given = from_file | {name: value for name, value in options.items() if value is not None}
    if run_config is not None:
        given = _settings_of_run(read_run_config(run_config), given) | given
    environment = repeat_config_from_environment(environ)
    if environment is not None:
        given = {"repeat_terminate": environment} | given
    try:
        settings = ServerSettings.model_validate(given)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, ServerSettings)) from None
    if environment is not None and environment != settings.repeat_terminate:
        source = "--config" if "repeat_terminate" in from_file else "--run-config"
        raise _contradiction(environment, settings.repeat_terminate, source)
    return settings


def _settings_of_run(run: RunConfig, given: dict[str, Any]) -> dict[str, Any]:
    """What a training YAML says to a server whose other settings are `given`."""
    gpus = given.get("tensor_parallel_size")
    vllm, transport = run.rollout.vllm, run.rollout.vllm.sync.transport
    settings = {
        "max_num_seqs": run.rollout.decode_batch_size * (gpus if isinstance(gpus, int) else 1),
        "repeat_terminate": run.rollout.repeat_terminate,
        "weight_transport": None if transport == "auto" else transport,
        "max_model_len": vllm.max_model_len,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_lora": vllm.enable_lora,
    }
    if vllm.enable_lora and run.lora_rank is not None and "max_lora_rank" not in given:
        settings["max_lora_rank"] = _room_for(run.lora_rank)
    return settings


def _room_for(lora_rank: int) -> int:
    for rank in LORA_RANKS:
        if rank >= lora_rank:
            return rank
    raise ContractError(
        "tuner.lora_rank",
        f"is {lora_rank}, and vLLM serves adapters up to rank {LORA_RANKS[-1]}",
        "Lower it, or set rollout_matching.vllm.enable_lora to false",
    )


def _contradiction(
    environment: RepeatTerminateConfig, settings: RepeatTerminateConfig, source: str
) -> ContractError:
    return ContractError(
        INJECTION,
        f"with it the environment says {environment.model_dump_json()}, but {source} says "
        f"{settings.model_dump_json()}",
        "Unset it, or say the same in both",
    )
