"""`learner probe`: push a checkpoint to every server and hold their answers against it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.table import Table

from learner.backends import bucket_bytes_of, transport_of
from learner.config import Config
from learner.model.load import LoadedModel, load_model
from learner.rollout.alone import require_alone
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.sync.probe import Probe, probe_call
from learner.sync.push import WeightPusher
from learner.sync.source import MergedWeights, OneSource
from shared_contracts.errors import ContractError
from shared_contracts.rollout_config import ServerAddress


@dataclass(frozen=True)
class Finding:
    """What one prompt showed of one server. difference: in words; None where there is none."""

    server: str
    prompt: str
    compared: int
    difference: str | None


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


def probe_servers(config: Config, clients: Sequence[RolloutClient]) -> list[Finding]:
    """Push `model.model` to every server, verified in full, and probe its answers.

    The prompts are asked before the push too, where the server answers: only then can a
    cache be stale afterwards.

    Raises:
        ContractError: another learner pushes to a server, or one encodes a prompt differently.
        RunError: a push or a call failed.
    """
    loaded = load_model(config)
    findings: list[Finding] = []
    for client, address in zip(clients, require_servers(config), strict=True):
        with suppress(*SERVER_ERRORS):
            client.infer(probe_call())
        findings += _probe(config, loaded, client, address.group_port)
    return findings


def _probe(
    config: Config, loaded: LoadedModel, client: RolloutClient, group_port: int
) -> list[Finding]:
    transport = transport_of(config)
    pusher = WeightPusher(
        client,
        group_port,
        OneSource(MergedWeights(loaded.model)),
        transport,
        bucket_bytes_of(config, transport),
        "full",
    )
    require_alone([client])  # since preflight has looked, the model was loaded
    try:
        ready = pusher.connect()
        version = ready.weights_version + 1
        pusher.push(version)
        probe = Probe(loaded, ready.dtype)
        return [
            Finding(
                client.base_url,
                result.prompt,
                result.compared,
                None if result.difference is None else probe.describe(result.difference),
            )
            for result in probe.ask(client.infer, version)
        ]
    finally:
        pusher.close()


def table(findings: Sequence[Finding]) -> Table:
    """Findings as a person reads them."""
    shown = Table("server", "prompt", "tokens", "result")
    for finding in findings:
        result = finding.difference or "as the learner"
        shown.add_row(finding.server, finding.prompt, str(finding.compared), result)
    return shown
