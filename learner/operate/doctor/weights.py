"""The way of weights: addresses, ports, and a whole push.

`push_checkpoint` is the only check that changes the weights of the servers.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from learner.config.schema import Config
from learner.models.load import load_model
from learner.operate.doctor.findings import Finding, ok
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.sync.probe import ProofOfEffect, WeightsDiffer, probe_call
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.training.backends import bucket_bytes_of, transport_of
from shared_contracts.errors import ContractError
from shared_contracts.machine import address_towards
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import Info

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


def owned(info: Info, url: str) -> Finding | None:
    """Return a warning if a learner pushes to a server, or None."""
    if info.owner is None:
        return None
    return Finding(
        GROUP_PORT,
        url,
        "warn",
        f"{info.owner or 'a learner'} pushes to this server, or was killed and left it so",
        "Stop it before you start a run: the newest learner takes a server over",
    )


PUSH = "push"


def require_servers(config: Config) -> Sequence[ServerAddress]:
    """Return the servers of the config; raises ContractError if it names none."""
    server = config.rollout_matching.vllm.server
    if config.rollout_matching.backend != "server" or server is None:
        raise ContractError(
            "rollout_matching.vllm.mode",
            f"the backend is {config.rollout_matching.backend}, and --push needs servers",
            "Set it to server and name them in rollout_matching.vllm.server.servers",
        )
    return server.servers


def push_checkpoint(config: Config, clients: Sequence[RolloutClient]) -> Iterator[Finding]:
    """Push `model.model` to every server and compare log-probabilities of answers (SYNC-06).

    The prompts are asked before the push, too, if the server answers: only then can a cache be
    stale afterwards.

    Raises:
        ContractError: another learner takes a server over, or one encodes a prompt differently.
        RunError: a push or a call failed.
    """
    loaded = load_model(config)
    proof, mode = ProofOfEffect(loaded, "full"), SyncMode(MergedWeights(loaded.model), None, False)
    transport = transport_of(config)
    bucket_bytes = bucket_bytes_of(config, transport)
    for client, address in zip(clients, require_servers(config), strict=True):
        with suppress(*SERVER_ERRORS):
            client.infer(probe_call())
        pusher = WeightPusher(client, address.group_port, mode, transport, bucket_bytes)
        try:
            ready = pusher.connect()
            version = ready.weights_version + 1
            report = pusher.push(version)
            found = proof.check(client.base_url, client.infer(probe_call(version)), ready.dtype)
        except WeightsDiffer as error:
            do = "Start the server anew and push again; report it with the server's log"
            yield Finding(PUSH, client.base_url, "fail", str(error), do)
        else:
            text = (
                f"{report.bytes} bytes of {ready.dtype} in {report.seconds['total']:.2f} s over "
                f"{ready.transport} to {ready.world_size - 1} worker(s); log-probabilities differ "
                f"from the trainer's by {found:.2g} nats in the mean; weights {version}"
            )
            yield ok(PUSH, text, client.base_url)
        finally:
            pusher.close()
