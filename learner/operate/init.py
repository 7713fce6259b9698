"""`learner init`: write a folder of training YAMLs for a checkpoint and a data file.

A checkpoint whose coordinate tokens are new or look untrained gets a warm-up before its run.
"""

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from learner.config import load_config
from learner.config.load import schema_text
from learner.config.rollout_matching import MatchingConfig
from learner.config.schema import Config
from learner.data.check import check_files
from learner.data.checkpoint import TOKENIZER, Checkpoint
from learner.data.conversion import convert, read_other, write_records
from learner.data.files import capped, detect_format
from learner.data.show import check_tables, print_tables, show_account
from learner.models.coord_tokens import describe_expanded, expand_vocab
from learner.models.gpus import GPUS, Gpu, gpu_named, gpu_of_device
from learner.models.load import check_parameters
from learner.operate.doctor import why_untrained
from learner.operate.estimate import estimate
from learner.operate.step_cost import USABLE, gib
from learner.runs.atomic_files import publish_directory, publish_text
from learner.runs.console import tell
from learner.training.checkpoint_checks import lengths_of_run
from learner.types import Sample
from shared_contracts.checkpoints import ADAPTER, weight_files
from shared_contracts.errors import ContractError
from shared_contracts.machine import visible_gpus

CPU = "cpu"
TEMPLATE = "init.yaml.jinja"
WARMUP, TWO_CHANNEL, MODEL, SCHEMA = "warmup", "two_channel", "model", "schema.json"
# Tokens of a pack; those for GPUs are the shipped profiles'.
PACKS, CPU_PACKS = (12_000, 6_000), (2_048,)
BATCH, CPU_BATCH = 32, 8
# Passes over the data, and the smallest numbers of steps.
PASSES, WARMUP_STEPS, RUN_STEPS = 2, 300, 200
ANSWERS_AT_ONCE = 64
# Server shares of a GPU that the learner shares.
SMALLEST_SHARE, LARGEST_SHARE = 0.05, 0.7


@dataclass(frozen=True)
class InitOptions:
    """gpu: None on the CPU. gpus: number of GPUs of learner and servers together."""

    model: Path
    data: Path
    val: Path | None
    out: Path
    gpu: Gpu | None
    gpus: int
    lora: bool


@dataclass(frozen=True)
class Plan:
    """The YAMLs of a new folder. The fields from `target` on are those of a draft, at first.

    folder: its temporary path. measured: the checkpoint to measure with; may have no weights yet.
    samples: number of training samples. after_warmup: whether a warm-up precedes the run.
    target, longest: tokens of the longest answer and of the longest sample. answer:
    `max_new_tokens`. servers: GPUs of the rollout server; 0: it shares the learner's device.
    pack: tokens of a pack. share: server share of a shared GPU. at_once: `decode_batch_size`.
    """

    options: InitOptions
    folder: Path
    measured: Path
    samples: int
    after_warmup: bool
    target: int = 1
    answer: int = 1
    longest: int = 1
    lora: bool = True
    learner_gpus: int = 1
    servers: int = 0
    pack: int = CPU_PACKS[0]
    estimate: str = ""
    share: float | None = None
    at_once: int = ANSWERS_AT_ONCE

    def __str__(self) -> str:
        weights = "LoRA" if self.lora else "all weights"
        split = "" if self.learner_gpus == 1 else f" split over {self.learner_gpus} GPUs (FSDP2)"
        server = f"a server on {self.servers}" if self.servers else "a server on the same device"
        return f"{weights}{split}, {server}, packs of {self.pack:,} tokens"

    @property
    def names(self) -> list[str]:
        return [WARMUP, TWO_CHANNEL] if self.after_warmup else [TWO_CHANNEL]

    @property
    def batch(self) -> int:
        most = CPU_BATCH if self.options.gpu is None else BATCH
        return 1 << int(math.log2(min(most, self.samples)))

    def steps(self, name: str) -> int:
        smallest = WARMUP_STEPS if name == WARMUP else RUN_STEPS
        return max(smallest, PASSES * (self.samples // self.batch))

    def command(self, name: str) -> str:
        """Return the command that trains a YAML; GPUs count from 0, the learner's first."""
        file = shlex.quote(str(self.options.out / f"{name}.yaml"))
        gpus = [str(gpu) for gpu in range(self.learner_gpus + self.servers)]
        learner, servers = ",".join(gpus[: self.learner_gpus]), ",".join(gpus[self.learner_gpus :])
        if name == TWO_CHANNEL and self.servers:
            return f"learner launch {file} --server-gpus {servers} --train-gpus {learner}"
        visible = f"CUDA_VISIBLE_DEVICES={learner} " if self.servers else ""
        torchrun = f"torchrun --nproc-per-node {self.learner_gpus} --no-python "
        return f"{visible}{torchrun if self.learner_gpus > 1 else ''}learner train {file}"

    def config(self) -> Config:
        config = self.write(TWO_CHANNEL)
        model = config.model.model_copy(update={"model": self.measured})
        return config.model_copy(update={"model": model})

    def write(self, name: str) -> Config:
        options, warmup, path = self.options, name == WARMUP, self.folder / f"{name}.yaml"
        folder, steps = options.out.absolute(), self.steps(name)
        model = folder / MODEL if self.measured != options.model else options.model.absolute()
        if self.after_warmup and not warmup:
            model = folder / WARMUP / f"checkpoint-{self.steps(WARMUP)}"
        values = {
            **vars(self),
            "warmup": warmup,
            "command": self.command(name),
            "model": str(model),
            "train": str(options.data.absolute()),
            "val": None if options.val is None else str(options.val.absolute()),
            "evaluate": options.val is not None and not warmup,
            "name": f"{options.out.name}_{name}",
            "output_dir": str(folder / name),
            "on_cpu": options.gpu is None,
            "batch": self.batch,
            "steps": steps,
            "epochs": steps * self.batch / self.samples,
            "save_steps": max(1, steps // 10),
        }
        loader = PackageLoader("learner.operate", "templates")
        jinja = Environment(loader=loader, undefined=StrictUndefined, autoescape=False)
        jinja.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
        publish_text(path, jinja.get_template(TEMPLATE).render(values) + "\n")
        return load_config(path)


def device_named(name: str | None, gpus: int | None) -> tuple[Gpu | None, int]:
    """Return the kind of GPU (None: the CPU) and the number; by default the visible GPUs.

    Raises ContractError if the kind is unknown.
    """
    if name is not None:
        return (None, 0) if name.lower() == CPU else (gpu_named(name), gpus or 1)
    if visible := visible_gpus(os.environ):
        found = torch.cuda.get_device_properties(0)
        if (gpu := gpu_of_device(found.name, found.total_memory)) is not None:
            return gpu, gpus or len(visible)
    do = f"Name {', '.join(GPUS)}, or {CPU}"
    raise ContractError("--gpu", "not given, and no known GPU is visible here", do)


def init(options: InitOptions, console: Console) -> None:
    """Write the folder `options.out`; print findings, choices and the next commands.

    Raises ContractError, and writes nothing, for a checkpoint, data or a GPU that cannot train.
    """
    disable_progress_bar()
    has_tokens = check_checkpoint(options.model)
    with publish_directory(options.out) as part:
        files = [as_data_file("--data", options.data, part / "train.jsonl")]
        if options.val is not None:
            files.append(as_data_file("--val", options.val, part / "val.jsonl"))
        final = [options.out / file.name if file.parent == part else file for file in files]
        samples = check_data(files, final, console)
        options = replace(options, data=final[0], val=final[1] if options.val else None)
        if has_tokens:
            model, why = options.model, why_untrained(options.model)
        else:
            model = part / MODEL
            why = "they are new; their rows start as the mean of all rows plus noise of mean zero "
            why += "that is smooth in the coordinate"
            describe_expanded(options.model, model)
        draft = Plan(options, part, model, len(samples), after_warmup=why is not None)
        samples, plan = measure(draft, samples)
        plan = choose_shape(plan, samples, console)
        if not has_tokens:
            shutil.rmtree(model)
            expand_vocab(options.model, model, seed=0, tie=None)
        for name in plan.names:
            plan.write(name)
        publish_text(part / SCHEMA, schema_text())
    if why is None:
        tell(console, f"Coordinate tokens: {options.model} has them, and they look trained")
    else:
        tell(console, f"A warm-up comes first, because of the coordinate tokens: {why}")
    first = shlex.quote(str(options.out / f"{plan.names[0]}.yaml"))
    commands = [plan.command(name) for name in plan.names]
    tell(console, "\n  ".join(["Next:", f"learner doctor {first}", *commands]))


def check_checkpoint(model: Path) -> bool:
    """Return whether the tokenizer of a checkpoint has the coordinate tokens.

    Raises ContractError for a folder that is no whole checkpoint of a known family.
    """
    checkpoint = Checkpoint(model, "--model")
    has_tokens = True
    if (model / TOKENIZER).is_file() and not (model / ADAPTER).is_file():
        has_tokens = checkpoint.coordinate_ids[0] is not None
    if has_tokens:
        checkpoint.require_vocabulary()
    _ = checkpoint.family
    weight_files(checkpoint.base, "--model")
    check_parameters(model, "--model")
    return has_tokens


def as_data_file(option: str, source: Path, out: Path) -> Path:
    """Return a data file with the samples of `source`: itself if it is one, else a new file `out`.

    Of a data set with several splits, the one with the name of `out` is read.
    """
    if (form := detect_format(source)) == "jsonl":
        return source
    try:
        try:
            read = read_other(source, form)
        except ContractError as error:
            if error.where != "--split":
                raise
            read = read_other(source, form, split=out.stem)
        conversion = convert(read, out)
        show_account(conversion.account, f"{source} is {form}")
        write_records(conversion, out)
    except ContractError as error:
        do = f"`learner data convert {shlex.quote(str(source))} FILE.jsonl` has options for it"
        raise ContractError(option, str(error).removesuffix("."), do) from error
    return out


def check_data(files: Sequence[Path], final: Sequence[Path], console: Console) -> list[Sample]:
    """Return the samples of the first file; print counts; raise ContractErrors for all problems.

    final: the paths of the files in the published folder.
    """
    canvas = MatchingConfig().maskiou_resolution
    reports = check_files(files, allow_poly=False, lengths=None, canvas=canvas)
    for report, path in zip(reports, final, strict=True):
        if report.path != path:
            tell(console, f"Data file: {path}")
        report.path = path
    print_tables(check_tables(reports))
    findings = [each for report in reports for each in report.findings]
    if problems := [each for each in findings if not each.warning]:
        raise capped("--data", problems)
    if findings:
        named = shlex.join(map(str, final))
        tell(console, f"`learner data check {named}` lists the warnings")
    return reports[0].samples


def measure(draft: Plan, samples: Sequence[Sample]) -> tuple[list[Sample], Plan]:
    """Return the samples, longest first, and the plan with their token lengths."""
    lengths = lengths_of_run(draft.config())
    prompts = [lengths.prompt(sample) for sample in samples]
    targets = [lengths.target(sample) for sample in samples]
    prompt, target = max(prompts), max(targets)
    order = sorted(range(len(samples)), key=lambda place: -prompts[place] - targets[place])
    answer = _round_up(2 * target)
    longest = _round_up(prompt + answer + target)
    plan = replace(draft, target=target, answer=answer, longest=longest)
    return [samples[place] for place in order], plan


def _round_up(tokens: int) -> int:
    return math.ceil(tokens / 64) * 64


def shapes(plan: Plan) -> Iterator[Plan]:
    """Yield the shapes that the options allow, those nearest to the shipped profile first:
    all weights on one GPU, then on more GPUs, then LoRA; long packs before short ones.
    """
    options = plan.options
    usual = CPU_PACKS if options.gpu is None else PACKS
    packs = sorted({max(pack, plan.longest) for pack in usual}, reverse=True)
    for lora in (True,) if options.lora else (False, True):
        learner = 1
        while learner == 1 or (not lora and learner < options.gpus and learner <= plan.batch):
            servers = options.gpus - learner if options.gpus > 1 else 0
            for pack in packs:
                yield replace(plan, lora=lora, learner_gpus=learner, servers=servers, pack=pack)
            learner *= 2


def choose_shape(plan: Plan, samples: Sequence[Sample], console: Console) -> Plan:
    """Return the first shape that fits, by the estimate of a step on the longest samples.

    samples: longest first.

    Raises ContractError, with the last shape's reason, if no shape fits.
    """
    if (gpu := plan.options.gpu) is None:
        note = "Memory was not estimated; `learner doctor` estimates it for a CPU."
        return replace(next(shapes(plan)), estimate=note)
    reason = ""
    for shape in shapes(plan):
        found = estimate(shape.config(), samples, gpu, shape.learner_gpus)
        need = f"{gib(found.largest.total)} of {gib(found.room)}"
        note = f"Estimate for {gpu.name}, on the longest samples: the learner needs {need}."
        fitted = replace(shape, estimate=note)
        if not shape.servers:  # shared: the server gets the memory that the learner does not keep
            share = math.floor(20 * (USABLE - found.kept / gpu.memory)) / 20
            fitted = replace(fitted, share=min(LARGEST_SHARE, max(share, SMALLEST_SHARE)))
        found = replace(found, config=fitted.config())
        if not (faults := list(found.refusals())):
            tell(console, f"Fits {gpu.name}: {shape}. {note}")
            return replace(fitted, at_once=min(ANSWERS_AT_ONCE, found.sequences or 1))
        reason = faults[0].found
        tell(console, f"Does not fit {gpu.name}: {shape}: {reason}")
    do = "Name a GPU with more memory, more of them (--gpus), or a smaller model"
    raise ContractError("--gpu", f"nothing fits {plan.options.gpus} x {gpu.name}: {reason}", do)
