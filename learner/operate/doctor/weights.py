"""The way of weights: addresses and ports, the group forms, one tensor gets to every worker.

`probe_servers` is the only check that changes what the servers hold: it pushes the checkpoint to
every server and compares their answers with its own.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from learner.config.schema import Config
from learner.models.load import LoadedModel, load_model
from learner.operate.doctor.findings import Finding, ok, skipped
from learner.operate.doctor.memory import Stored, stored_tensors
from learner.operate.estimate.sizes import Shape, Sizes
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.exclusive_lease import require_exclusive_lease
from learner.rollout.sync.probe import Probe, probe_call
from learner.rollout.sync.push import PhaseTimeouts, WeightPusher, WeightSyncError
from learner.rollout.sync.weights import MergedWeights, OneSource
from learner.training.backends import bucket_bytes_of, transport_of
from shared_contracts.adapters import checkpoint_chain
from shared_contracts.errors import ContractError, ProblemError
from shared_contracts.machine import address_towards
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import Info
from shared_contracts.weights import GONE_AFTER_S, DtypeName, ParameterMeta

ADDRESS, GROUP_PORT = "address", "group port"
_CONNECT_S = 3.0
_LISTENING = "0A"

PortState = Literal["free", "taken", "silent"]


def address(url: str, host: str, server_host: str) -> tuple[Finding, str | None]:
    """Where the workers of a server meet the learner; and the server's IP address.

    server_host: the name its machine gives itself; empty where it does not tell.
    """
    try:
        ip = socket.gethostbyname(host)
        ours = address_towards(ip)
    except OSError as error:
        do = "Give the server's IPv4 address, or a name that resolves to one here"
        return Finding(ADDRESS, url, "fail", f"{host}: {error.strerror or error}", do), None
    return judge_address(url, ip, ours, socket.gethostname(), server_host), ip


def judge_address(url: str, ip: str, ours: str, here: str, there: str) -> Finding:
    """ip: of the server. ours: towards it. here, there: names of the two machines."""
    if ipaddress.ip_address(ip).is_loopback and there not in ("", here):
        return Finding(
            ADDRESS,
            url,
            "warn",
            f"it is reached at {ip}, and its machine calls itself {there}, this one {here}: a "
            "tunnel or a mapped port carries calls, and no weights",
            "Name the server by an address of its own machine",
        )
    return ok(ADDRESS, f"the server at {ip}; its workers meet the learner at {ours}", url)


def own_name(addresses: Sequence[str], environment: Mapping[str, str]) -> Finding | None:
    """What this machine's name says to learner processes on other ones.

    addresses: of all servers. None where everything is on this machine.
    """
    if all(ipaddress.ip_address(ip).is_loopback for ip in addresses):
        return None
    name = socket.gethostname()
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        resolved = ""
    return judge_own_name(name, resolved, environment)


def judge_own_name(name: str, resolved: str, environment: Mapping[str, str]) -> Finding:
    """resolved: empty where the name is not known."""
    chosen = [f"{key}={environment[key]}" for key in _INTERFACE if environment.get(key)]
    if chosen:
        return ok("own name", f"{', '.join(chosen)} chooses the network", name)
    if resolved and not ipaddress.ip_address(resolved).is_loopback:
        return ok("own name", f"resolves to {resolved}", name)
    return Finding(
        "own name",
        name,
        "warn",
        f"resolves to {resolved or 'nothing'}, which other machines cannot reach",
        "With learner processes on several machines set GLOO_SOCKET_IFNAME to the interface "
        "between them (with GPUs NCCL_SOCKET_IFNAME too)",
    )


_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def group_port(url: str, ip: str, port: int) -> Finding:
    """Whether the port of a weight group is free for the server to listen on."""
    state = look_at(ip, port)
    holder = listener(port) if state == "taken" and address_towards(ip) == ip else None
    return judge_port(url, f"{ip}:{port}", state, holder)


def judge_port(url: str, at: str, state: PortState, holder: str | None) -> Finding:
    """holder: who listens there, where that can be seen."""
    if state == "free":
        return ok(GROUP_PORT, f"{at} is free", url)
    if state == "silent":
        found = f"{at} neither accepts nor refuses: something on the way drops what goes there"
        do = "Open it for the learner in the firewall, or choose another group_port"
        return Finding(GROUP_PORT, url, "warn", found, do)
    who = f" by {holder}" if holder else ", by what cannot be seen from here"
    do = "Give the server another group_port in vllm.server.servers, or stop what listens"
    return Finding(GROUP_PORT, url, "fail", f"{at} is taken{who}", do)


def look_at(ip: str, port: int) -> PortState:
    try:
        socket.create_connection((ip, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return "free"
    except OSError:
        return "silent"
    return "taken"


def listener(port: int, proc: Path = Path("/proc")) -> str | None:
    """The process of this machine that listens on a TCP port; None where that is hidden."""
    inodes = {
        fields[9]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, _lines(proc / "net" / table)[1:])
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port
    }
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.glob("[0-9]*"):
        if _holds(process, sockets):
            name = "".join(_lines(process / "comm"))
            return f"{name or 'a process'} (pid {process.name})"
    return None


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(link) in sockets for link in (process / "fd").iterdir())
    except OSError:
        return False


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


RENDEZVOUS, TENSOR = "rendezvous", "one tensor"
# A doctor waits no longer for a side that does not come; a run has `timeout_s`.
_PATIENCE_S = 30.0


class StoredWeights:
    """A source of weights with the shapes of a model, which sends one tensor of a file.

    base: of all weights, where this is a source of the one tensor.
    """

    adapter = None

    def __init__(
        self, shapes: Mapping[str, Shape], name: str, file: Path, base: "StoredWeights | None"
    ) -> None:
        self._shapes, self._name, self._file = shapes, name, file
        self.base = base or self

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return [
            ParameterMeta(name=name, dtype=dtype, shape=list(shape))
            for name, shape in self._shapes.items()
        ]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._file, framework="pt") as tensors:
            yield self._name, tensors.get_tensor(self._name).to(getattr(torch, dtype))


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
    if len(checkpoint_chain(config.model.model, "model.model")) > 1:
        why = "model.model is an adapter: no file has what the server holds after merging"
        return [skipped(check, why, url) for check in (RENDEZVOUS, TENSOR)]
    try:
        stored = stored_tensors(config.model.model)
        name = smallest_matrix(sizes, stored)
    except ContractError as error:
        return [skipped(check, error.found, url) for check in (RENDEZVOUS, TENSOR)]
    file, shape = stored[name].file, stored[name].shape
    every = StoredWeights(sizes.shapes, name, file, None)
    source = StoredWeights({name: shape}, name, file, every)
    patience = PhaseTimeouts.of(min(client.timeout_s, _PATIENCE_S))
    pusher = _pusher(config, client, port, OneSource(source), patience)
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


def _pusher(
    config: Config,
    client: RolloutClient,
    port: int,
    source: OneSource,
    timeouts: PhaseTimeouts | None = None,
) -> WeightPusher:
    transport = transport_of(config)
    size = bucket_bytes_of(config, transport)
    return WeightPusher(client, port, source, transport, size, "full", timeouts)


def _tried(pusher: WeightPusher, client: RolloutClient, name: str) -> list[Finding]:
    url = client.base_url
    try:
        ready = pusher.connect(only_if_free=True)
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
        report = pusher.try_out()
        found = (
            f"{name}, {report.bytes} bytes of {ready.dtype}, went to {ready.world_size - 1} "
            f"worker(s) and is what they hold; version {report.status.weights_version} stays"
        )
        return [met, ok(TENSOR, found, url)]
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


PROBE = "probe"


def require_servers(config: Config) -> Sequence[ServerAddress]:
    """The servers of the config; raises ContractError where it names none."""
    server = config.rollout_matching.vllm.server
    if config.rollout_matching.backend != "server" or server is None:
        raise ContractError(
            "rollout_matching.vllm.mode",
            f"the backend is {config.rollout_matching.backend}, and a probe asks servers",
            "Set it to server and name them in rollout_matching.vllm.server.servers",
        )
    return server.servers


def probe_servers(config: Config, clients: Sequence[RolloutClient]) -> Iterator[Finding]:
    """Push `model.model` to every server, verified in full, and compare answers token by token.

    The prompts are asked before the push too, where the server answers: only then can a
    cache be stale afterwards.

    Raises:
        ContractError: another learner pushes to a server, or one encodes a prompt differently.
        RunError: a push or a call failed.
    """
    loaded = load_model(config)
    for client, address in zip(clients, require_servers(config), strict=True):
        with suppress(*SERVER_ERRORS):
            client.infer(probe_call())
        yield from _probe(config, loaded, client, address.group_port)


def _probe(
    config: Config, loaded: LoadedModel, client: RolloutClient, group_port: int
) -> Iterator[Finding]:
    pusher = _pusher(config, client, group_port, OneSource(MergedWeights(loaded.model)))
    require_exclusive_lease([client])  # the model was loaded since start_checks has looked
    try:
        ready = pusher.connect()
        version = ready.weights_version + 1
        pusher.push(version)
        probe = Probe(loaded, ready.dtype)
        for result in probe.ask(client.infer, version):
            check, url = f"{PROBE} {result.prompt}", client.base_url
            if result.difference is None:
                yield ok(check, f"{result.compared} tokens, as the learner", url)
            else:
                found = f"{result.compared} tokens compared; {probe.describe(result.difference)}"
                do = "Start the server anew and compare again; report it with the server's log"
                yield Finding(check, url, "fail", found, do)
    finally:
        pusher.close()
