"""Opens the backend of a run. Only this module depends on its kind (ARCH-03)."""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from learner.config import Config, dump_mapping, dump_resolved
from learner.config.schema import resolved_sync_mode
from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.models.load import LoadedModel, Offload
from learner.models.prompts import encode_request
from learner.rollout.backend import Journal, RolloutBackend
from learner.rollout.client import RolloutClient
from learner.rollout.colocate import Placement, media_dirs, server_settings
from learner.rollout.colocated_backend import ColocatedBackend
from learner.rollout.hf import HfBackend
from learner.rollout.server_pool import ServerPool
from learner.rollout.server_process import ServerProcess, SupervisedServer, free_ports
from learner.rollout.sync.probe import ProofOfEffect
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import GatheredWeights, SyncMode
from learner.runs.atomic_files import publish_text
from learner.training.checkpoint_checks import context_of_run
from learner.training.server_checks import differences
from learner.types import Sample
from shared_contracts.checkpoints import BUCKET_BYTES, MIB
from shared_contracts.machine import CUDA_VISIBLE
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from shared_contracts.weights import Transport

# Imports, weights, and on GPUs the capture of graphs.
COLOCATED_START_S = 900.0
COLOCATED_TIMEOUT_S = 240.0


def open_backend(
    config: Config,
    loaded: LoadedModel,
    clients: Sequence[RolloutClient],
    folder: Path,
    samples: Sequence[Sample],
    placement: Placement | None = None,
    optimizer: Optimizer | None = None,
    peers: Peers = SINGLE_PROCESS,
) -> RolloutBackend:
    """Return the backend of `config`, ready for its first push. The caller closes it.

    clients: of the configured servers, in the order of the config; none without servers.
    folder: of the run; a colocated server's settings and log go there.
    samples: all samples of the run; a colocated server may read their images.
    placement: of a colocated server. optimizer: its state may be moved to the host for it.

    Raises ContractError for faults that the checks cannot find, as a server that does not start.
    """
    match config.rollout_matching.backend:
        case "hf":
            return _hf(config, loaded)
        case "server":
            server = config.rollout_matching.vllm.server
            assert server is not None, "checked with the config"
            return _over_servers(config, loaded, clients, server.servers, peers)
        case "colocate":
            assert placement is not None, "found by input_checks"
            return _colocate(config, loaded, folder, samples, placement, optimizer, peers)


def _hf(config: Config, loaded: LoadedModel) -> HfBackend:
    rollout, model = config.rollout_matching, loaded.model
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(plain, PreTrainedModel)
    return HfBackend(
        plain,
        partial(encode_request, loaded.processor),
        loaded.processor.tokenizer,
        rollout.repeat_terminate,
        rollout.decode_batch_size,
        rollout.num_beams or 1,
        torch.bfloat16 if config.model.torch_dtype == "bfloat16" else None,
        rollout.vllm.max_model_len,
    )


def _over_servers(
    config: Config,
    loaded: LoadedModel,
    clients: Sequence[RolloutClient],
    servers: Sequence[ServerAddress],
    peers: Peers = SINGLE_PROCESS,
    own: SupervisedServer | None = None,
) -> ServerPool:
    """Return the backend; process 0 forms the weight groups. Versions continue the servers'."""
    fallback = config.rollout_matching.vllm.sync.fallback_to_full
    if config.training.data_parallel == "ddp":
        gathered = None
        mode = SyncMode.of(loaded.model, resolved_sync_mode(config, peers.count), fallback)
    else:  # no process has whole weights: they are gathered for a push
        gathered = GatheredWeights(loaded.model, sends=peers.rank == 0)
        mode = SyncMode(gathered, None, fallback)
    journal = Journal(servers, mode.state)
    together = config.rollout_matching.backend == "colocate" and peers.count > 1
    transport = transport_of(config)
    bucket_bytes = bucket_bytes_of(config, transport)
    pushing = peers if together else SINGLE_PROCESS
    pushers = [
        WeightPusher(client, entry.group_port, mode, transport, bucket_bytes, pushing)
        for client, entry in zip(clients, servers, strict=True)
        if peers.rank == 0 or together
    ]
    backend = ServerPool(
        clients,
        pushers,
        config.rollout_matching.decode_batch_size,
        journal,
        differences=partial(differences, config),
        peers=peers,
        gather=None if gathered is None else gathered.gather,
        proof=ProofOfEffect(loaded, config.rollout_matching.vllm.sync.verify),
        together=pushers[0] if together else None,
        check=own.check if own else lambda: None,
        least_wait_s=COLOCATED_START_S if own else 0.0,  # its port opens after imports and a merge
    )
    backend.repeat_terminate_active = all(
        client.info().repeat_terminate.active for client in clients
    )
    backend.connect()
    return backend


def transport_of(config: Config) -> Transport:
    """Resolve `auto`: `ipc` for a colocated server, else `nccl` with GPUs and `gloo` without."""
    asked = config.rollout_matching.vllm.sync.transport
    if asked != "auto":
        return asked
    if config.rollout_matching.backend == "colocate":
        return "ipc"
    return "nccl" if torch.cuda.is_available() else "gloo"


def bucket_bytes_of(config: Config, transport: Transport) -> int:
    """Return the size of the buckets of a push.

    By default they are small if a CPU packs them: a push with 64 MiB took 1.2 times as long. On a
    GPU they are large, so that vLLM's loaders are called less often.
    """
    asked = config.rollout_matching.vllm.sync.bucket_mib
    if asked is not None:
        return asked * MIB
    return BUCKET_BYTES if transport == "nccl" else 16 * MIB


def _colocate(
    config: Config,
    loaded: LoadedModel,
    folder: Path,
    samples: Sequence[Sample],
    placement: Placement,
    optimizer: Optimizer | None,
    peers: Peers,
) -> ColocatedBackend:
    wanted = config.rollout_matching.offload
    offload = Offload(
        model=loaded.model if wanted.enabled and wanted.offload_model else None,
        optimizer=optimizer if wanted.enabled and wanted.offload_optimizer else None,
    )
    own: SupervisedServer | None = None

    def start() -> tuple[str, str, int]:
        nonlocal own
        token = secrets.token_urlsafe(32)
        own = _start_server(config, placement, folder, samples, token)
        stack.callback(own.stop)
        return own.base_url, token, free_ports(1)[0]

    with ExitStack() as stack:
        with offload.room():
            base_url, token, group_port = broadcast_from_rank0(peers, start)
            client = RolloutClient(base_url, COLOCATED_TIMEOUT_S, token=token)
            address = ServerAddress(base_url=base_url, group_port=group_port)
            servers = _over_servers(config, loaded, [client], [address], peers, own)
            memory = client if placement.gpus else None
            backend = ColocatedBackend(servers, own, offload.room, memory, peers)
            backend.sleep()
        stack.pop_all()
    return backend


def _start_server(
    config: Config, placement: Placement, folder: Path, samples: Sequence[Sample], token: str
) -> SupervisedServer:
    settings, run = folder / "rollout_server.yaml", folder / "rollout_server_run.yaml"
    own = server_settings(
        config,
        placement,
        media_dirs(samples),
        transport_of(config),
        context_of_run(config, samples),
    )
    publish_text(settings, dump_mapping(own))
    publish_text(run, dump_resolved(config))
    options = ["--config", str(settings), "--run-config", str(run)]
    environment = os.environ | {TOKEN_VARIABLE: token}
    environment.pop(TOKEN_FILE_VARIABLE, None)  # it is for servers that the user has started
    if placement.gpus:
        environment.pop(CUDA_VISIBLE, None)  # the settings name GPUs by their ids on this machine
    (port,) = free_ports(1)
    log = folder / "rollout_server.log"
    return SupervisedServer(
        lambda: ServerProcess(options, log, port, environment), COLOCATED_START_S
    )
