"""Server checks of the doctor alone: token, versions, prompts, one rollout."""

import os
import time
from collections.abc import Iterable, Mapping

from transformers import ProcessorMixin

from learner.models.load import read_processor
from learner.models.prompts import encode_request
from learner.operate.doctor.machine import (
    MachineChecks,
    check_overlap,
    compare_versions,
    versions_here,
)
from learner.rollout.answers import check_prompt_ids
from learner.rollout.client import RolloutClient
from learner.rollout.policy import request_settings
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.stages.formats import answer_format
from learner.training.backends import transport_of
from learner.training.checks import Caution, Check, require
from learner.training.input_checks import StartUp
from learner.training.server_checks import sample_requests
from shared_contracts.errors import ContractError
from shared_contracts.infer import InferCall
from shared_contracts.server_info import Info, given_token
from shared_contracts.weights import Transport

# Timeout of connections, instead of a run's `timeout_s`.
PATIENCE_S = 5.0


class AnswerChecks:
    """Checks of servers that passed `server_checks`."""

    def __init__(self, run: StartUp, machine: MachineChecks) -> None:
        self._config = run.config
        self._run = run
        self._machine = machine

    def checks(self) -> list[Check]:
        return [
            Check("token", lambda: check_token(self._infos(), given_token(os.environ))),
            Check("versions there", lambda: compare_versions(versions_here(), self._infos())),
            Check("gpu overlap", self._check_overlap),
            Check("transport", lambda: check_transport(self._infos(), transport_of(self._config))),
            Check("owner", lambda: check_owner(self._infos())),
            Check("prompt", self._check_prompts),
            Check("rollout", self._check_rollout),
        ]

    def _infos(self) -> dict[str, Info]:
        return require(self._run.infos, "servers")

    def _check_overlap(self) -> str:
        visible = require(self._machine.visible, "gpus")
        return check_overlap(visible, self._machine.use, self._infos())

    def _check_prompts(self) -> str:
        """Compare the prompt ids of every server with the learner's (ROLL-01)."""
        processor, requests = self._processor(), sample_requests(self._run)
        for envelopes in require(self._run.envelopes, "media"):
            for request, envelope in zip(requests, envelopes, strict=True):
                theirs = envelope.response.prompt_token_ids
                assert theirs is not None, "requested with return_details"
                ours = encode_request(processor, request).ids.tolist()
                check_prompt_ids(str(request.uuid), ours, theirs, processor.tokenizer)
        return f"{len(requests)} prompts agree"

    def _check_rollout(self) -> str:
        """Request one answer of the first server, with the run's decoding settings."""
        require(self._run.envelopes, "media")
        (client, *_), request = require(self._run.clients, "servers"), sample_requests(self._run)
        seed = request_seed(rollout_seed_base(self._config.training.seed, 0), 0, 0)
        decoding = request_settings(self._config).config.model_copy(update={"seed": seed})
        began = time.monotonic()
        call = InferCall(infer_requests=request[:1], request_config=decoding)
        (envelope,) = client.infer(call)
        seconds = time.monotonic() - began
        (choice,) = envelope.response.choices
        assert choice.token_ids is not None, "requested with return_details"
        parsed = answer_format(self._config).parse(choice.token_ids, self._processor().tokenizer)
        found = f"{len(parsed.objects)} object(s)" + (f" ({parsed.fault})" if parsed.fault else "")
        tokens = f"{len(choice.token_ids)} tokens in {seconds:.2f} s"
        return f"{tokens}, ended by {choice.finish_reason}; the parser finds {found}"

    def _processor(self) -> ProcessorMixin:
        folder = self._config.model.model
        try:
            return read_processor(folder)
        except (OSError, ValueError) as error:
            do = "Give the folder of a checkpoint saved with its processor"
            raise ContractError(str(folder), str(error), do) from error


def check_token(servers: Iterable[str], token: str | None) -> str:
    """Raise `Caution` if the learner has a token and a server takes calls without one."""
    if token is None:
        return "none is wanted, none is given"
    for url in servers:
        with RolloutClient(url, PATIENCE_S, token="") as client:
            try:
                client.info()
            except ContractError:
                continue
        found = "a token is set here, and the server takes calls without one"
        do = "Start the server with the token, or unset it here"
        raise Caution([ContractError(url, found, do)])
    return "accepted"


def check_transport(servers: Mapping[str, Info], ours: Transport) -> str:
    """Raise ContractError unless learner and servers have the same weight transport."""
    for url, info in servers.items():
        if info.weight_transport != ours:
            raise ContractError(
                f"GET {url}/info/ weight_transport",
                f"its weights travel over {info.weight_transport}, the learner's over {ours}",
                "Start it with `--run-config` and the YAML of this run, or set "
                "rollout_matching.vllm.sync.transport",
            )
    return ours


def check_owner(servers: Mapping[str, Info]) -> str:
    """Raise `Caution` if a learner pushes to a server."""
    for url, info in servers.items():
        if info.owner is not None:
            pusher = info.owner or "a learner"
            found = f"{pusher} pushes to this server, or was killed and left it so"
            do = "Stop it before you start a run: the newest learner takes a server over"
            raise Caution([ContractError(url, found, do)])
    return "no learner pushes to the servers"
