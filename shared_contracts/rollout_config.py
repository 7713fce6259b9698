"""The part of a training YAML that the rollout server also reads (CFG-09).

rollout_matching                      SharedRolloutConfig, and keys of the learner alone
    .decode_batch_size
    .repeat_terminate                 RepeatTerminate
    .vllm                             VllmConfig
        .server                       ServerConfig
            .servers[]                ServerAddress
        .sync                         SyncConfig
"""

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.strict_model import FreeOnResume, Refusal, StrictModel

_PORTS = {"http": 80, "https": 443}

Verify = Literal["off", "sample", "full"]


def _can_fire(config: RepeatTerminateConfig) -> RepeatTerminateConfig:
    ends = (
        config.max_consecutive_token_repeats > 0,
        config.ngram_size > 0 and config.ngram_repeats > 0,
        config.max_object_keys is not None,
    )
    if config.enabled and not any(ends):
        raise Refusal(
            "is true, and nothing is set that would end a sequence",
            "Set max_consecutive_token_repeats, ngram_size with ngram_repeats, or "
            "max_object_keys; or enabled to false",
            "enabled",
        )
    return config


RepeatTerminate = Annotated[RepeatTerminateConfig, AfterValidator(_can_fire)]


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        host = parts.hostname if parts.port != 0 else None  # a wrong port raises ValueError
    except ValueError:
        host = None
    # Weights are pushed over IPv4.
    if parts.scheme not in _PORTS or not host or ":" in host or parts.query or parts.fragment:
        do = "Write it like http://127.0.0.1:8000, with an IPv4 address or a name that has one"
        raise Refusal(f"'{url}' is not the http address of a server", do)
    return url.rstrip("/")


class ServerAddress(StrictModel):
    """The addresses of a rollout server."""

    base_url: Annotated[str, AfterValidator(_http_url)]
    """address of a rollout server, without `/infer/`"""
    group_port: int = Field(ge=1, le=65535)
    """port on the server's host at which the weight group is formed"""

    def disagreements(self) -> Iterator[Refusal]:
        url = urlsplit(self.base_url)
        if self.group_port == (url.port or _PORTS[url.scheme]):
            found = f"{self.group_port} is also the port of base_url {self.base_url}"
            do = "Name another port that is free on the server's host"
            yield Refusal(found, do, "group_port")


class ServerConfig(StrictModel):
    """The servers of `mode: server`, and their timeouts."""

    servers: Annotated[tuple[ServerAddress, ...], Field(strict=False)]
    """the rollout servers, in the order in which they get requests"""
    timeout_s: float = Field(default=240.0, gt=0)
    """most seconds for reaching a server, for forming the weight group, and for each phase of a
    push (drain, transfer, finish)"""
    infer_timeout_s: float | None = None
    """most seconds for an `/infer/` call; null or <= 0: no limit while `/live/` answers"""

    @field_validator("servers")
    @classmethod
    def _distinct(cls, servers: tuple[ServerAddress, ...]) -> tuple[ServerAddress, ...]:
        if not servers:
            raise Refusal("the list is empty", "Name at least one server")
        urls = [server.base_url for server in servers]
        groups = [(urlsplit(server.base_url).hostname, server.group_port) for server in servers]
        if len(set(urls)) < len(urls):
            raise Refusal("a base_url is listed twice", "List every server once")
        if len(set(groups)) < len(groups):
            found = "two servers of one host have the same group_port"
            raise Refusal(found, "Give each its own group_port")
        return servers

    @field_validator("infer_timeout_s")
    @classmethod
    def _not_positive_is_none(cls, seconds: float | None) -> float | None:
        return seconds if seconds is not None and seconds > 0 else None


class SyncConfig(StrictModel):
    """Settings of weight pushes."""

    mode: Literal["full", "adapter", "auto"] = "full"
    """`full`: all weights, merged; `adapter`: only the LoRA adapter; `auto`: `adapter` with
    `enable_lora`, else `full`"""
    fallback_to_full: bool = True
    """if a push of the adapter fails, push full weights for the rest of the run"""
    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """`auto`: `ipc` to a colocated server; else `nccl` if the learner has a GPU; else `gloo`"""
    verify: Verify = "sample"
    """which pushes are proven: two answers of each server are compared with the trainer's
    log-probabilities. `sample`: the first and every hundredth; `full`: every one"""
    bucket_mib: int | None = Field(default=None, ge=1)
    """size of one packed bucket in MiB; null: 16, and with `nccl` 512"""


class VllmConfig(StrictModel):
    """Placement, features and weight pushes of vLLM."""

    mode: Literal["colocate", "server"] = "colocate"
    """where vLLM runs: `server`, in servers that you started; `colocate`, in a server that the
    learner starts on the devices that it sees. The learner trains on the first of these"""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """fraction of the GPU memory for a colocated server while it works; null: 0.45"""
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """GPUs per replica of a colocated server; null: the largest of 4, 2 and 1 that fits the GPUs
    the learner sees"""
    max_model_len: int | None = Field(default=None, ge=1)
    """most tokens of a prompt with its answer; null: the longest prompt of the data with
    `max_new_tokens`, and for a server that you start yourself `global_max_length` with
    `max_new_tokens`"""
    enable_lora: bool = Field(default=False, description="the engines can serve a LoRA adapter")
    enable_prefix_caching: bool = True
    """reuse the caches of equal prompts"""
    server: ServerConfig | None = None
    """how to reach the rollout servers; with `mode: server`"""
    sync: SyncConfig = Field(default=SyncConfig(), description="how weights are pushed")

    def disagreements(self) -> Iterator[Refusal]:
        yield from self._of_colocation() if self.mode == "colocate" else self._of_servers()
        if self.sync.mode == "adapter" and not self.enable_lora:
            do = "Set rollout_matching.vllm.enable_lora to true, or use full or auto"
            yield Refusal("adapter, and the engines serve no adapters", do, "sync.mode")

    def _of_colocation(self) -> Iterator[Refusal]:
        if self.server is not None:
            yield Refusal(
                "is given, and mode is colocate, where the learner starts its own server",
                "Write `server: null` beside mode: colocate, which also takes away what a "
                "file it extends has; or set rollout_matching.vllm.mode to server",
                "server",
            )
        if self.sync.transport == "nccl":
            do = "nccl needs a GPU for each rank: use auto, ipc or gloo"
            yield Refusal("nccl, and mode is colocate", do, "sync.transport")

    def _of_servers(self) -> Iterator[Refusal]:
        if self.server is None:
            yield Refusal("is missing with mode: server", "Name the rollout servers", "server")
        for key in ("gpu_memory_utilization", "tensor_parallel_size"):
            if getattr(self, key) is not None:
                do = f"Remove it, and give the server --{key.replace('_', '-')}"
                yield Refusal("belongs to mode: colocate", do, key)
        if self.sync.transport == "ipc":
            do = "ipc shares the learner's memory with a colocated server: use auto, gloo or nccl"
            yield Refusal("ipc, and mode is server", do, "sync.transport")


class SharedRolloutConfig(StrictModel):
    """Keys of `rollout_matching` for the learner and its servers."""

    decode_batch_size: FreeOnResume[int] = Field(default=1, ge=1)
    """most sequences decoded at once per rollout GPU"""
    repeat_terminate: RepeatTerminate = RepeatTerminateConfig()
    """when an answer that repeats itself is ended; the servers must have the same settings"""
    vllm: FreeOnResume[VllmConfig] = VllmConfig()
    """vLLM's placement, servers and weight push"""
