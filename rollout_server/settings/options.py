"""The server's settings in one class, from options, YAML and a training YAML (CFG-09, REP-04).

`--run-config` reads these keys of a training YAML; what else is in it is the learner's to check.

    rollout_matching.decode_batch_size    per GPU; `max_num_seqs` is per replica
    rollout_matching.repeat_terminate     repeat_terminate, with custom.answer_format
    rollout_matching.vllm.sync.transport  weight_transport, unless it is `auto`
    rollout_matching.vllm.max_model_len, enable_prefix_caching, enable_lora
    rollout_matching.max_new_tokens       with global_max_length: max_model_len, unless stated
    tuner.lora_rank                       with enable_lora: max_lora_rank, rounded up
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from rollout_server.settings.repeat_config import INJECTION, repeat_config_from_environment
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain, written_path
from shared_contracts.footprint import run_context
from shared_contracts.infer import MAX_REQUESTS
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, RepeatTerminateConfig
from shared_contracts.rollout_config import RepeatTerminate, SharedRolloutConfig
from shared_contracts.strict_model import Refusal, StrictModel, contract_errors, shown
from shared_contracts.weights import Transport
from shared_contracts.yaml12 import read_document

OPTION = "--run-config"
SECTION = "rollout_matching"


@dataclass(frozen=True)
class RunConfig:
    """The server's part of a training YAML.

    lora_rank: of the trained adapter; None without one.
    prompt, answer: most tokens of each, None where the YAML does not bound it. A prompt is
        shorter than the pack that it has to fit into.
    """

    rollout: SharedRolloutConfig
    lora_rank: int | None
    prompt: int | None
    answer: int | None


def read_run_config(path: Path) -> RunConfig:
    """Read the part of a training YAML that servers need, too.

    Raises ContractErrors naming every bad key of that part by its path in the file.
    """
    _, mappings = read_chain(path, partial(read_yaml, option=OPTION))
    merged = merge_chain(mappings)
    section = merged.get(SECTION)
    if not isinstance(section, dict):
        raise ContractError(
            SECTION, f"{path} has {shown(section)} there, not a mapping", "Name a training YAML"
        )
    known = {k: v for k, v in section.items() if k in SharedRolloutConfig.model_fields}
    guard, custom = known.get("repeat_terminate"), _section(merged, "custom")
    if isinstance(guard, dict) and "answer_format" in custom:
        known["repeat_terminate"] = {"answer_format": _answer_format(custom)} | guard
    try:
        rollout = SharedRolloutConfig.model_validate(known)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, SharedRolloutConfig, at=SECTION)) from None
    packed = _section(merged, "training").get("packing", True) is not False
    return RunConfig(
        rollout,
        lora_rank=_count(_section(merged, "tuner").get("lora_rank")),
        prompt=_count(merged.get("global_max_length")) if packed else None,
        answer=_count(section.get("max_new_tokens")),
    )


def _answer_format(custom: dict[str, Any]) -> str:
    name = custom["answer_format"]
    if not isinstance(name, str) or name not in ENTRY_CONTEXTS:
        known = ", ".join(ENTRY_CONTEXTS)
        raise ContractError(
            "custom.answer_format", f"{shown(name)} is not known", f"Use one of {known}"
        )
    return name


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Read the mapping of a file named by `option`; ContractError for anything else."""
    try:
        return read_document(path, yaml).mapping
    except ContractError as error:
        raise ContractError(option, f"{error.where}: {error.found}", error.do) from error


def _section(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    section = mapping.get(name)
    return section if isinstance(section, dict) else {}


def _count(value: Any) -> int | None:
    """Return a positive number; None also for a value that the learner refuses."""
    return value if type(value) is int and value > 0 else None


Device = Literal["cpu", "gpu"]
AnyPath = Annotated[Path, BeforeValidator(written_path), Field(strict=False)]

# The ranks vLLM has room for; an adapter takes the next one.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


# The decoder's own canvas, its output, the upright copy and the one in RGB: 4 bytes each.
DECODING_BYTES_PER_PIXEL = 16
# The model's processor stacks the images of a request, 3 bytes a pixel.
RENDERING_BYTES_PER_PIXEL = 4
BYTES_PER_PIXEL = DECODING_BYTES_PER_PIXEL + RENDERING_BYTES_PER_PIXEL


class ServerSettings(StrictModel):
    """The settings of `rollout-server serve`.

    model: checkpoint directory, or one of an adapter that names its base.
    gpus: physical GPU ids; each replica takes `tensor_parallel_size` of them in order.
    replicas: engines on the CPU, or in a Ray cluster; on GPUs it follows from `gpus`.
    distributed_executor_backend: how the workers of one replica are run; null is vLLM's
        choice on this machine, `ray` takes GPUs of a Ray cluster, on several nodes.
    share_gpus: start although other processes hold memory of the GPUs, and be able to give the
        own memory up for them (`/sleep/`).
    dtype: auto is the checkpoint's own on the CPU; vLLM makes bfloat16 of float32 on GPUs.
    max_num_seqs: most sequences decoded at once per replica (`decode_batch_size`).
    max_model_len: most tokens of a prompt with its answer; null means the checkpoint's own, and
        with a training YAML what its packs and answers hold.
    max_num_batched_tokens: most tokens in one forward; null means 8,192 on GPUs, and on the CPU
        enough for a full context and for several prompts.
    gpu_memory_utilization: the fraction of a GPU that an engine takes; null means 0.9, or less
        where a push needs more than the rest.
    kv_cache_gib: size of the KV cache of one CPU replica.
    max_images_per_request: images one conversation may hold.
    allowed_media_dirs: the only directories local image paths may point into.
    allow_media_urls: fetch images by http(s) URL, from public addresses only.
    allowed_media_hosts: hosts that may be fetched from though their address is private.
    max_image_mib, max_image_megapixels: bounds of one image, as sent and decoded.
    max_decoded_mib: memory for the decoded images of all calls; who finds too little waits.
    allowed_hosts: names that calls may give in `Host` to a server on loopback, beside localhost.
    token_file: file of the token calls must carry; ROLLOUT_SERVER_TOKEN says it as well.
    max_body_mib, max_bodies_mib: bounds of one HTTP body, and of those of all running calls.
    max_connections: open connections; beyond it the one that has been silent longest is closed.
    max_requests_per_call, max_concurrent_calls: bounds of `/infer/` and of chat completions.
    openai: also answer `/v1/models` and `/v1/chat/completions`.
    model_runner: of vLLM; auto is v1, and the repeat guard has a processor for either.
    repeat_terminate: when a sequence that repeats itself is ended.
    enable_lora: a LoRA adapter may be pushed instead of full weights; answers take longer
        with it, whatever was pushed.
    max_lora_rank: the largest rank of such an adapter, one of LORA_RANKS.
    weight_transport: null means `gloo` on the CPU and `nccl` on GPUs; `ipc` is for a learner on
        the same machine, on GPUs on the same GPU.
    max_weight_timeout_seconds: the longest `timeout_s` of a learner's weight group; a longer one
        is cut to it.
    grace_seconds: how long running calls may take to finish after SIGTERM.
    hang_seconds: an engine that gives no heartbeat for so long is killed and rebuilt.
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
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    enable_prefix_caching: bool = True
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    max_images_per_request: int = Field(default=16, ge=1)
    allowed_media_dirs: tuple[AnyPath, ...] = Field(default=(), strict=False)
    allow_media_urls: bool = False
    allowed_media_hosts: tuple[str, ...] = Field(default=(), strict=False)
    max_image_mib: float = Field(default=32.0, gt=0.0)
    max_image_megapixels: float = Field(default=64.0, gt=0.0)
    max_decoded_mib: float = Field(default=4096.0, gt=0.0)
    allowed_hosts: tuple[str, ...] = Field(default=(), strict=False)
    token_file: AnyPath | None = None
    max_body_mib: float = Field(default=256.0, gt=0.0)
    max_bodies_mib: float = Field(default=1024.0, gt=0.0)
    max_connections: int = Field(default=512, ge=1)
    max_requests_per_call: int = Field(default=4096, ge=1, le=MAX_REQUESTS)
    max_concurrent_calls: int = Field(default=64, ge=1)
    openai: bool = False
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    repeat_terminate: RepeatTerminate = RepeatTerminateConfig()
    enable_lora: bool = False
    max_lora_rank: int = 16
    weight_transport: Transport | None = None
    max_weight_timeout_seconds: float = Field(default=1800.0, gt=0.0)
    grace_seconds: float = Field(default=10.0, ge=0.0)
    hang_seconds: float = Field(default=60.0, gt=0.0)
    seed: int = Field(default=0, ge=0)
    parent_pid: int | None = Field(default=None, ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    _merged: Path | None = PrivateAttr(default=None)

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
        if self.model_runner == "v2":
            raise Refusal("v2 needs GPUs, and device is cpu", "Leave it out", "model_runner")
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
    def checkpoint(self) -> Path:
        """The folder that engines read: `model`, or the merged model."""
        return self._merged or self.model

    def serving(self, merged: Path) -> "ServerSettings":
        """Return the settings for an adapter as `model`, with the merged folder."""
        settings = self.model_copy()
        settings._merged = merged
        return settings

    @property
    def num_replicas(self) -> int:
        if self.device == "cpu" or self.distributed_executor_backend == "ray":
            return self.replicas or 1
        return len(self.gpus) // self.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        """The engine workers of all replicas: the world size in answers."""
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
    """Combine command-line options, a YAML file of settings and a training YAML, in this order.

    The environment can also have the settings of the repeat guard; they must agree.
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
    """Return the settings from a training YAML, for a server whose other settings are `given`."""
    gpus = given.get("tensor_parallel_size")
    vllm, transport = run.rollout.vllm, run.rollout.vllm.sync.transport
    settings = {
        "max_num_seqs": run.rollout.decode_batch_size * (gpus if isinstance(gpus, int) else 1),
        "repeat_terminate": run.rollout.repeat_terminate,
        "weight_transport": None if transport == "auto" else transport,
        "max_model_len": vllm.max_model_len or _context(run, given.get("model")),
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_lora": vllm.enable_lora,
    }
    if vllm.enable_lora and run.lora_rank is not None and "max_lora_rank" not in given:
        settings["max_lora_rank"] = _room_for(run.lora_rank)
    return settings


def _context(run: RunConfig, model: Any) -> int | None:
    """Return what the packs and answers of a run can need of this model, if that is known."""
    if run.prompt is None or run.answer is None or not isinstance(model, str | Path):
        return None
    return run_context(Path(model), run.prompt, run.answer)


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
        "Unset it, or give the same settings in both",
    )
