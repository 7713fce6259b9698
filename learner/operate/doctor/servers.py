"""Server checks of the doctor alone: token, versions, GPUs, owner, prompts, one rollout."""

import os
import time
from collections.abc import Iterable, Mapping

from transformers import ProcessorMixin

from learner.models.load import read_processor
from learner.models.loading import loading
from learner.models.prompts import encode_request
from learner.operate.doctor.machine import (
    Machine,
    check_overlap,
    compare_versions,
    versions_here,
)
from learner.rollout.answers import check_prompt_ids
from learner.rollout.client import RolloutClient
from learner.rollout.policy import request_settings
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.stages.formats import answer_format
from learner.training.checks import Caution, Check, require
from learner.training.input_checks import StartUp
from learner.training.server_checks import sample_requests
from shared_contracts.errors import ContractError
from shared_contracts.infer import InferCall
from shared_contracts.server_info import Info, given_token

# Timeout of connections, instead of a run's `timeout_s`.
PATIENCE_S = 5.0


def answer_checks(run: StartUp, machine: Machine) -> list[Check]:
    """Return checks of servers that passed `server_checks`."""

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


def _check_prompts(run: StartUp) -> str:
    """Compare the prompt ids of every server with the learner's (ROLL-01)."""
    processor, requests = _processor(run), sample_requests(run)
    for envelopes in require(run.envelopes, "media"):
        for request, envelope in zip(requests, envelopes, strict=True):
            theirs = envelope.response.prompt_token_ids
            assert theirs is not None, "requested with return_details"
            ours = encode_request(processor, request).ids.tolist()
            check_prompt_ids(str(request.uuid), ours, theirs, processor.tokenizer)
    return f"{len(requests)} prompts agree"


def _check_rollout(run: StartUp) -> str:
    """Request one answer of the first server, with the run's decoding settings."""
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


def check_owner(servers: Mapping[str, Info]) -> str:
    """Raise `Caution` if a learner pushes to a server."""
    for url, info in servers.items():
        if info.owner is not None:
            pusher = info.owner or "a learner"
            found = f"{pusher} pushes to this server, or was killed and left it so"
            do = "Stop it before you start a run: the newest learner takes a server over"
            raise Caution([ContractError(url, found, do)])
    return "no learner pushes to the servers"
