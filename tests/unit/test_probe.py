"""A probe on answers of the model itself, and on answers that somebody changed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from learner.models.load import LoadedModel
from learner.models.packed_forward import encode_request
from learner.rollout.hf import HfBackend
from learner.rollout.sync.probe import MARGINS, NEW_TOKENS, Ask, Probe, probe_call, prompts
from shared_contracts.errors import ContractError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract.toy_checkpoints import make_checkpoint
from tests.unit.loaded_models import loaded_from
from tests.unit.scripted_server import envelope

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.req("SYNC-06")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("probe") / "model", seed=1)


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return loaded_from(checkpoint)


def answers_of(loaded: LoadedModel, edit: Callable[[list[int]], list[int]] = list) -> Ask:
    """Greedy answers of a model, each with its token ids edited."""
    model, processor = loaded.model, loaded.processor
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    encode = partial(encode_request, processor)
    backend = HfBackend(model, encode, processor.tokenizer, RepeatTerminateConfig(), 1)

    def ask(call: InferCall) -> Sequence[RolloutEnvelope]:
        assert call.request_config is not None
        envelopes = []
        for output in backend.rollout(call.infer_requests, call.request_config):
            answer = envelope(edit(output.response_token_ids), output.prompt_token_ids)
            whole = len(output.response_token_ids) < NEW_TOKENS
            answer.response.choices[0].finish_reason = "stop" if whole else "length"
            envelopes.append(answer)
        return envelopes

    return ask


def test_the_models_own_answers_agree_and_the_model_is_left_as_it_was(loaded: LoadedModel) -> None:
    loaded.model.get_submodule("model.visual").eval()
    results = Probe(loaded, "float32").ask(answers_of(loaded))
    assert [result.prompt for result in results] == ["text", "image"]
    assert [result.difference for result in results] == [None, None]
    assert all(result.compared > 1 for result in results)
    assert loaded.model.training
    assert not loaded.model.get_submodule("model.visual").training
    assert all(p.grad is None for p in loaded.model.parameters())


def test_a_changed_token_is_named_with_its_position_and_both_tokens(loaded: LoadedModel) -> None:
    own = answers_of(loaded)(probe_call())[0].response.choices[0].token_ids
    assert own is not None

    def third_is_seven(ids: list[int]) -> list[int]:
        return [*ids[:3], 7, *ids[4:]]

    probe = Probe(loaded, "float32")
    difference = probe.ask(answers_of(loaded, third_is_seven))[0].difference
    assert difference is not None
    assert (difference.position, difference.server, difference.learner) == (3, 7, own[3])
    assert difference.margin > MARGINS["float32"]
    told = probe.describe(difference)
    assert "token 3: the server says 7 " in told
    assert f"the learner {own[3]} " in told


def test_an_answer_that_ends_too_early_differs_at_its_end(loaded: LoadedModel) -> None:
    def ask(call: InferCall) -> Sequence[RolloutEnvelope]:
        envelopes = answers_of(loaded, lambda ids: ids[:2])(call)
        for answer in envelopes:
            answer.response.choices[0].finish_reason = "stop"
        return envelopes

    for result in Probe(loaded, "float32").ask(ask):
        assert result.compared == 3
        assert result.difference is not None
        assert result.difference.position == 2
        assert result.difference.server == loaded.processor.tokenizer.eos_token_id


def test_an_end_by_the_repeat_guard_is_not_the_models(loaded: LoadedModel) -> None:
    def ask(call: InferCall) -> Sequence[RolloutEnvelope]:
        envelopes = answers_of(loaded, lambda ids: ids[:2])(call)
        for answer in envelopes:
            answer.response.choices[0].finish_reason = "stop"
            answer.coordexp.repeat_terminated_choices = [0]
        return envelopes

    results = Probe(loaded, "float32").ask(ask)
    assert [(result.compared, result.difference) for result in results] == [(2, None)] * 2


@pytest.mark.parametrize(("part", "sees"), [("visual", {"image"}), ("lm_head", {"text", "image"})])
def test_weights_that_only_the_learner_has_are_seen(
    loaded: LoadedModel, checkpoint: Path, part: str, sees: set[str]
) -> None:
    """Both prompts need the head, and the image alone the vision tower."""
    served = answers_of(loaded)(probe_call())
    generator = torch.Generator().manual_seed(5)
    for name, weight in loaded.model.named_parameters(remove_duplicate=False):
        if part in name and weight.ndim >= 2:
            nn.init.normal_(weight, 0.0, 0.12, generator=generator)
    results = Probe(loaded, "float32").ask(lambda _: served)
    assert {result.prompt for result in results if result.difference is not None} == sees


def test_how_near_a_token_must_be_depends_on_the_type_of_the_engines(loaded: LoadedModel) -> None:
    """A token is not the model's choice; with all logits scaled down it is a near tie."""
    own = answers_of(loaded)(probe_call())
    first = own[0].response.choices[0].token_ids
    assert first is not None
    first[3] = 7
    exact = Probe(loaded, "float32").ask(lambda _: own)[0].difference
    assert exact is not None
    norm = loaded.inner.language_model.norm  # type: ignore[attr-defined]
    with torch.no_grad():
        norm.weight *= 0.25 / exact.margin
    near = Probe(loaded, "float32").ask(lambda _: own)[0].difference
    assert near is not None
    assert near.margin == pytest.approx(0.25, rel=1e-3)
    assert Probe(loaded, "bfloat16").ask(lambda _: own)[0].difference is None


def test_a_prompt_that_the_server_encodes_differently_is_told(loaded: LoadedModel) -> None:
    def ask(call: InferCall) -> Sequence[RolloutEnvelope]:
        envelopes = answers_of(loaded)(call)
        ids = envelopes[1].response.prompt_token_ids
        assert ids is not None
        ids[4] += 1
        return envelopes

    with pytest.raises(ContractError, match="prompt of image, position 4"):
        Probe(loaded, "float32").ask(ask)


def test_the_prompts_are_the_same_each_time_and_greedy_of_one_version() -> None:
    assert prompts() == prompts()
    call = probe_call(version=7)
    assert call.expected_weights_version == 7
    assert call.request_config is not None
    assert not call.request_config.temperature
    text, image = call.infer_requests
    assert not text.images
    assert image.images[0].startswith("data:image/png;base64,")
