"""`learner init`: from a checkpoint and a data file to the first command of a training."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    model: Annotated[
        Path, typer.Option(help="Checkpoint of a Qwen-VL model, with or without coordinate tokens.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Samples to train on: a data file, or what `learner data convert` reads."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder. It must not exist, or must be empty.")],
    val: Annotated[
        Path | None,
        typer.Option(help="Samples to evaluate on, likewise. (no evaluation)"),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to train on, e.g. H100; or cpu. (the visible one)")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Number of GPUs for learner and servers. (those visible; 1 with --gpu)", min=1
        ),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train LoRA, also if all weights would fit.")
    ] = False,
) -> None:
    """Check a model and data, add coordinate tokens, and write a YAML that fits the GPU.

    Nothing is trained. The last lines name the next commands.
    """
    from rich.console import Console

    from learner.distributed.waiting import use_passive_wait
    from learner.runs.atomic_files import require_free

    require_free(out)
    use_passive_wait()
    from learner.operate.init import InitOptions, device_named
    from learner.operate.init import init as run

    device, count = device_named(gpu, gpus)
    run(InitOptions(model, data, val, out, device, count, lora), Console())
