"""`learner train`, `launch`, `eval`, `demo`; `report`, `replay` and `compare` for their results."""

import os
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from learner.commands.config import ConfigFile, ConfigOption, Json, Seed, only_config
from learner.distributed.waiting import reporting_waits, use_passive_wait, waiting_for
from learner.runs.atomic_files import expect_full_disks_in_threads, require_free
from learner.runs.console import tell

if TYPE_CHECKING:
    from learner.config.training import TrainingConfig


def train(file: ConfigFile = None, config: ConfigOption = None) -> None:
    """Train a detector. All hyperparameters are in the YAML file."""
    from learner.config import load_config
    from learner.rollout.colocate import describe_backend, learner_environment
    from learner.training.input_checks import check_inputs, generates
    from learner.training.server_checks import reach_servers

    console = Console()
    parsed = load_config(only_config(file, config))
    inputs = check_inputs(parsed)
    first = os.environ.get("RANK", "0") == "0"
    if message := inputs.finished(parsed.training):
        if first:
            _finish(parsed.training, console)
        tell(console, message)
        return
    with reporting_waits(partial(tell, console)) if first else nullcontext():
        clients = []
        if generates(parsed):
            tell(console, f"Rollouts: {describe_backend(parsed, inputs.placement)}")
            clients = reach_servers(parsed, os.environ, inputs.answered, partial(tell, console))
        use_passive_wait()
        os.environ.update(learner_environment(inputs.placement, inputs.processes))
        if inputs.processes > 1:  # hides socket errors; the learner reports lost processes itself
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with waiting_for("PyTorch and its libraries to be imported"):
            from learner.training.train import train as run

        expect_full_disks_in_threads()
        folder = run(parsed, inputs, clients, console)
    tell(console, f"Run folder: {folder}")
    if parsed.training.push_to_hub and first:
        from learner.operate.export import push_run

        tell(console, f"Pushed: {push_run(parsed)}")


def _finish(training: "TrainingConfig", console: Console) -> None:
    """Do what remains to do after a kill at the end of a run."""
    from learner.analysis.report.run_page import write_or_warn
    from learner.analysis.report.run_view import REPORT
    from learner.runs.checkpoint import remove_old

    remove_old(training.output_dir, training.save_total_limit)
    if not (training.output_dir / REPORT).exists():
        write_or_warn(training.output_dir, console)


def launch(
    file: ConfigFile = None,
    config: ConfigOption = None,
    server_gpus: Annotated[
        list[str] | None,
        typer.Option(help="GPUs of one server, e.g. 0,1,2. Repeat for each server of the YAML."),
    ] = None,
    train_gpus: Annotated[
        str | None, typer.Option(help="GPUs of the learner, e.g. 3. It gets one process for each.")
    ] = None,
    device: Annotated[
        Literal["gpu", "cpu"], typer.Option(help="gpu, or cpu for all programs.")
    ] = "gpu",
    train_processes: Annotated[
        int | None, typer.Option(help="Number of learner processes on the CPU. (1)", min=1)
    ] = None,
    server_config: Annotated[
        Path | None,
        typer.Option(help="YAML with options of the servers; see `rollout-server serve --help`."),
    ] = None,
) -> None:
    """Start the servers and the learner of a run together, and stop them together."""
    from learner.config import load_config, load_mapping
    from learner.operate.launch import LaunchOptions, plan_launch, start_learner
    from learner.operate.launch import launch as run

    console = Console()
    say = partial(tell, console)
    path = only_config(file, config)
    parsed = load_config(path)
    own = load_mapping(server_config) if server_config is not None else {}
    options = LaunchOptions(device, tuple(server_gpus or ()), train_gpus, train_processes)
    plan = plan_launch(path, parsed, options, own)
    if message := plan.inputs.finished(parsed.training):
        _finish(parsed.training, console)
        say(message)
        return
    plan.write_files()
    for server in plan.servers:
        say(f"Starting a rollout server: {server}")
    learner = partial(start_learner, plan.learner, plan.processes, plan.learner_environment)
    try:
        with reporting_waits(say):
            code = run([*plan.servers.values()], learner, say)
    finally:
        console.show_cursor()  # a stopped learner may have hidden it
    raise typer.Exit(code)


def evaluate(
    file: ConfigFile = None,
    config: ConfigOption = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint to score, e.g. RUN/checkpoint-500. (model.model)"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL file with the samples. (data.val_jsonl)")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for the results. (one in training.output_dir/evaluations)"),
    ] = None,
) -> None:
    """Score the answers of a checkpoint, and write scores and answers.

    The checkpoint is pushed to the servers of the config. No other run may use them meanwhile.
    """
    from learner.analysis.report.run_page import renew
    from learner.config import load_config
    from learner.data.show import print_tables
    from learner.operate.eval_plan import plan_evaluation
    from learner.rollout.colocate import describe_backend, learner_environment
    from learner.training.server_checks import reach_servers

    plan = plan_evaluation(load_config(only_config(file, config)), checkpoint, data, out)
    console = Console()
    tell(console, f"Checkpoint: {plan.config.model.model}")
    tell(console, f"Samples: {len(plan.samples)} of {plan.data}")
    tell(console, f"Answers: {describe_backend(plan.config, plan.placement)}")
    with reporting_waits(partial(tell, console)):
        clients = reach_servers(plan.config, os.environ, plan.samples, partial(tell, console))

    use_passive_wait()
    os.environ.update(learner_environment(plan.placement))
    from learner.operate.eval_run import run_evaluation, tables

    scored = run_evaluation(plan, clients, console)
    print_tables(tables(scored))
    tell(console, f"\nEvaluation: {plan.out}")
    if plan.run is not None:
        renew(plan.run, console)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="New folder for the run. (runs/demo-DATE)")
    ] = None,
    seed: Seed = 0,
    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Also train with channel A alone, for the same number of steps."
        ),
    ] = False,
    world: Annotated[
        Literal["plain", "crowded"],
        typer.Option(
            help="plain: one or two shapes, minutes; crowded: 6 to 20 that overlap, about an hour."
        ),
    ] = "plain",
) -> None:
    """Train a toy detector on this machine: data, model, server, training, scores."""
    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    require_free(folder)

    use_passive_wait()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the demo always uses the CPU
    from learner.operate.demo import run_demo

    run_demo(folder.resolve(), seed, Console(), control=control, world=world)


def report(
    run: Annotated[Path, typer.Argument(help="Run folder: training.output_dir of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file. (report.html in the run folder)")
    ] = None,
) -> None:
    """Write report.html, the page of a run, also during the run. It needs no network."""
    from learner.analysis.report.run_page import write_report
    from learner.analysis.report.run_view import REPORT
    from learner.runs.atomic_files import require_file
    from learner.runs.run_folder import RunFolder

    folder = RunFolder.open(run)
    file = out or run / REPORT
    require_file("--out", file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(folder, file)
    typer.echo(f"Report: {file} ({file.stat().st_size / 1e6:.1f} MB)")


def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of channel B, counted from 1. (all logged steps)", min=1),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Print all details of the answers to this sample, e.g. train.jsonl:12"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer of the run. (model.model of the run)"),
    ] = None,
) -> None:
    """Compute logged answers again from their ids, and compare every bit."""
    from learner.analysis import replay as replays
    from learner.runs.run_folder import RunFolder

    folder = RunFolder.open(run)
    config, steps = folder.config(), replays.logged_steps(folder, step)
    loaded = replays.load_tokenizer(replays.find_tokenizer(folder, config, tokenizer))
    if not replays.replay(folder, steps, sample, config, loaded):
        raise typer.Exit(1)


def compare(
    first: Annotated[Path, typer.Argument(help="Run folder, or the folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same samples.")],
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Compare two evaluations: scores, differences and their 95 % intervals over samples.

    For a run folder, the newest evaluation with answers is used.
    """
    from json import dumps

    from learner.analysis.evaluation.comparison import Comparison, comparison_table
    from learner.data.show import print_tables

    comparison = Comparison.of(first, second, seed)
    if json:
        print(dumps(comparison.numbers(), indent=2))
    else:
        typer.echo(f"first: {comparison.first}\nsecond: {comparison.second}\n")
        print_tables([comparison_table(comparison)])
