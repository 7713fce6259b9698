"""The proof of effect: a toy model in training, compared with answers of plain transformers."""

import base64
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from learner.models.load import LoadedModel
from learner.models.prompts import encode_request
from learner.rollout.sync.probe import NEW_TOKENS, ProofOfEffect, WeightsDiffer, prompts
from learner.stages.tokens import PLACEHOLDERS
from shared_contracts.checkpoints import PROOF_TOKENS
from shared_contracts.errors import ContractError
from shared_contracts.infer import ChoiceLogprobs, RolloutEnvelope
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import DtypeName
from tests.contract import reference
from tests.contract.toy_checkpoints import make_checkpoint
from tests.unit.fleets import S, fleet_of
from tests.unit.loaded_models import loaded_from
from tests.unit.scripted_server import INFER, HangUp, Reply, envelope, problem, scripted_server

pytestmark = pytest.mark.req("SYNC-06")

URL = "http://server:1"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("proof") / "model", seed=1)


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return loaded_from(checkpoint)


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> list[RolloutEnvelope]:
    """Answers of a server with the checkpoint's weights to the prompts."""
    made = []
    for request in prompts().values():
        images, text = list[Path](), cast(Any, request.messages[0].content[-1]).text
        for number, url in enumerate(request.images):
            images.append(checkpoint.parent / f"{number}.png")
            images[-1].write_bytes(base64.b64decode(url.partition(",")[2]))
        ids = reference.greedy_ids(checkpoint, text, images, 8)
        made.append(envelope(ids, reference.prompt_ids(checkpoint, text, images)))
        logprobs = reference.logprobs(checkpoint, text, images, ids)
        made[-1].response.choices[0].logprobs = ChoiceLogprobs.of(logprobs)
    return made


@pytest.mark.req("FULL-06")
def test_a_derived_context_has_room_for_the_prompts(loaded: LoadedModel) -> None:
    """Else a server refuses them, and no push of a run with short answers is proven."""
    lengths = [encode_request(loaded.processor, each).ids.numel() for each in prompts().values()]
    assert max(lengths) + NEW_TOKENS <= PROOF_TOKENS


def shifted(answers: list[RolloutEnvelope], nats: float) -> list[RolloutEnvelope]:
    """In the mean by `nats`, at every second token."""
    changed = [answer.model_copy(deep=True) for answer in answers]
    for answer in changed:
        found = answer.response.choices[0].logprobs
        assert found is not None
        for token in found.content[::2]:
            token.logprob -= 2 * nats
    return changed


def test_answers_of_the_same_weights_agree_and_the_model_is_unchanged(
    loaded: LoadedModel, answers: list[RolloutEnvelope]
) -> None:
    assert list(prompts()) == ["text", "image"]
    loaded.model.get_submodule("model.visual").eval()
    modes = set[tuple[bool, bool]]()
    loaded.model.register_forward_pre_hook(
        lambda model, _: modes.add((model.training, torch.is_grad_enabled()))
    )
    assert ProofOfEffect(loaded, "full").check(URL, answers, "float32") < 1e-5
    assert (modes, loaded.model.training) == ({(False, False)}, True)
    assert not loaded.model.get_submodule("model.visual").training
    assert all(p.grad is None for p in loaded.model.parameters())


@pytest.mark.parametrize(
    ("dtype", "nats", "differs"),
    [("float32", 0.002, True), ("bfloat16", 0.04, False), ("bfloat16", 0.06, True)],
)
def test_the_mean_difference_has_a_limit_for_each_type(
    loaded: LoadedModel,
    answers: list[RolloutEnvelope],
    dtype: DtypeName,
    nats: float,
    differs: bool,
) -> None:
    proof = ProofOfEffect(loaded, "full")
    if not differs:
        assert proof.check(URL, shifted(answers, nats), dtype) == pytest.approx(nats, rel=0.01)
        return
    with pytest.raises(WeightsDiffer, match=f"{URL} does not.*{nats:g} nats.*{dtype}.*verify"):
        proof.check(URL, shifted(answers, nats), dtype)


@pytest.mark.parametrize(
    ("part", "factor"),
    [
        ("model.visual.blocks.0.attn.proj.weight", 3.0),  # the image alone shows it
        ("model.language_model.norm.weight", float("nan")),
    ],
)
def test_other_weights_are_seen(
    loaded: LoadedModel, answers: list[RolloutEnvelope], part: str, factor: float
) -> None:
    with torch.no_grad():
        loaded.model.get_parameter(part).mul_(factor)
    with pytest.raises(WeightsDiffer):
        ProofOfEffect(loaded, "full").check(URL, answers, "float32")


def test_another_prompt_is_refused_and_empty_answers_prove_nothing(
    loaded: LoadedModel, answers: list[RolloutEnvelope], caplog: pytest.LogCaptureFixture
) -> None:
    proof, prompt_ids = ProofOfEffect(loaded, "full"), answers[0].response.prompt_token_ids
    assert prompt_ids is not None
    with pytest.raises(ContractError, match="prompt of text"):
        proof.check(URL, [envelope([], prompt_ids[:-1]), answers[1]], "float32")
    empty = [envelope([], answer.response.prompt_token_ids or []) for answer in answers]
    for answer in empty:
        answer.response.choices[0].logprobs = ChoiceLogprobs.of([])
    assert proof.check(URL, empty, "float32") == 0.0
    assert "nothing is proven" in caplog.text


@pytest.mark.parametrize("token", PLACEHOLDERS)
def test_an_answer_counts_up_to_its_first_token_of_an_image(
    loaded: LoadedModel, answers: list[RolloutEnvelope], token: str
) -> None:
    """Such a token may be sampled; plain transformers refuses it without another image."""
    sampled = loaded.tokenizer.convert_tokens_to_ids(token)
    longer = []
    for answer in answers:
        (choice,) = answer.response.choices
        assert choice.logprobs is not None
        ids = [*(choice.token_ids or []), sampled, sampled]
        known = [each.logprob for each in choice.logprobs.content]
        longer.append(envelope(ids, answer.response.prompt_token_ids or []))
        longer[-1].response.choices[0].logprobs = ChoiceLogprobs.of([*known, -20.0, -20.0])
    assert ProofOfEffect(loaded, "full").check(URL, longer, "float32") < 1e-5


@pytest.mark.parametrize(
    ("verify", "proven"), [("off", []), ("sample", [1, 101, 201]), ("full", list(range(1, 251)))]
)
def test_pushes_that_are_proven(verify: Verify, proven: list[int]) -> None:
    proof = ProofOfEffect(cast(Any, None), verify)
    assert [push for push in range(1, 251) if proof.is_due()] == proven


@pytest.mark.req("SYNC-10")
def test_every_server_that_answers_is_proven_after_a_push(
    loaded: LoadedModel, answers: list[RolloutEnvelope]
) -> None:
    """A server that hangs up is lost. This is no sign of wrong weights."""
    with scripted_server() as one, scripted_server() as other:
        rollouts = [S(one), S(other)]
        one.routes[INFER] = other.routes[INFER] = lambda _: answers
        with fleet_of(rollouts, 8, proof=ProofOfEffect(loaded, "full")) as run:

            def reply(body: Any) -> Reply:
                assert body["expected_weights_version"] == run.rollouts[0].version
                config = body["request_config"]
                assert (config["max_tokens"], config["logprobs"]) == (NEW_TOKENS, True)
                run.clock.now += 1.5
                return answers

            one.routes[INFER], other.routes[INFER] = reply, lambda _: HangUp()
            run.backend.push_weights(2)
            lost, metrics = run.notes()
            assert metrics["sync/probe_s"] == 1.5
            assert [url for url, _ in lost] == [other.base_url]
            with torch.no_grad():
                loaded.model.get_parameter("lm_head.weight").mul_(2.0)
            with pytest.raises(WeightsDiffer, match=one.base_url):
                run.backend.push_weights(3)


REFUSAL = problem("invalid-request", "200 tokens at most", "/infer/")


@pytest.mark.parametrize(("refusal", "is_lost"), [(HangUp(), True), (REFUSAL, False)])
def test_unanswered_proof_is_repeated_and_a_server_that_refuses_it_is_not_lost(
    loaded: LoadedModel,
    answers: list[RolloutEnvelope],
    caplog: pytest.LogCaptureFixture,
    refusal: Reply,
    is_lost: bool,
) -> None:
    proven: list[int] = []
    with scripted_server() as one:
        rollouts = [S(one)]
        one.routes[INFER] = lambda _: refusal
        with fleet_of(rollouts, 8, proof=ProofOfEffect(loaded, "sample")) as run:
            assert (run.backend.servers[0].lost is not None) is is_lost
            assert ("refuses the prompts of a proof" in caplog.text) is not is_lost

            def reply(body: Any) -> Reply:
                proven.append(body["expected_weights_version"])
                return answers

            one.routes[INFER] = reply
            for version in (2, 3):
                run.backend.push_weights(version)
    assert proven == [2]
