"""`rollout-server`: options in, a running server or a three-part error out.

`--help` imports nothing that takes long; FastAPI and torch are imported only once the options
are known to be good.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from shared_contracts.cli import HELP_OPTIONS, print_version, run_program, without_flag_types
from shared_contracts.errors import ContractError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS
)


@app.callback()
def rollout_server(
    version: Annotated[
        bool,
        Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Generate rollouts of a vision-language model, and receive new weights in memory."""


@app.command()
def serve(
    model: Annotated[Path | None, Option(help="Checkpoint directory.")] = None,
    config: Annotated[Path | None, Option(help="YAML file of these options.")] = None,
    run_config: Annotated[
        Path | None, Option(help="Training YAML: its settings of the server.")
    ] = None,
    device: Annotated[str | None, Option(help="gpu (default) or cpu.")] = None,
    gpus: Annotated[str | None, Option(help="GPU ids, such as 0,1,2.")] = None,
    replicas: Annotated[int | None, Option(help="Number of engines on the CPU (1).")] = None,
    tensor_parallel_size: Annotated[int | None, Option(help="GPUs per replica (1).")] = None,
    distributed_executor_backend: Annotated[
        str | None, Option(help="mp, or ray for replicas on several nodes (vLLM chooses).")
    ] = None,
    share_gpus: Annotated[
        bool | None,
        Option("--share-gpus/--no-share-gpus", help="Allow GPUs that other processes use (no)."),
    ] = None,
    host: Annotated[str | None, Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, Option(help="Port to listen on (8000).")] = None,
    dtype: Annotated[
        str | None, Option(help="auto (default), float32, bfloat16 or float16.")
    ] = None,
    max_model_len: Annotated[
        int | None, Option(help="Longest sequence (run's or model's).")
    ] = None,
    max_num_seqs: Annotated[
        int | None, Option(help="Most sequences that a replica decodes at once (64).")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Most tokens in one forward (8192 on GPUs).")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, Option(help="Fraction of a GPU's memory to use (at most 0.9).")
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        Option("--enable-prefix-caching/--no-prefix-caching", help="Reuse equal prompts (yes)."),
    ] = None,
    kv_cache_gib: Annotated[
        float | None, Option(help="KV cache of a CPU replica, in GiB (1.0).")
    ] = None,
    max_images_per_request: Annotated[
        int | None, Option(help="Images in one request (16).")
    ] = None,
    allowed_media_dir: Annotated[
        list[Path] | None, Option(help="Directory with local images. Repeatable.")
    ] = None,
    allow_media_urls: Annotated[
        bool | None,
        Option("--allow-media-urls/--no-media-urls", help="Fetch images by URL (no)."),
    ] = None,
    allowed_media_host: Annotated[
        list[str] | None, Option(help="Host of image URLs with a private address. Repeatable.")
    ] = None,
    max_image_mib: Annotated[float | None, Option(help="Largest image file (32).")] = None,
    max_image_megapixels: Annotated[float | None, Option(help="As decoded (64).")] = None,
    max_decoded_mib: Annotated[float | None, Option(help="All decoded images (4096).")] = None,
    allowed_host: Annotated[
        list[str] | None, Option(help="Host name of a server on loopback. Repeatable.")
    ] = None,
    token_file: Annotated[
        Path | None, Option(help="File with the token that every call needs (none).")
    ] = None,
    max_body_mib: Annotated[float | None, Option(help="Largest body of a call (256).")] = None,
    max_bodies_mib: Annotated[float | None, Option(help="All bodies together (1024).")] = None,
    max_connections: Annotated[int | None, Option(help="Most open connections (512).")] = None,
    max_requests_per_call: Annotated[
        int | None, Option(help="Most requests in one /infer/ call (4096).")
    ] = None,
    max_concurrent_calls: Annotated[int | None, Option(help="Most calls at once (64).")] = None,
    openai: Annotated[bool | None, Option(help="Also OpenAI's chat completions (no).")] = None,
    model_runner: Annotated[str | None, Option(help="Of vLLM: auto (v1), v1, v2 (GPUs).")] = None,
    enable_lora: Annotated[
        bool | None,
        Option("--enable-lora/--no-lora", help="Accept pushes of LoRA adapters (no)."),
    ] = None,
    max_lora_rank: Annotated[int | None, Option(help="Largest rank of an adapter (16).")] = None,
    weight_transport: Annotated[
        str | None, Option(help="gloo (CPU default), nccl (GPU default) or ipc.")
    ] = None,
    max_weight_timeout_seconds: Annotated[
        float | None, Option(help="Longest deadline of a learner's push (1800).")
    ] = None,
    grace_seconds: Annotated[
        float | None, Option(help="Seconds that running calls have after SIGTERM (10).")
    ] = None,
    hang_seconds: Annotated[
        float | None, Option(help="No heartbeat for so long: rebuild the engine (60).")
    ] = None,
    seed: Annotated[int | None, Option(help="Seed of requests that have none (0).")] = None,
    parent_pid: Annotated[int | None, Option(help="Stop when this parent process ends.")] = None,
    log_level: Annotated[
        str | None, Option(help="debug, info (default), warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, Option(help="text (default), or json with one object per line.")
    ] = None,
) -> None:
    """Start the replicas behind one port. Defaults are in parentheses."""
    _serve(**locals())


def _serve(config: Path | None, run_config: Path | None, **options: Any) -> None:
    """options: of the command, which are settings; some by another name or in another form."""
    options["gpus"] = _gpu_list(options["gpus"])
    options["allowed_media_dirs"] = options.pop("allowed_media_dir")
    options["allowed_hosts"] = options.pop("allowed_host")
    options["allowed_media_hosts"] = options.pop("allowed_media_host")
    from rollout_server.engines import engine_package
    from rollout_server.engines.merge import with_merged_model
    from rollout_server.runtime.logs import set_up_logging
    from rollout_server.runtime.processes import stop_with, use_scratch_folder
    from rollout_server.settings.options import load_settings
    from rollout_server.settings.preflight import bind, check_settings

    settings = load_settings(config, options, run_config)
    set_up_logging(settings.log_level, settings.log_format)
    settings = check_settings(settings)
    if settings.parent_pid is not None:
        stop_with(settings.parent_pid)
    listener = bind(settings.host, settings.port)
    use_scratch_folder()
    settings = with_merged_model(settings)
    os.environ.update(engine_package().environment(settings))
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
    run_program(without_flag_types(typer.main.get_command(app)))
