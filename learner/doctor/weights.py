"""The way of weights: the group forms, and one unchanged tensor gets to every worker."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from learner.backends import bucket_bytes_of, transport_of
from learner.config.schema import Config
from learner.doctor.findings import Finding, ok, skipped
from learner.doctor.sizes import Shape, Sizes, Stored, stored_tensors
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.sync.push import PhaseTimeouts, WeightPusher, WeightSyncError
from learner.sync.source import OneSource
from shared_contracts.errors import ContractError, ProblemError
from shared_contracts.server_info import Info
from shared_contracts.weights import (
    GONE_AFTER_S,
    CommunicatorReady,
    DtypeName,
    ParameterMeta,
    SyncReport,
)

RENDEZVOUS, TENSOR = "rendezvous", "one tensor"
# A doctor waits no longer for a side that does not come; a run has `timeout_s`.
_PATIENCE_S = 30.0


class AllWeights:
    """The shapes of all weights, and of one of them the tensor."""

    def __init__(self, sizes: Sizes, name: str, file: Path) -> None:
        self._shapes = sizes.shapes
        self._name = name
        self._file = file

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return [_meta(name, shape, dtype) for name, shape in self._shapes.items()]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._file, framework="pt") as tensors:
            yield self._name, tensors.get_tensor(self._name).to(getattr(torch, dtype))


class OneTensor(AllWeights):
    """A source of one tensor of a checkpoint, over all of its weights."""

    adapter = None

    def __init__(self, sizes: Sizes, name: str, stored: Stored) -> None:
        super().__init__(sizes, name, stored.file)
        self.base = AllWeights(sizes, name, stored.file)
        self._own = stored.shape

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return [_meta(self._name, self._own, dtype)]


def smallest_matrix(sizes: Sizes, stored: dict[str, Stored]) -> str:
    """The least of the checkpoint's matrices, in one of the layers: fused, sharded or packed.

    Raises ContractError where the files have none of the model's.
    """
    matrices = [
        (torch.Size(shape).numel(), name)
        for name, shape in sizes.shapes.items()
        if name in stored and len(shape) == 2 and min(shape) > 1
    ]
    if not matrices:
        raise ContractError(
            "model.model",
            "its files name none of the parameters of its model",
            "Save it with transformers' save_pretrained",
        )
    layers = [matrix for matrix in matrices if ".layers." in matrix[1]]
    return min(layers or matrices)[1]


def check(config: Config, client: RolloutClient, port: int, sizes: Sizes) -> list[Finding]:
    """Form the weight group and send one tensor, which the workers compare and drop.

    A run that has come to push to the server meanwhile is left alone.
    """
    url = client.base_url
    try:
        stored = stored_tensors(config.model.model)
        name = smallest_matrix(sizes, stored)
    except ContractError as error:
        return [skipped(check, error.found, url) for check in (RENDEZVOUS, TENSOR)]
    pusher = _pusher(config, client, port, OneTensor(sizes, name, stored[name]))
    try:
        return _tried(pusher, client, name)
    finally:
        pusher.close()


def untouchable(info: Info) -> str | None:
    """Why a server is left alone; None where nobody else pushes to it."""
    if info.weight_group is not None:
        heard_s = info.weight_group_heard_s
        group = f"a weight group, which met at {info.weight_group},"
        if heard_s is not None and heard_s < GONE_AFTER_S:
            return f"a run pushes to this server: {group} stands, and another would end it"
        return (
            f"{group} stands, whose learner gives no sign of life (one that was killed leaves it): "
            "the next run takes its place"
        )
    if info.weights_state == "UPDATING":
        return "the server is in the middle of a push"
    return None


def _pusher(config: Config, client: RolloutClient, port: int, source: OneTensor) -> WeightPusher:
    transport = transport_of(config)
    return WeightPusher(
        client,
        port,
        OneSource(source),
        transport,
        bucket_bytes_of(config, transport),
        "full",
        PhaseTimeouts.of(min(client.timeout_s, _PATIENCE_S)),
    )


def _tried(pusher: WeightPusher, client: RolloutClient, name: str) -> list[Finding]:
    url = client.base_url
    try:
        ready = pusher.connect(if_none=True)
    except (WeightSyncError, ContractError) as error:
        return [_no_group(error, url), skipped(TENSOR, f"waits for {RENDEZVOUS}", url)]
    met = ok(
        RENDEZVOUS,
        f"{ready.world_size - 1} worker(s) and the learner met over {ready.transport}",
        url,
    )
    try:
        if (why := needs_push_first(client.info())) is not None:
            return [met, skipped(TENSOR, why, url)]
        return [met, _arrived(pusher.try_out(), ready, name, url)]
    except WeightSyncError as error:
        return [met, judge_refusal(error, ready.weights_version, name, url)]
    except (ContractError, *SERVER_ERRORS) as error:
        return [met, Finding(TENSOR, url, "fail", str(error), "See the server's log")]


def needs_push_first(info: Info) -> str | None:
    """Why a server holds nothing that could be compared; None where it does."""
    mended = "the first push of the run mends it"
    if info.weights_state == "POISONED":
        return f"the server's last push broke; {mended}"
    behind = [replica.index for replica in info.replicas if replica.state == "needs-push"]
    if behind:
        which = ", ".join(map(str, behind))
        return f"replica {which} lacks version {info.weights_version} of the weights; {mended}"
    return None


def _kind(error: Exception) -> str:
    """Of the problem that the server has answered with; empty where it has not."""
    cause = error.__cause__
    return cause.problem.kind if isinstance(cause, ProblemError) else ""


def _no_group(error: WeightSyncError | ContractError, url: str) -> Finding:
    if _kind(error) == "weight-update-order":
        return skipped(RENDEZVOUS, f"a run has come to push to this server ({error})", url)
    do = (
        "See that this machine reaches the server's group_port and that the server's machine "
        "reaches this one on any port; GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the network"
    )
    if isinstance(error.__cause__, ProblemError):
        do = "Do what the server says; its log has more"
    return Finding(RENDEZVOUS, url, "fail", str(error), do)


def _arrived(report: SyncReport, ready: CommunicatorReady, name: str, url: str) -> Finding:
    found = (
        f"{name}, {report.bytes} bytes of {ready.dtype}, went to {ready.world_size - 1} worker(s) "
        f"and is what they hold; version {report.status.weights_version} stays"
    )
    return ok(TENSOR, found, url)


def judge_refusal(error: WeightSyncError, version: int, name: str, url: str) -> Finding:
    """Of a trial that was refused or broke. version: of the server's weights."""
    kind = _kind(error)
    if kind == "weight-update-order":
        why = f"a run has come to push to this server, or a replica was lost ({error})"
        return skipped(TENSOR, why, url)
    started_otherwise = kind == "weights-differ" and error.phase == "start"
    if started_otherwise and version > 0:
        why = f"version {version} was pushed to the server, so {name} is not what it holds"
        return skipped(TENSOR, why, url, "Start the server anew to have it tried")
    if started_otherwise:
        found = f"{name} of the server is not that of model.model"
        do = "Start the server with the checkpoint of model.model; a first full push mends it, too"
        return Finding(TENSOR, url, "warn", found, do)
    do = (
        "Start the server with a checkpoint of the same model"
        if kind == "manifest-mismatch"
        else "See the server's log; `learner probe` pushes all weights"
    )
    return Finding(TENSOR, url, "fail", str(error), do)


def _meta(name: str, shape: Shape, dtype: DtypeName) -> ParameterMeta:
    return ParameterMeta(name=name, dtype=dtype, shape=list(shape))
