"""Whether a server answers, lets the learner in and is what the config takes it for.

`check_answers`: what it makes of the run's own samples: their images, their prompts, an answer.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import ProcessorMixin

from learner.config.schema import Config
from learner.data.jsonl import build_request
from learner.models.packed_forward import encode_request
from learner.operate.doctor.findings import Finding, of_error, ok, skipped
from learner.operate.doctor.inputs import spread
from learner.rollout.answers import check_prompt_ids
from learner.rollout.client import SERVER_ERRORS, RolloutClient, needs_push
from learner.rollout.distribution import rank_chunk_size
from learner.rollout.policy import asking_of
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.tokens import Tokenizer
from learner.training.start_checks import differences, learner_processes
from learner.types import Sample, lead_in
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest
from shared_contracts.rollout_config import ServerAddress, ServerConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Info, given_token
from shared_contracts.weights import Transport

HTTP, TOKEN, SETTINGS, TOGETHER = "http", "token", "settings", "servers together"
# How long a server that is not there is waited for; a run waits for `timeout_s`.
PATIENCE_S = 5.0
_WAITS = f"waits for {TOKEN}"


@dataclass(frozen=True)
class Reached:
    """info: None where the server is not there, not ready or lets nobody in."""

    address: ServerAddress
    findings: list[Finding]
    client: RolloutClient | None = None
    info: Info | None = None


def reach(address: ServerAddress, server: ServerConfig, closing: ExitStack) -> Reached:
    """Check a server's health and token, and get its `/info/`.

    closing: closes the client at its end.
    """
    url = address.base_url
    try:
        given_by = _token_source(os.environ)
    except ContractError as error:
        return Reached(address, [*of_error(TOKEN, error, url), skipped(HTTP, _WAITS, url)])
    client = RolloutClient(url, server.timeout_s, server.infer_timeout_s)
    closing.callback(client.close)
    try:
        with RolloutClient(url, min(server.timeout_s, PATIENCE_S)) as looking:
            looking.wait_until_pushable()
    except ContractError as error:
        return Reached(address, of_error(HTTP, error, url))
    there = ok(HTTP, "healthy", url)
    try:
        wanted = _wants_token(url)
        info = client.info()
    except ContractError as error:
        return Reached(address, [there, *of_error(TOKEN, error, url)])
    except SERVER_ERRORS as error:
        do = "Check that a rollout server of this release, and nothing else, answers there"
        return Reached(address, [there, Finding(TOKEN, url, "fail", str(error), do)])
    return Reached(address, [there, judge_token(wanted, given_by, url)], client, info)


def _wants_token(url: str) -> bool:
    """Return whether the server refuses a call without a token. Raises SERVER_ERRORS."""
    try:
        RolloutClient(url, PATIENCE_S, token="").info()
    except ContractError:
        return True
    return False


def _token_source(environment: Mapping[str, str]) -> str:
    """The variable that gives the token of calls; empty without one.

    Raises ContractError for a token that cannot be read or sent.
    """
    if given_token(environment) is None:
        return ""
    return TOKEN_FILE_VARIABLE if environment.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE


def judge_token(wanted: bool, given_by: str, url: str) -> Finding:
    """Of a token that the server did not refuse. given_by: its variable; empty without one."""
    if wanted or not given_by:
        return ok(TOKEN, "accepted" if wanted else "none is wanted, none is given", url)
    found = f"{given_by} is set, and the server takes calls without a token"
    do = "Start the server with the token too, or unset it here"
    return Finding(TOKEN, url, "warn", found, do)


def judge_settings(
    config: Config, url: str, info: Info, transport: Transport, needed: int = 0
) -> list[Finding]:
    """The server's settings beside those of the config.

    needed: tokens of the longest prompt with the longest answer; 0 where that is not known.
    """
    wrong = differences(config, url, info)
    findings = [finding for error in wrong for finding in of_error(SETTINGS, error)]
    if info.weight_transport != transport:
        findings.append(
            Finding(
                SETTINGS,
                url,
                "fail",
                f"its weights travel over {info.weight_transport}, the learner's over {transport}",
                "Start it with `--run-config` and the YAML of this run, or set "
                "rollout_matching.vllm.sync.transport",
            )
        )
    if info.max_model_len is not None and info.max_model_len < needed:
        found = (
            f"a sequence has at most {info.max_model_len} tokens there, and the longest prompt "
            f"with max_new_tokens has {needed}: its answer is cut short, or refused"
        )
        do = f"Set rollout_matching.vllm.max_model_len to {needed} or more, and restart it"
        findings.append(Finding(SETTINGS, url, "warn", found, do))
    return findings or [ok(SETTINGS, describe(info), url)]


def judge_together(
    config: Config, infos: Sequence[Info], environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Whether the servers together can keep every learner process busy (DIST-04).

    environment: with WORLD_SIZE, which only a launcher sets.
    """
    batch, sizes = config.rollout_matching.decode_batch_size, [info.world_size for info in infos]
    try:
        processes = learner_processes(environment)
        each = rank_chunk_size(batch, sizes, processes)
    except ContractError as error:
        return of_error(TOGETHER, error)
    found = (
        f"{sum(sizes)} devices; with {processes} learner process(es), which WORLD_SIZE=N says "
        f"otherwise, {each} requests at once of each"
    )
    return [ok(TOGETHER, found)]


def describe(info: Info) -> str:
    guard = "on" if info.repeat_terminate.active else "off"
    return (
        f"{Path(info.model).name}, {len(info.replicas)} replica(s) on {info.world_size} device(s), "
        f"weights {info.weights_version} {info.weights_state}, repeat guard {guard}"
    )


MEDIA, PROMPT, ROLLOUT = "media", "prompt", "rollout"
# Samples whose images a server is asked to read: one of each folder first.
ASKED = 4


def choose(samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose images are in as many folders as can be, spread over the data."""
    by_folder: dict[Path, Sample] = {}
    for sample in samples:
        by_folder.setdefault(sample.images[0].parent if sample.images else Path(), sample)
    chosen = spread(list(by_folder.values()), ASKED)
    more = [sample for sample in spread(samples, ASKED) if sample not in chosen]
    return [*chosen, *more][:ASKED]


def check_answers(
    config: Config, client: RolloutClient, samples: Sequence[Sample], processor: ProcessorMixin
) -> list[Finding]:
    """Ask for one token of a few samples, then for a whole answer to one.

    samples: none where the data cannot be read.
    """
    url = client.base_url
    if not samples:
        return [skipped(check, "waits for data", url) for check in (MEDIA, PROMPT, ROLLOUT)]
    chosen = choose(samples)
    asking = asking_of(config)
    requests = [build_request(sample, asking.prompt, asking.system) for sample in chosen]
    one_token = RequestConfig(max_tokens=1, return_details=True)
    try:
        envelopes = client.infer(InferCall(infer_requests=requests, request_config=one_token))
    except SERVER_ERRORS as error:
        later = [skipped(check, f"waits for {MEDIA}", url) for check in (PROMPT, ROLLOUT)]
        return [*unanswered(error, requests, url), *later]
    except ContractError as error:
        later = [skipped(check, f"waits for {MEDIA}", url) for check in (PROMPT, ROLLOUT)]
        return [*of_error(MEDIA, error, url), *later]
    read = ok(MEDIA, f"{_count(requests)} image(s) of {len(requests)} samples were read", url)
    return [
        read,
        prompts(chosen, requests, envelopes, processor, url),
        _rollout(config, client, requests[0], processor.tokenizer, url),
    ]


def unanswered(error: RunError, requests: Sequence[RolloutInferRequest], url: str) -> list[Finding]:
    """Why a call for a token of each request came to nothing."""
    if needs_push(error):
        return [skipped(MEDIA, f"{error}; the first push of the run mends it", url)]
    if not isinstance(error, ProblemError):
        return [Finding(MEDIA, url, "fail", str(error), "See the server's log")]
    faults = [fault for fault in error.problem.errors or [] if ".images[" in fault["where"]]
    if not faults:
        return [Finding(MEDIA, url, "fail", str(error), _remedy(error.problem))]
    unread: dict[tuple[str, Path], list[str]] = {}
    for fault in faults:
        image = _image_at(fault["where"], requests)
        unread.setdefault((fault["detail"], Path(image).parent), []).append(image)
    return [_unread(detail, images, url) for (detail, _), images in unread.items()]


def _unread(detail: str, images: Sequence[str], url: str) -> Finding:
    """images: of one folder, refused for the same reason."""
    do = (
        f"Start the server with --allowed-media-dir {Path(images[0]).parent}, or a folder above it"
        if "--allowed-media-dir" in detail
        else "Mount the images at the same path on the server's machine, readable by its user"
    )
    more = f" (nor {len(images) - 1} more there)" if len(images) > 1 else ""
    found = f"the server cannot read {images[0]}{more}: {detail}"
    return Finding(MEDIA, url, "fail", found, do)


def _remedy(problem: Problem) -> str:
    if problem.status == 413:
        return "Start the server with a larger --max-body-mib"
    if "tokens" in problem.detail:
        return "Raise the server's context (vllm.max_model_len), or lower max_new_tokens"
    return "See the server's log"


def _image_at(where: str, requests: Sequence[RolloutInferRequest]) -> str:
    """Of a spot such as `infer_requests[3].images[0]`."""
    request, image = (int(part.partition("]")[0]) for part in where.split("[")[1:3])
    return requests[request].images[image]


def prompts(
    samples: Sequence[Sample],
    requests: Sequence[RolloutInferRequest],
    envelopes: Sequence[RolloutEnvelope],
    processor: ProcessorMixin,
    url: str,
) -> Finding:
    """Both sides have encoded the same ids, images included (ROLL-01)."""
    counted = []
    for sample, request, envelope in zip(samples, requests, envelopes, strict=True):
        theirs = envelope.response.prompt_token_ids
        assert theirs is not None, "asked for with return_details"
        try:
            ours = encode_request(processor, request).ids.tolist()
        except ContractError as error:
            found = f"{error.where}: the server has read an image that this side cannot"
            do = "Mount the images at the same path here, readable by this user"
            return Finding(PROMPT, url, "fail", f"{found}: {error.found}", do)
        try:
            check_prompt_ids(sample.sample_id, ours, theirs, processor.tokenizer)
        except ContractError as error:
            return Finding(PROMPT, url, "fail", f"{error.where}: {error.found}", error.do)
        counted.append(len(theirs))
    lengths = " to ".join(str(length) for length in sorted({min(counted), max(counted)}))
    return ok(PROMPT, f"{len(counted)} prompts of {lengths} tokens agree", url)


def _rollout(
    config: Config,
    client: RolloutClient,
    request: RolloutInferRequest,
    tokenizer: Tokenizer,
    url: str,
) -> Finding:
    """One answer as the run would ask for it."""
    seed = request_seed(rollout_seed_base(config.training.seed, 0), 0, 0)
    decoding = asking_of(config).config.model_copy(update={"seed": seed})
    began = time.monotonic()
    try:
        (envelope,) = client.infer(InferCall(infer_requests=[request], request_config=decoding))
    except ProblemError as error:
        return Finding(ROLLOUT, url, "fail", str(error), _remedy(error.problem))
    except (ContractError, RunError) as error:
        return Finding(ROLLOUT, url, "fail", str(error), "See the server's log")
    return judge_answer(envelope, tokenizer, time.monotonic() - began, url)


def judge_answer(
    envelope: RolloutEnvelope, tokenizer: Tokenizer, seconds: float, url: str
) -> Finding:
    """What came of it, and what the parser says."""
    (choice,) = envelope.response.choices
    assert choice.token_ids is not None, "asked for with return_details"
    parsed = parse_rollout(choice.token_ids, tokenizer)
    ended = (
        "the repeat guard"
        if choice.index in envelope.coordexp.repeat_terminated_choices
        else (choice.finish_reason)
    )
    invalid = lead_in(choice.message.content) or "invalid"
    says = invalid if parsed.invalid_rollout else f"{len(parsed.objects)} object(s)"
    reasons = ", ".join(sorted({reason for _, reason in parsed.dropped}))
    dropped = f", {len(parsed.dropped)} dropped ({reasons})" if parsed.dropped else ""
    cut = ", cut off" if parsed.truncated else ""
    found = (
        f"{len(choice.token_ids)} tokens in {seconds:.2f} s, ended by {ended}; the parser finds "
        f"{says}{dropped}{cut}"
    )
    return ok(ROLLOUT, found, url)


def _count(requests: Sequence[RolloutInferRequest]) -> int:
    return sum(len(request.images) for request in requests)
