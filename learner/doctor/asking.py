"""What a server makes of the run's own samples: their images, their prompts, an answer."""

import time
from collections.abc import Sequence
from pathlib import Path

from transformers import ProcessorMixin

from learner.config.schema import Config
from learner.doctor.findings import Finding, of_error, ok, skipped
from learner.doctor.inputs import spread
from learner.model.prompt import encode_request
from learner.parsing import parse_rollout
from learner.rollout.client import SERVER_ERRORS, RolloutClient, needs_push
from learner.rollout.policy import asking_of
from learner.rollout.prompt_check import check_prompt_ids
from learner.rollout.requests import build_request
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.tokens import Tokenizer
from learner.types import Sample
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest

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


def check(
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
    says = "invalid" if parsed.invalid_rollout else f"{len(parsed.objects)} object(s)"
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
