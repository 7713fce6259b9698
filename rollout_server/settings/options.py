"""The server's settings, each declared once: type, bounds, default and description (SRV-01).

A field is a key of `--config` and an option of `rollout-server serve`; its row of
docs/server-options.md is written by `scripts/server_reference.py`.

`--run-config` reads a part of a training YAML (CFG-09, REP-04); the learner checks all other keys:

    rollout_matching.decode_batch_size    per GPU; `max_num_seqs` is per replica
    rollout_matching.repeat_terminate     repeat_terminate, with custom.answer_format
    rollout_matching.vllm.sync.transport  weight_transport, unless it is `auto`
    rollout_matching.vllm.max_model_len, enable_prefix_caching, enable_lora
    rollout_matching.max_new_tokens       with global_max_length: max_model_len, unless stated
    tuner.lora_rank                       with enable_lora: max_lora_rank, rounded up
"""

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    refuse_switched_off,
    repeat_config_from_environment,
)
from shared_contracts.checkpoints import run_context
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.infer import MAX_REQUESTS
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, RepeatTerminateConfig
from shared_contracts.rollout_config import RepeatTerminate, SharedRolloutConfig
from shared_contracts.strict_model import Refusal, StrictModel, contract_errors, shown
from shared_contracts.weights import Transport
from shared_contracts.yaml12 import merge_chain, read_chain, read_document, written_path

# Memory of an image at 4 bytes a pixel: the decoder's canvas, its output, the upright copy, the RGB
# copy, and the copy of the model's processor.
BYTES_PER_PIXEL = 20

# The ranks of vLLM's adapter buffers.
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]

LORA_RANKS: tuple[int, ...] = get_args(LoraRank)

AnyPath = Annotated[Path, BeforeValidator(written_path), Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0)]


class ServerSettings(StrictModel):
    """The settings of `rollout-server serve`."""

    model: AnyPath = Field(description="checkpoint directory, or that of an adapter")
    device: Literal["cpu", "gpu"] = Field(default="gpu", description="where the engines run")
    gpus: tuple[int, ...] = Field(default=(), strict=False, description="GPU ids, such as 0,1,2")
    replicas: Count | None = Field(default=None, description="engines on the CPU or Ray; unset: 1")
    tensor_parallel_size: Count = Field(default=1, description="GPUs per replica")
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    """how workers are run; `ray`: on several nodes; unset: vLLM chooses"""
    share_gpus: bool = False
    """use GPUs that other processes use; `/sleep/` frees memory"""
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type of the weights; `auto` on GPUs: 16 bits"""
    max_model_len: Count | None = None
    """most tokens of a prompt and its answer; unset: run's or model's"""
    max_num_seqs: Count = Field(default=64, description="most sequences of a replica at once")
    max_num_batched_tokens: Count | None = None
    """most tokens of a forward; unset: 8192 on GPUs"""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """fraction of a GPU's memory; unset: at most 0.9"""
    enable_prefix_caching: bool = Field(default=True, description="reuse caches of equal prompts")
    kv_cache_gib: Positive = Field(default=1.0, description="KV cache of a CPU replica, GiB")
    max_images_per_request: Count = Field(default=16, description="most images of a request")
    allowed_media_dirs: tuple[AnyPath, ...] = Field(default=(), strict=False)
    """folder that image paths may point into"""
    allowed_media_hosts: Names = ()
    """host from which images are fetched by http(s) URL: `name`, or `name:port` of another port"""
    max_image_mib: Positive = Field(default=32.0, description="largest image file, MiB")
    # Pillow's own limit.
    max_image_megapixels: float = Field(default=64.0, gt=0.0, le=178.0)
    """largest decoded image"""
    max_decoded_mib: Positive = Field(default=4096.0, description="memory of decoded images, MiB")
    allowed_hosts: Names = Field(default=(), description="`Host` of calls, beside localhost")
    token_file: AnyPath | None = Field(default=None, description="file with the token of all calls")
    max_body_mib: Positive = Field(default=256.0, description="largest body of a call, MiB")
    max_requests_per_call: int = Field(default=4096, ge=1, le=MAX_REQUESTS)
    """most requests in one `/infer/` call"""
    max_concurrent_calls: Count = Field(default=64, description="most calls at once")
    openai: bool = Field(default=False, description="also serve OpenAI's chat completions")
    repeat_terminate: RepeatTerminate = RepeatTerminateConfig()
    """when a repeating sequence is ended"""
    enable_lora: bool = Field(default=False, description="accept pushes of LoRA adapters; slower")
    max_lora_rank: LoraRank = Field(default=16, description="largest rank of an adapter")
    weight_transport: Transport | None = None
    """how weights arrive; unset: `nccl` on GPUs, else `gloo`"""
    max_weight_timeout_seconds: Positive = 1800.0
    """longest deadline of a learner's push"""
    grace_seconds: float = Field(default=10.0, ge=0.0)
    """seconds for running calls after SIGTERM"""
    start_seconds: Positive = 1800.0
    """longest start of an engine, or merge of an adapter, in seconds"""
    hang_seconds: Positive = 60.0
    """seconds without a heartbeat that end an engine"""
    seed: int = Field(default=0, ge=0, description="seed of requests that have none")
    parent_pid: Count | None = Field(default=None, description="parent process to end with")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least severity of log lines"""
    log_format: Literal["text", "json"] = "text"
    """form of log lines; `json`: one object per line"""

    _merged: Path | None = PrivateAttr(default=None)

    def disagreements(self) -> Iterator[Refusal]:
        needed = math.ceil(self.max_image_megapixels * 10**6 * BYTES_PER_PIXEL / 2**20)
        if self.max_decoded_mib < needed:
            found = f"{self.max_decoded_mib:g} are too few for one image of max_image_megapixels"
            do = f"Give at least {needed}, or allow smaller images"
            yield Refusal(found, do, "max_decoded_mib")
        if self.device == "gpu":
            yield from self._of_gpus()
            return
        if self.gpus:
            yield Refusal("GPUs are given, but device is cpu", "Leave them out", "gpus")
        if self.weight_transport == "nccl":
            yield Refusal("nccl needs GPUs, and device is cpu", "Use gloo", "weight_transport")
        if self.distributed_executor_backend == "ray":
            yield Refusal("device is cpu", "Leave it out", "distributed_executor_backend")

    def _of_gpus(self) -> Iterator[Refusal]:
        if self.distributed_executor_backend == "ray":
            if self.gpus:
                yield Refusal("Ray places the replicas", "Give replicas instead", "gpus")
            return
        size = self.tensor_parallel_size
        if not self.gpus:
            yield Refusal("none given", "Name them (0,1,2), or set device to cpu", "gpus")
        elif len(set(self.gpus)) != len(self.gpus):
            yield Refusal(f"{list(self.gpus)} names one twice", "Name each GPU once", "gpus")
        elif len(self.gpus) % size:
            found = f"{len(self.gpus)} GPUs do not split into groups of {size}"
            yield Refusal(found, "Give a multiple of tensor_parallel_size", "gpus")
        if self.replicas is not None:
            yield Refusal("follows from gpus on GPUs", "Leave it out", "replicas")

    @property
    def checkpoint(self) -> Path:
        """The folder that engines load: `model`, or the merged model."""
        return self._merged or self.model

    def serving(self, merged: Path) -> "ServerSettings":
        """Return the settings with the merged checkpoint of `model`, an adapter."""
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
        """Number of engine workers of all replicas."""
        return self.num_replicas * self.tensor_parallel_size

    @property
    def transport(self) -> Transport:
        return self.weight_transport or ("gloo" if self.device == "cpu" else "nccl")

    def gpus_of(self, replica: int) -> list[int]:
        size = self.tensor_parallel_size
        return list(self.gpus[replica * size : (replica + 1) * size])


def load_settings(
    config: Path | None,
    options: Mapping[str, Any],
    run_config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerSettings:
    """Combine options, a YAML file of settings and a training YAML, in this order of precedence.

    options: by field; None: not given. Settings of the repeat guard in the environment must agree
    with the files. Raises ContractErrors with every bad field.
    """
    from_file = read_yaml(config, "--config") if config is not None else {}
    given = from_file | {name: value for name, value in options.items() if value is not None}
    if run_config is not None:
        given = run_settings(run_config, given) | given
    environment = repeat_config_from_environment(environ)
    if environment is not None:
        given = {"repeat_terminate": environment} | given
    try:
        settings = ServerSettings.model_validate(given)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, ServerSettings)) from None
    source = "--config" if "repeat_terminate" in from_file else "--run-config"
    refuse_switched_off(environ, settings.repeat_terminate, source)
    if environment is not None and environment != settings.repeat_terminate:
        raise ContractError(
            CONFIG_JSON,
            f"the environment has {environment.model_dump_json()}, and {source} has "
            f"{settings.repeat_terminate.model_dump_json()}",
            "Unset it, or give the same settings in both",
        )
    return settings


OPTION = "--run-config"
SECTION = "rollout_matching"


def _vllm_rank(lora_rank: int) -> int:
    """Return the smallest of LORA_RANKS that is at least `lora_rank`."""
    for rank in LORA_RANKS:
        if rank >= lora_rank:
            return rank
    found = f"is {lora_rank}, and vLLM serves adapters up to rank {LORA_RANKS[-1]}"
    do = "Lower it, or set rollout_matching.vllm.enable_lora to false"
    raise ContractError("tuner.lora_rank", found, do)


def run_settings(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server settings of a training YAML. given: the server's other settings.

    Raises ContractErrors with every bad key of the server's part, by its path in the file.
    """
    _, mappings = read_chain(path, partial(read_yaml, option=OPTION))
    merged = merge_chain(mappings)
    rollout = read_rollout_config(path, merged)
    vllm, transport = rollout.vllm, rollout.vllm.sync.transport
    gpus, length = given.get("tensor_parallel_size"), vllm.max_model_len
    settings = {
        "max_num_seqs": rollout.decode_batch_size * (gpus if isinstance(gpus, int) else 1),
        "repeat_terminate": rollout.repeat_terminate,
        "weight_transport": None if transport == "auto" else transport,
        "max_model_len": length or _context(given.get("model"), merged),
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_lora": vllm.enable_lora,
    }
    lora_rank = _positive(_section(merged, "tuner").get("lora_rank"))
    if vllm.enable_lora and lora_rank is not None:
        settings["max_lora_rank"] = _vllm_rank(lora_rank)
    return settings


def read_rollout_config(path: Path, merged: Mapping[str, Any]) -> SharedRolloutConfig:
    """Return the section that both programs read. merged: the mapping of the file `path`."""
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
        return SharedRolloutConfig.model_validate(known)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, SharedRolloutConfig, at=SECTION)) from None


def _context(model: Any, merged: Mapping[str, Any]) -> int | None:
    """Return the context of the run; None if the YAML sets no limit.

    `global_max_length` limits the prompt, as a pack contains it.
    """
    packed = _section(merged, "training").get("packing", True) is not False
    prompt = _positive(merged.get("global_max_length")) if packed else None
    answer = _positive(_section(merged, SECTION).get("max_new_tokens"))
    if prompt is None or answer is None or not isinstance(model, str | Path):
        return None
    return run_context(Path(model), prompt, answer)


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Read the mapping in a YAML file. option: names the file in the ContractError."""
    from ruamel import yaml  # not for `--help`

    try:
        return read_document(path, yaml).mapping
    except ContractError as error:
        raise ContractError(option, f"{error.where}: {error.found}", error.do) from error


def _answer_format(custom: Mapping[str, Any]) -> str:
    name = custom["answer_format"]
    if not isinstance(name, str) or name not in ENTRY_CONTEXTS:
        known = ", ".join(ENTRY_CONTEXTS)
        raise ContractError(
            "custom.answer_format", f"{shown(name)} is not known", f"Use one of {known}"
        )
    return name


def _section(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = mapping.get(name)
    return section if isinstance(section, dict) else {}


def _positive(value: Any) -> int | None:
    """Return a positive integer; None for any other value, which the learner refuses."""
    return value if type(value) is int and value > 0 else None
