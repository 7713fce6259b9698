"""`learner init`, `doctor`, `estimate`, `preflight` and `export`: before and after a run."""

from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from learner.commands.config import ConfigFile, ConfigOption, Json, NewFolder, only_config
from learner.distributed.waiting import reporting_waits, use_passive_wait
from learner.runs.atomic_files import require_free
from learner.runs.console import tell
from shared_contracts.cli import RUN_FAILED
from shared_contracts.errors import ContractErrors


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
    out: NewFolder,
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
    """Check a model and data, add coordinate tokens, and write YAMLs that fit the GPU.

    Nothing is trained. The last lines of the output are the next commands.
    """
    require_free(out)
    use_passive_wait()
    from learner.operate.init import InitOptions, device_named
    from learner.operate.init import init as run

    device, count = device_named(gpu, gpus)
    run(InitOptions(model, data, val, out, device, count, lora), Console())


def doctor(
    file: ConfigFile = None,
    config: ConfigOption = None,
    json: Json = False,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="After the checks, push the checkpoint to the servers and compare answers.",
        ),
    ] = False,
) -> None:
    """Check the real environment: files, versions, GPUs, memory, and every server.

    Each server answers a few requests. Nothing is changed without `--push`, which takes the
    servers over from any other learner.

    Exit code 1 if a check fails, 2 if the config is wrong.
    """
    from learner.config import load_config

    parsed = load_config(only_config(file, config))
    use_passive_wait()
    from learner.data.show import print_tables
    from learner.operate.doctor import as_json, examine, failed, table

    with reporting_waits(partial(tell, Console(stderr=True))):
        findings = list(examine(parsed, push=push))
    if json:
        typer.echo(as_json(findings))
    else:
        print_tables([table(findings)])
    if failed(findings):
        raise typer.Exit(RUN_FAILED)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of the checkpoint, e.g. RUN/checkpoint-500.")
    ],
    out: NewFolder,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the weights; auto: that of the checkpoint."),
    ] = "auto",
    verify: Annotated[
        Literal["all", "transformers"],
        typer.Option(help="Compare in transformers and in vLLM, or only in transformers."),
    ] = "all",
    push_to_hub: Annotated[
        str | None,
        typer.Option(help="Repository of the Hugging Face Hub, e.g. my-name/my-detector."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public. (private)")
    ] = False,
) -> None:
    """Write a checkpoint as a plain model with merged adapters, and check the result.

    A checkpoint of a run gets a model card, README.md. The token for a push is HF_TOKEN, or that of
    `hf auth login`.
    """
    from learner.runs.hub import require_hub_access

    use_passive_wait()
    from learner.operate.export import export as run  # torch: seconds
    from learner.operate.export import push_export, require_exportable

    require_exportable(checkpoint, out, verify)
    if push_to_hub is not None:
        require_hub_access("--push-to-hub", push_to_hub)
    for proof in run(checkpoint.absolute(), out.absolute(), dtype, verify):
        typer.echo(proof)
    typer.echo(f"Model: {out}")
    if push_to_hub is not None:
        typer.echo(f"Pushed: {push_export(out, push_to_hub, private=not public)}")


def preflight(file: ConfigFile = None, config: ConfigOption = None) -> None:
    """Print the settings of a training YAML for a launcher script, as shell assignments."""
    from learner.config import load_config
    from learner.operate.launch import shell_assignments

    typer.echo(shell_assignments(load_config(only_config(file, config))), nl=False)


def estimate(
    gpu: Annotated[str, typer.Option(help="GPU of learner and servers, e.g. H100.")],
    file: ConfigFile = None,
    config: ConfigOption = None,
    gpus: Annotated[int, typer.Option(help="Number of learner GPUs.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Estimate the memory and time of a run on a GPU, without one."""
    from learner.config import load_config
    from learner.models.gpus import gpu_named

    known = gpu_named(gpu)
    parsed = load_config(only_config(file, config))
    use_passive_wait()
    from learner.data.jsonl import read_samples
    from learner.data.show import print_tables
    from learner.operate.estimate import as_json, tables
    from learner.operate.estimate import estimate as run
    from learner.training.server_checks import spread

    samples = read_samples(parsed.data.train_jsonl, allow_poly=parsed.allow_poly)
    of_step = spread(samples, max(1, parsed.training.effective_batch_size // gpus))
    first = {sample.sample_id for sample in of_step}
    samples.sort(key=lambda sample: sample.sample_id not in first)
    result = run(parsed, samples, known, gpus)
    if json:
        print(dumps(as_json(result), indent=2))
    else:
        print_tables(tables(result))
    if refused := list(result.refusals()):
        raise ContractErrors(refused)
