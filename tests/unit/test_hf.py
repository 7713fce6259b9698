"""The hf backend on a toy model, compared with plain transformers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoProcessor,
    GenerationConfig,
    PreTrainedModel,
    Qwen3VLForConditionalGeneration,
)

from learner.data.jsonl import build_request
from learner.models.prompts import encode_request
from learner.rollout.hf import HfBackend
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.contract import reference
from tests.contract.running_server import draw_scene
from tests.contract.test_repeat_terminate import trigger
from tests.contract.toy_checkpoints import make_checkpoint

NEW_TOKENS = 24
GREEDY = RequestConfig(max_tokens=NEW_TOKENS)
SAMPLED = RequestConfig(max_tokens=NEW_TOKENS, temperature=0.7, top_p=0.9, top_k=50, seed=5)
TEXTS = ("Detect every object.", "red", "What is in the image? Name every square.", "7 8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "model", seed=1)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_scene(tmp_path_factory.mktemp("hf_scene") / "scene.png", 3)


BackendOf = Callable[..., HfBackend]
Requests = list[RolloutInferRequest]


@pytest.fixture
def backend_of(model: PreTrainedModel, processor: Any) -> BackendOf:
    encode, nothing = partial(encode_request, processor), RepeatTerminateConfig()
    own = partial(HfBackend, model, encode, processor.tokenizer)
    return partial(own, guard=nothing, decode_batch_size=8)


def request(text: str, images: Sequence[Path] = ()) -> RolloutInferRequest:
    return build_request(Sample(text, tuple(images), 64, 64, ()), text, None)


@pytest.fixture(scope="module")
def requests(scene: Path) -> Requests:
    return [*(request(text) for text in TEXTS), request(TEXTS[0], [scene])]


def ids(outputs: Sequence[RolloutOutput]) -> list[list[int]]:
    return [output.response_token_ids for output in outputs]


@pytest.mark.req("ROLL-01", "ARCH-03")
@pytest.mark.parametrize("decode_batch_size", [1, 8])
def test_greedy_answers_are_those_of_plain_transformers_in_any_batch(
    backend_of: BackendOf,
    model: PreTrainedModel,
    checkpoint: Path,
    scene: Path,
    requests: Requests,
    decode_batch_size: int,
) -> None:
    backend = backend_of(decode_batch_size=decode_batch_size)
    backend.push_weights(7)
    outputs = backend.rollout(requests, GREEDY)
    asked: list[tuple[str, list[Path]]] = [*((text, []) for text in TEXTS), (TEXTS[0], [scene])]
    expected = [reference.greedy_ids(checkpoint, *each, NEW_TOKENS) for each in asked]
    assert ids(outputs) == expected
    assert len({tuple(each) for each in expected}) > 3, "a model that always says the same"
    for output, each in zip(outputs, asked, strict=True):
        assert output.prompt_token_ids == reference.prompt_ids(checkpoint, *each)
        assert output.text == reference.decode(checkpoint, output.response_token_ids)
        whole = len(output.response_token_ids) == NEW_TOKENS
        assert output.finish_reason == ("length" if whole else "stop")
        assert (output.weights_version, output.seed) == ((7, 7), None)
        assert not output.repeat_terminated


@pytest.mark.req("ROLL-02", "CFG-05")
def test_beam_search_selects_exactly_one_rollout_response(
    backend_of: BackendOf, model: PreTrainedModel, processor: Any, requests: Requests
) -> None:
    """For each request that of plain transformers, which is not the greedy one."""
    asked, plain = requests[: len(TEXTS)], cast(Any, model)
    expected = []
    for each in asked:
        prompt = encode_request(processor, each).ids[None]
        options = {"max_new_tokens": NEW_TOKENS, "num_beams": 3, "do_sample": False}
        with torch.no_grad():
            whole = plain.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        answer = whole[0, prompt.shape[1] :].tolist()
        eos = processor.tokenizer.eos_token_id
        expected.append(answer[: answer.index(eos)] if eos in answer else answer)
    assert ids(backend_of(num_beams=3).rollout(asked, GREEDY)) == expected
    assert ids(backend_of().rollout(asked, GREEDY)) != expected


@pytest.mark.req("SEED-01", "RUN-01")
def test_sampled_answers_come_in_batches_that_depend_on_their_first_seed(
    backend_of: BackendOf, requests: Requests
) -> None:
    """The random numbers of training stay as they were."""
    backend, before = backend_of(decode_batch_size=2), torch.get_rng_state()
    outputs = backend.rollout(requests, SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    assert [output.seed for output in outputs] == [5, 6, 7, 8, 9]
    calls = backend.journal.take()[0]["calls"]
    assert [(call["first"], call["count"], call["seed"]) for call in calls] == [
        (0, 2, 5),
        (2, 2, 7),
        (4, 1, 9),
    ]
    second = SAMPLED.model_copy(update={"seed": 7})
    assert backend_of(decode_batch_size=2).rollout(requests[2:4], second) == outputs[2:4]
    twice = [requests[2], requests[2]]
    one, other = ids(backend_of(decode_batch_size=2).rollout(twice, second))
    assert one != other


def test_decoding_ignores_the_defaults_of_the_checkpoint(
    backend_of: BackendOf, model: PreTrainedModel, requests: Requests
) -> None:
    plain = backend_of().rollout(requests, GREEDY)
    of_checkpoint = GenerationConfig(
        do_sample=True,
        temperature=2.0,
        top_k=3,
        repetition_penalty=9.0,
        no_repeat_ngram_size=2,
        suppress_tokens=plain[0].response_token_ids[:1],
        num_beams=2,
    )
    model.generation_config = of_checkpoint
    assert backend_of().rollout(requests, GREEDY) == plain
    assert model.generation_config is of_checkpoint


def test_repetition_penalty_ignores_the_padding(backend_of: BackendOf, requests: Requests) -> None:
    penalized = GREEDY.model_copy(update={"repetition_penalty": 1.6})
    together = backend_of().rollout(requests, penalized)
    assert together == backend_of(decode_batch_size=1).rollout(requests, penalized)
    assert ids(together) != ids(backend_of().rollout(requests, GREEDY))


@pytest.mark.req("ROLL-01", "ARCH-03")
def test_answer_ends_with_the_context(
    backend_of: BackendOf, model: PreTrainedModel, requests: Requests
) -> None:
    free = backend_of().rollout(requests, GREEDY)
    longest = max(len(output.prompt_token_ids) for output in free)
    limited = backend_of(max_model_len=longest + 3).rollout(requests, GREEDY)
    for output, whole in zip(limited, free, strict=True):
        room = longest + 3 - len(output.prompt_token_ids)
        assert output.response_token_ids == whole.response_token_ids[:room]
        if room < len(whole.response_token_ids):
            assert output.finish_reason == "length"
    assert limited != free
    assert backend_of(max_model_len=10**6).rollout(requests, GREEDY) == free
    model.config.get_text_config().max_position_embeddings = longest + 3
    assert backend_of().rollout(requests, GREEDY) == limited


@pytest.mark.req("ROLL-01")
def test_prompt_without_room_for_an_answer_is_refused_by_name(
    backend_of: BackendOf, processor: Any, requests: Requests
) -> None:
    lengths = [encode_request(processor, request).ids.numel() for request in requests]
    longest = max(lengths)
    place = rf"^infer_requests\[{lengths.index(longest)}\]"
    found = f"has {longest} tokens.* a context of {longest} .*max_model_len"
    with pytest.raises(RunError, match=f"{place}.*{found}"):
        backend_of(max_model_len=longest).rollout(requests, GREEDY)


GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=2, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)


@pytest.mark.req("REP-02", "REP-05")
def test_guard_ends_a_row_where_it_triggers(backend_of: BackendOf, model: PreTrainedModel) -> None:
    asked = [request(f"{text} {n}") for n in range(3) for text in TEXTS]
    free = backend_of().rollout(asked, GREEDY)
    kept = backend_of(guard=GUARD).rollout(asked, GREEDY)
    ends = [trigger(GUARD, [], output.response_token_ids) for output in free]
    ended = [end is not None and end < NEW_TOKENS for end in ends]
    assert {True, False} == set(ended)
    assert [output.repeat_terminated for output in kept] == ended
    for before, after, end in zip(free, kept, ends, strict=True):
        assert after.response_token_ids == before.response_token_ids[:end]
        assert after.finish_reason == ("stop" if after.repeat_terminated else before.finish_reason)


def adapted(model: PreTrainedModel) -> Any:
    lora = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj", "up_proj"])
    peft = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(3)
    for name, weight in peft.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0.0, 0.2, generator=generator)
    return peft


def test_rollout_does_not_change_a_model_in_training(
    backend_of: BackendOf, model: PreTrainedModel, processor: Any, requests: Requests
) -> None:
    """It has checkpointing, adapters, a part in evaluation mode and pending gradients."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    peft = adapted(model).train()
    model.model.visual.eval()
    modes = {name: module.training for name, module in peft.named_modules()}
    wants = {name: weight.requires_grad for name, weight in peft.named_parameters()}
    prompt = encode_request(processor, requests[0]).ids[None]
    peft(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
    gradients = {name: w.grad.clone() for name, w in peft.named_parameters() if w.grad is not None}
    answers = backend_of().rollout(requests, GREEDY)
    assert {name: module.training for name, module in peft.named_modules()} == modes
    assert {name: weight.requires_grad for name, weight in peft.named_parameters()} == wants
    assert gradients
    after = dict(peft.named_parameters())
    for name, gradient in gradients.items():
        grad = after[name].grad
        assert grad is not None
        assert torch.equal(grad, gradient)
    peft.zero_grad()
    peft(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
    assert answers == backend_of().rollout(requests, GREEDY)
