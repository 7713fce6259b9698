"""The server's settings: one typed class; every field is an option and a YAML key."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import Refusal, StrictModel, contract_errors

Device = Literal["cpu", "gpu"]
AnyPath = Annotated[Path, Field(strict=False)]


class ServerSettings(StrictModel):
    """What `rollout-server serve` can be told.

    model: checkpoint directory.
    gpus: physical GPU ids; each replica takes `tensor_parallel_size` of them in order.
    replicas: engines on the CPU; on GPUs it follows from `gpus`.
    dtype: auto is the checkpoint's own on the CPU; vLLM makes bfloat16 of float32 on GPUs.
    max_num_seqs: most sequences decoded at once per replica (`decode_batch_size`).
    max_num_batched_tokens: most tokens in one forward; null means enough for a full
        context, and on the CPU for several prompts.
    kv_cache_gib: size of the KV cache of one CPU replica.
    allowed_media_dirs: the only directories local image paths may point into.
    weight_transport: null means `gloo` on the CPU and `nccl` on GPUs.
    grace_seconds: how long running calls may take to finish after SIGTERM.
    seed: of the engine, for requests that bring none.
    parent_pid: the process that started the server; it stops when that one ends.
    """

    model: AnyPath
    device: Device = "gpu"
    gpus: tuple[int, ...] = Field(default=(), strict=False)
    replicas: int | None = Field(default=None, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    enable_prefix_caching: bool = True
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    allowed_media_dirs: tuple[AnyPath, ...] = Field(default=(), strict=False)
    weight_transport: Literal["gloo", "nccl"] | None = None
    grace_seconds: float = Field(default=10.0, ge=0.0)
    seed: int = Field(default=0, ge=0)
    parent_pid: int | None = Field(default=None, ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _devices_fit(self) -> "ServerSettings":
        if self.device == "gpu":
            self._check_gpus()
            return self
        if self.gpus:
            raise Refusal("GPUs are given, but device is cpu", "Leave them out", "gpus")
        if self.weight_transport == "nccl":
            raise Refusal("nccl needs GPUs, and device is cpu", "Use gloo", "weight_transport")
        return self

    def _check_gpus(self) -> None:
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
        if self.device == "cpu":
            return self.replicas or 1
        return len(self.gpus) // self.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        """Engine workers over all replicas: the world size the learner counts with."""
        return self.num_replicas * self.tensor_parallel_size

    @property
    def transport(self) -> Literal["gloo", "nccl"]:
        return self.weight_transport or ("gloo" if self.device == "cpu" else "nccl")

    def gpus_of(self, replica: int) -> list[int]:
        size = self.tensor_parallel_size
        return list(self.gpus[replica * size : (replica + 1) * size])


def load_settings(config: Path | None, options: dict[str, Any]) -> ServerSettings:
    """Merge a YAML file of settings with command-line options (options win) and validate.

    Raises ContractErrors naming every bad field.
    """
    from_file = _read_yaml(config) if config is not None else {}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return ServerSettings.model_validate(from_file | given)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, ServerSettings)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(
            "--config", f"{path} cannot be read ({error.strerror})", "Name a readable file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ContractError("--config", f"{path} is not YAML ({error})", "Correct it") from None
    if not isinstance(content, dict):
        raise ContractError("--config", f"{path} holds no mapping", "Write `field: value` lines")
    return content
