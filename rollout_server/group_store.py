"""The rendezvous store of a gloo weight group, held by the server process."""

import errno
import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from rollout_server.problems import refusal
from shared_contracts.weights import attempt_key


def open_group_store(host: str, port: int, timeout_s: float, attempt: str = "") -> TCPStore:
    """A store on exactly `host:port`, open for as long as the object lives; blocking.

    attempt: of the call it is for; a learner looks for it, and meets nobody at a store of
        another one.

    Raises the `group-port-taken` problem when the port is not free, `invalid-request` when
    the address is none of this machine, `weight-transfer-timeout` when the time is too short
    even to open it.
    """
    listener = _listen(host, port)
    try:
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except DistError:
        found = f"server: could not open its store at {host}:{port} within {timeout_s:g} s"
        raise refusal("weight-transfer-timeout", found, "timeout_s") from None
    store.set(attempt_key(attempt), "")
    return store


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        found = f"server: cannot listen on {host}:{port} ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            do = "give this server another group_port"
            raise refusal("group-port-taken", f"{found}; {do}", "port") from None
        do = "name an address of the server"
        raise refusal("invalid-request", f"{found}; {do}", "host") from None
    except TypeError as error:  # it cannot even be looked up
        listener.close()
        raise refusal("invalid-request", f"server: no address ({error})", "host") from None
    listener.listen()
    return listener
