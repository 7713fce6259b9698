"""Addresses and ports of the weights: how each side reaches the other."""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from learner.doctor.findings import Finding, ok
from shared_contracts.addresses import address_towards

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
