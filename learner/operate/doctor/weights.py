"""Checks of the checkpoint's weights: all parameters, trained coordinate rows, a push."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from learner.config.schema import Config, LoraTuner
from learner.data.checkpoint import Checkpoint
from learner.models.coord_tokens import untrained
from learner.models.load import check_parameters, load_model
from learner.models.loading import loading
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.training.backends import bucket_bytes_of, transport_of
from learner.training.checks import Caution, Check, require
from learner.training.input_checks import StartUp, generates
from shared_contracts.errors import ContractError


def weight_checks(run: StartUp) -> list[Check]:
    return [
        Check("weights", lambda: _check_weights(run)),
        Check("coordinate rows", lambda: _check_rows(run)),
    ]


def _check_weights(run: StartUp) -> str:
    folder = require(run.checkpoint, "checkpoint")
    check_parameters(folder)
    return f"{folder} has every parameter of its config"


def _check_rows(run: StartUp) -> str:
    """Check that the rows of the coordinate tokens look trained; raise `Caution` with a remedy."""
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
    """Return the reason why the coordinate tokens of a checkpoint look untrained, or None."""
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
