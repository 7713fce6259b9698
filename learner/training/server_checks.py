"""The checks of rollout servers before a run. Imports no torch."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from learner.config.schema import Config, wanted_sync_mode
from learner.data.jsonl import build_request
from learner.rollout.client import SERVER_ERRORS, RolloutClient, may_pass, needs_push
from learner.rollout.distribution import rank_chunk_size
from learner.training.checkpoint_checks import longest_prompt
from learner.training.input_checks import (
    Caution,
    Check,
    StartUp,
    T,
    Waiting,
    learner_processes,
    require,
)
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors, ProblemError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.machine import address_towards
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.rollout_config import ServerConfig
from shared_contracts.server_info import Info


def server_checks(run: StartUp) -> list[Check]:
    return [
        Check("servers", partial(_check_reachable, run)),
        Check("settings", partial(_check_settings, run)),
        Check("servers together", partial(_check_together, run)),
        Check("group port", partial(_check_group_ports, run)),
        Check("media", partial(_check_media, run)),
    ]


def reach_servers(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    samples: Sequence[Sample] = (),
    report: Callable[[str], object] = lambda line: None,
) -> list[RolloutClient]:
    """Return clients of the configured servers after `server_checks`; none without servers.

    samples: to which the servers generate answers. report: gets a line for each `Caution`.

    Raises ContractError for the first check that failed, of all servers at once.
    """
    if config.rollout_matching.backend != "server":
        return []
    run = StartUp(config, environment, samples=samples)
    for check in server_checks(run):
        try:
            check.run()
        except Caution as caution:
            for error in caution.errors:
                report(f"Warning: {error}")
        except Waiting:  # the server needs a push before it can answer
            continue
    return require(run.clients, "servers")


def _servers_of(config: Config) -> ServerConfig:
    server = config.rollout_matching.vllm.server
    assert server is not None, "checked with the config"
    return server


def _check_reachable(run: StartUp) -> str:
    clients, infos, of_run = list[RolloutClient](), dict[str, Info](), _servers_of(run.config)
    for entry in of_run.servers:
        RolloutClient(entry.base_url, run.patience_s or of_run.timeout_s).wait_until_pushable()
        client = RolloutClient(entry.base_url, of_run.timeout_s, of_run.infer_timeout_s)
        clients.append(client)
        infos[client.base_url] = client.info()
    run.clients, run.infos = clients, infos
    return "; ".join(map(describe_server, infos.values()))


def _check_settings(run: StartUp) -> str:
    servers, needed = require(run.infos, "servers").items(), 0
    if errors := [e for url, info in servers for e in differences(run.config, url, info)]:
        raise ContractErrors(errors)
    if run.samples:
        needed = longest_prompt(run.config, run.samples)
        needed += run.config.rollout_matching.max_new_tokens
    if cautions := [e for url, info in servers for e in _cautions(run.config, url, info, needed)]:
        raise Caution(cautions)
    return "as in the config"


def _check_together(run: StartUp) -> str:
    sizes = [info.world_size for info in require(run.infos, "servers").values()]
    processes = learner_processes(run.environment)
    each = rank_chunk_size(run.config.rollout_matching.decode_batch_size, sizes, processes)
    return f"{sum(sizes)} device(s); {processes} learner process(es) send {each} requests each"


def _check_group_ports(run: StartUp) -> str:
    servers, infos = _servers_of(run.config).servers, require(run.infos, "servers").values()
    for index, (entry, info) in enumerate(zip(servers, infos, strict=True)):
        if info.owner is None:  # else the server frees the port of its owner
            where = f"rollout_matching.vllm.server.servers[{index}].group_port"
            check_group_port(where, entry.base_url, entry.group_port)
    return ", ".join(str(entry.group_port) for entry in servers)


def _check_media(run: StartUp) -> str:
    """Have every server read an image of each folder and answer; raise all refusals together."""
    clients, requests = require(run.clients, "servers"), sample_requests(run)
    if not requests:
        raise Waiting("waits for data")
    read, refused = [list[RolloutEnvelope]() for _ in clients], list[ContractError]()
    for client, envelopes in zip(clients, read, strict=True):
        for request in requests:
            try:
                envelopes.append(_answer_of(client, request))
            except (Caution, Waiting):
                if not refused:
                    raise
                break  # a refusal ends the run
            except ContractError as error:
                refused.append(error)
    if refused:
        raise ContractErrors(refused)
    run.envelopes = read
    images = sum(len(request.images) for request in requests)
    return f"{images} image(s) of {len(requests)} samples were read"


# A server reads an image of so many folders at most.
_FOLDERS = 32


def sample_requests(run: StartUp) -> list[RolloutInferRequest]:
    template, by_folder = run.config.template, dict[Path, Sample]()
    for sample in run.samples:
        by_folder.setdefault(sample.images[0].parent if sample.images else Path(), sample)
    chosen = spread(list(by_folder.values()), _FOLDERS)
    return [build_request(each, template.prompt, template.system) for each in chosen]


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of `items`, evenly spaced, the first one included."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(count, len(items)))]


def _answer_of(client: RolloutClient, request: RolloutInferRequest) -> RolloutEnvelope:
    """Return a server's answer of one token.

    Raises ContractError if the server refuses the request, `Caution` if the server goes away, and
    `Waiting` if it needs a push first.
    """
    one_token = RequestConfig(max_tokens=1, return_details=True)
    try:
        (envelope,) = client.infer(InferCall(infer_requests=[request], request_config=one_token))
    except SERVER_ERRORS as error:
        if needs_push(error):
            raise Waiting("waits for the first push of the run") from error
        where, found, do = client.base_url, str(error).rstrip("."), "See the server's log"
        if may_pass(error):
            raise Caution([ContractError(where, found, do)]) from error
        faults = (error.problem.errors or []) if isinstance(error, ProblemError) else []
        if any(".images[" in fault["where"] for fault in faults):
            folder = Path(request.images[0]).parent
            found = f"the server cannot read {', '.join(request.images)}: {faults[0]['detail']}"
            do = (
                f"Start the server with --allowed-media-dir {folder}, or a folder above it; on "
                "another machine, mount the images at the same path, readable by its user"
            )
        raise ContractError(where, found, do) from error
    return envelope


_CONNECT_S = 3.0
_RELEASE_S = 5.0  # longest time in which a server releases the port of its last learner


def check_group_port(where: str, base_url: str, port: int) -> None:
    """Raise ContractError if a server cannot listen on its `group_port`.

    On this machine the port is bound and released. On another one a connection is tried, which
    must be refused, as nothing listens there between runs; `Caution` if there is no answer.
    """
    host = urlsplit(base_url).hostname
    assert host is not None, "checked with the config"
    try:
        ip = socket.gethostbyname(host)
        here = address_towards(ip) == ip
    except OSError as error:
        found = f"{host}: {error.strerror or error}"
        raise ContractError(
            where, found, _group_port_fix("Give the server's IPv4 address")
        ) from error
    deadline = time.monotonic() + _RELEASE_S
    while (reason := _port_problem(where, ip, port, here)) is not None:
        if time.monotonic() > deadline:
            fix = _group_port_fix("Name another group_port, or stop what uses this one")
            raise ContractError(where, f"{ip}:{port} {reason}", fix)
        time.sleep(0.1)


def _port_problem(where: str, ip: str, port: int, here: bool) -> str | None:
    """Return why no program can listen on the port, or None. here: `ip` is of this machine."""
    if here:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((ip, port))  # other processes of the run may do so at the same time
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                return "is taken" if taken else f"cannot be bound ({error.strerror})"
        return None
    try:
        socket.create_connection((ip, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        found = f"{ip}:{port} gives no answer ({error}): a firewall may drop packets to it"
        fix = _group_port_fix("Open the port for the learner")
        raise Caution([ContractError(where, found, fix)]) from error
    return "is taken"


def _group_port_fix(first: str) -> str:
    return (
        f"{first}; or use rollout_matching.vllm.mode: colocate or rollout_backend: hf, which need "
        "no port"
    )


def describe_server(info: Info) -> str:
    guard = "on" if info.repeat_terminate.active else "off"
    others = (f", replica {r.index} {r.state}" for r in info.replicas if r.state != "serving")
    return (
        f"{Path(info.model).name}, {len(info.replicas)} replica(s) on {info.world_size} device(s), "
        f"weights {info.weights_version} {info.weights_state}, repeat guard {guard}"
        f"{''.join(others)}"
    )


_FROM_RUN_CONFIG = "Start it with `rollout-server serve --run-config` and the YAML of this run"


def differences(config: Config, base_url: str, info: Info) -> Iterator[ContractError]:
    """Yield the settings that the server and the config share and that differ (REP-06)."""
    where, rollout = f"GET {base_url}/info/", config.rollout_matching
    ours, theirs = rollout.repeat_terminate, info.repeat_terminate
    if ours.enabled != theirs.active or (ours.enabled and ours != theirs.config):
        yield ContractError(
            f"{where} repeat_terminate",
            f"the server's guard is {_guard(theirs.active, theirs.config)}, and "
            f"rollout_matching.repeat_terminate is {_guard(ours.enabled, ours)}",
            _FROM_RUN_CONFIG,
        )
    if rollout.decode_batch_size * info.world_size > info.max_num_seqs * len(info.replicas):
        yield ContractError(
            f"{where} max_num_seqs",
            f"each of {len(info.replicas)} replicas decodes {info.max_num_seqs} sequences at "
            f"once, fewer than rollout_matching.decode_batch_size {rollout.decode_batch_size} "
            f"on each of {info.world_size} devices",
            f"{_FROM_RUN_CONFIG}, or lower decode_batch_size",
        )
    stated = rollout.vllm.max_model_len
    if stated is not None and info.max_model_len is not None and info.max_model_len < stated:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and rollout_matching.vllm.max_model_len is {stated}",
            _FROM_RUN_CONFIG,
        )
    if wanted_sync_mode(config) == "adapter" and not info.enable_lora:
        yield ContractError(
            f"{where} enable_lora",
            f"is false, and rollout_matching.vllm.sync.mode {rollout.vllm.sync.mode} resolves to "
            "adapter",
            f"{_FROM_RUN_CONFIG}, or set sync.mode to full",
        )
    transport = rollout.vllm.sync.transport
    if transport not in ("auto", "gloo", info.weight_transport):  # every server takes gloo
        yield ContractError(
            f"{where} weight_transport",
            f"is {info.weight_transport}, and rollout_matching.vllm.sync.transport is {transport}",
            f"{_FROM_RUN_CONFIG}, or set sync.transport to gloo",
        )


def _cautions(config: Config, base_url: str, info: Info, needed: int) -> Iterator[ContractError]:
    """Yield settings of a server that a run only reports. needed: tokens of prompt and answer."""
    where, vllm = f"GET {base_url}/info/", config.rollout_matching.vllm
    if info.max_model_len is not None and info.max_model_len < needed:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and a prompt with max_new_tokens has {needed} tokens: its "
            "answer is cut short, or refused",
            f"Set rollout_matching.vllm.max_model_len to {needed} or more, and restart it",
        )
    stated = vllm.max_model_len
    if stated is not None and info.max_model_len is not None and info.max_model_len > stated:
        yield ContractError(
            f"{where} max_model_len",
            f"is {info.max_model_len}, and rollout_matching.vllm.max_model_len is {stated}",
            _FROM_RUN_CONFIG,
        )
    if info.enable_prefix_caching not in (None, vllm.enable_prefix_caching):
        yield ContractError(
            f"{where} enable_prefix_caching",
            f"is {info.enable_prefix_caching}, and rollout_matching.vllm.enable_prefix_caching is "
            f"{vllm.enable_prefix_caching}",
            _FROM_RUN_CONFIG,
        )


def _guard(active: bool, config: RepeatTerminateConfig) -> str:
    if not active:
        return "configured but inactive" if config.enabled else "off"
    return config.model_dump_json(exclude_defaults=True)
