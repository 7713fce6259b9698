"""`rollout-server`: options in, a running server or a three-part error out.

`--help` imports nothing that takes long; FastAPI and torch are imported only once the options
are known to be good.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from shared_contracts.cli import print_version, run_cli
from shared_contracts.errors import ContractError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def rollout_server(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve rollouts of a vision-language model and take new weights in memory."""


@app.command()
def serve(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of these options.")] = None,
    run_config: Annotated[
        Path | None, typer.Option(help="Training YAML whose rollouts are served.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="gpu (default) or cpu.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPU ids, such as 0,1,2.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines on the CPU (1).")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs per replica (1).")] = None,
    distributed_executor_backend: Annotated[
        str | None, typer.Option(help="mp, or ray for replicas that span nodes (vLLM's choice).")
    ] = None,
    share_gpus: Annotated[
        bool | None,
        typer.Option("--share-gpus/--no-share-gpus", help="Take GPUs others use (no)."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto (default), float32, bfloat16 or float16.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context, in tokens (model's).")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences decoded at once per replica (64).")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one forward (fits).")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory to use (0.9).")
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-prefix-caching",
            help="Reuse the KV cache of equal beginnings (enabled).",
        ),
    ] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(help="KV cache of a CPU replica, in GiB (1.0).")
    ] = None,
    max_images_per_request: Annotated[
        int | None, typer.Option(help="Images in one conversation (16).")
    ] = None,
    allowed_media_dir: Annotated[
        list[Path] | None, typer.Option(help="Directory of local images; repeatable.")
    ] = None,
    allow_media_urls: Annotated[
        bool | None,
        typer.Option("--allow-media-urls/--no-media-urls", help="Fetch images by URL (no)."),
    ] = None,
    allowed_media_host: Annotated[
        list[str] | None, typer.Option(help="Host with a private address; repeatable.")
    ] = None,
    max_image_mib: Annotated[float | None, typer.Option(help="Bound of one image (32).")] = None,
    max_image_megapixels: Annotated[
        float | None, typer.Option(help="Bound of one decoded image (64).")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token calls must carry (none).")
    ] = None,
    max_body_mib: Annotated[float | None, typer.Option(help="Bound of one body (256).")] = None,
    max_requests_per_call: Annotated[
        int | None, typer.Option(help="Requests in one /infer/ call (4096).")
    ] = None,
    max_concurrent_calls: Annotated[
        int | None, typer.Option(help="/infer/ calls running at once (64).")
    ] = None,
    enable_lora: Annotated[
        bool | None,
        typer.Option("--enable-lora/--no-lora", help="Take LoRA adapters as weights (no)."),
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Largest rank of an adapter (16).")
    ] = None,
    weight_transport: Annotated[
        str | None, typer.Option(help="gloo (CPU default), nccl (GPU default) or ipc.")
    ] = None,
    grace_seconds: Annotated[
        float | None, typer.Option(help="Time running calls have after SIGTERM (10).")
    ] = None,
    hang_seconds: Annotated[
        float | None, typer.Option(help="Silence after which an engine is rebuilt (60).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one (0).")] = None,
    parent_pid: Annotated[
        int | None, typer.Option(help="Stop when this process, our parent, has ended.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info (default), warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text (default), or json: one object a line.")
    ] = None,
) -> None:
    """Start the replicas and serve them on one port."""
    _serve(**locals())


def _serve(config: Path | None, run_config: Path | None, **options: Any) -> None:
    """options: of the command, which are settings; some by another name or in another form."""
    options["gpus"] = _gpu_list(options["gpus"])
    options["allowed_media_dirs"] = options.pop("allowed_media_dir")
    options["allowed_media_hosts"] = options.pop("allowed_media_host")
    from rollout_server.engine_env import apply_engine_environment
    from rollout_server.logs import set_up_logging
    from rollout_server.orphans import stop_with
    from rollout_server.preflight import bind, check_settings
    from rollout_server.settings import load_settings

    settings = load_settings(config, options, run_config)
    set_up_logging(settings.log_level, settings.log_format)
    check_settings(settings)
    if settings.parent_pid is not None:
        stop_with(settings.parent_pid)
    listener = bind(settings.host, settings.port)
    apply_engine_environment(settings)
    from rollout_server.serve import serve as run  # FastAPI and torch: after the checks

    run(settings, listener)


def _gpu_list(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ContractError("--gpus", f"{text!r} is no list of ids", "Write 0,1,2") from None


def main() -> None:
    """Console entry: a broken contract is a three-part message and exit code 2."""
    run_cli(app)
