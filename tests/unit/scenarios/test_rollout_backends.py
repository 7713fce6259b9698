"""Scenarios of rollout backends: beams, exchange, records, guard (seed 000)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from learner.config import dump_mapping, parse_config
from learner.config.rollout_matching import MatchingConfig
from learner.data.jsonl import build_request, read_samples
from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.models.prompts import PromptEncoder, encode_request
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.hf import HfBackend
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.rollout.server import ServerBackend
from learner.runs.metrics import rollout_payload
from learner.stages.formats.coord_json import parse_rollout
from learner.training.channels import ChannelB, Encoding
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import repeat_config_from_environment
from rollout_server.settings.run_config import run_settings
from shared_contracts.infer import InferCall, RequestConfig
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.answers import encode
from tests.unit.config_faults import ALIGNED, changed
from tests.unit.fleets import fleet
from tests.unit.loaded_models import loaded_from
from tests.unit.scripted_server import INFER, ScriptedChannel, envelope
from tests.unit.small_run import written

PROMPT = "Detect every object in the image."
CAT = GroundTruthObject("cat", Shape("bbox_2d", (10, 20, 300, 400)))
THIN_CAT = replace(CAT, shape=Shape("bbox_2d", (290, 20, 300, 400)))


@pytest.fixture
def loaded(toy_checkpoint: Path) -> LoadedModel:
    return loaded_from(toy_checkpoint)


@pytest.fixture
def scene(toy_data: ToyData) -> Sample:
    return replace(read_samples(toy_data.train_jsonl, allow_poly=False)[0], objects=(CAT,))


def channel_b(loaded: LoadedModel) -> ChannelB:
    prompt = PromptEncoder(loaded.processor, PROMPT, None)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
    return ChannelB(encoding, MatchingConfig(), allow_poly=False)


def hf_backend(loaded: LoadedModel, num_beams: int = 1) -> HfBackend:
    model: Any = loaded.model
    return HfBackend(
        model,
        partial(encode_request, loaded.processor),
        loaded.processor.tokenizer,
        RepeatTerminateConfig(),
        decode_batch_size=8,
        num_beams=num_beams,
    )


class Rigged:
    """Makes a model give one answer to every prompt.

    temptation: a position and a token that is likelier there, but has only unlikely
        continuations. Greedy decoding takes it, a beam search does not.
    """

    def __init__(self, answer: list[int], temptation: tuple[int, int] | None = None) -> None:
        self._answer = answer
        self._temptation = temptation
        self._width = 0

    @contextmanager
    def answering(self, model: Any) -> Iterator[None]:
        hook = model.register_forward_hook(self._say, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _say(self, _: object, __: object, arguments: dict[str, Any], output: Any) -> Any:
        ids, length = arguments["input_ids"], output.past_key_values.get_seq_length()
        if ids.shape[1] > 1:
            self._width = length
        for row, last in enumerate(ids[:, -1].tolist()):
            output.logits[row, -1] = self._log_probs(
                output.logits[row, -1], length - self._width, last
            )
        return output

    def _log_probs(self, like: Tensor, done: int, last: int) -> Tensor:
        likely: dict[int, float] = {}
        if done < len(self._answer):
            likely[self._answer[done]] = 0.999
        if self._temptation is not None:
            place, token = self._temptation
            if done == place:
                likely = {self._answer[done]: 0.4, token: 0.599}
            elif done == place + 1 and last == token:
                likely = {self._answer[done]: 0.1}
        rest = (1 - sum(likely.values())) / (len(like) - len(likely))
        probs = torch.full_like(like, rest)
        for token, probability in likely.items():
            probs[token] = probability
        return probs.log()


@pytest.mark.req("ROLL-02", "CFG-05")
def test_beam_search_selects_exactly_one_rollout_response(
    loaded: LoadedModel, scene: Sample
) -> None:
    tokenizer = loaded.tokenizer
    good, bad = (encode(tokenizer, written(item)) for item in (CAT, THIN_CAT))
    (at,) = [i for i, (a, b) in enumerate(zip(good, bad, strict=True)) if a != b]
    rigged = Rigged(ended(loaded, good), (at, bad[at]))
    asked = [build_request(scene, PROMPT, None)] * 2
    asking = RequestConfig(max_tokens=len(good) + 8)
    with rigged.answering(loaded.model):
        greedy = hf_backend(loaded).rollout(asked, asking)
        beams = hf_backend(loaded, num_beams=3).rollout(asked, asking)
    assert [output.response_token_ids for output in greedy] == [bad, bad]
    assert [output.response_token_ids for output in beams] == [good, good]
    segments, assessed = channel_b(loaded).segments([scene, scene], beams)
    assert len(segments) == len(assessed) == 2
    for each in assessed:
        assert (len(each.match.pairs), each.match.false_positives) == (1, [])
        assert each.match.false_negatives == []
    for segment in segments:
        prefix = parse_rollout(good, tokenizer).prefix_token_ids
        assert segment.target.token_ids[: segment.target.prefix_len] == prefix


def ended(loaded: LoadedModel, answer: list[int]) -> list[int]:
    return [*answer, int(loaded.processor.tokenizer.eos_token_id)]


@contextmanager
def served_by(engine: HfBackend) -> Iterator[ServerBackend]:
    """A server backend with the answers of `engine`."""
    with fleet(1) as run:
        epoch = run.rollouts[0].epoch

        def infer(body: Any) -> list[Any]:
            call = InferCall.model_validate(body)
            assert call.request_config is not None
            envelopes = []
            for output in engine.rollout(call.infer_requests, call.request_config):
                ids, prompt = output.response_token_ids, output.prompt_token_ids
                answer = envelope(ids, prompt, output.seed, output.text)
                answer.coordexp.server_epoch = epoch
                envelopes.append(answer)
            return envelopes

        run.rollouts[0].server.routes[INFER] = infer
        yield run.backend


@pytest.mark.req("ARCH-03", "ROLL-01", "CHB-01")
def test_backend_implementation_swap_preserves_rollout_contract(
    loaded: LoadedModel, scene: Sample
) -> None:
    answer = encode(loaded.tokenizer, written(THIN_CAT, CAT))
    rigged = Rigged(ended(loaded, answer))
    samples = [scene, replace(scene, objects=(CAT, THIN_CAT))]
    asked = [build_request(sample, PROMPT, None) for sample in samples]
    asking = RequestConfig(max_tokens=len(answer) + 8, seed=21, return_details=True)
    with rigged.answering(loaded.model):
        own = hf_backend(loaded).rollout(asked, asking)
        with served_by(hf_backend(loaded)) as backend:
            over_http = backend.rollout(asked, asking)
    assert contract_of(over_http) == contract_of(own)
    assert [output.response_token_ids for output in own] == [answer, answer]
    channel = channel_b(loaded)
    (ours, our_answers), (theirs, their_answers) = (
        channel.segments(samples, outputs) for outputs in (own, over_http)
    )
    our_metrics, their_metrics = (
        rollout_payload(answers).metrics() for answers in (our_answers, their_answers)
    )
    assert our_metrics == their_metrics
    assert our_metrics["stage2_ab/channel_b/matched"] == 3
    for segment, other in zip(ours, theirs, strict=True):
        assert torch.equal(segment.input_ids, other.input_ids)
        assert segment.target.role.tolist() == other.target.role.tolist()
        assert segment.target.coord_groups == other.target.coord_groups


def contract_of(outputs: list[RolloutOutput]) -> list[dict[str, Any]]:
    """All fields without the version, which differs between backends."""
    names = [field.name for field in fields(RolloutOutput) if field.name != "weights_version"]
    return [{name: getattr(output, name) for name in names} for output in outputs]


@pytest.mark.req("SEED-02")
def test_server_mode_logs_reproducibility_metadata() -> None:
    with fleet(2) as run:
        urls = [one.server.base_url for one in run.rollouts]
        servers = [ServerAddress(base_url=url, group_port=51216 + i) for i, url in enumerate(urls)]
        journal = Journal(servers, FullWeights())
        clients = [RolloutClient(url, timeout_s=60.0) for url in urls]
        channels = [ScriptedChannel(one) for one in run.rollouts]
        backend = ServerBackend(clients, channels, 8, journal)
        asking = Asking("Detect.", None, RequestConfig(max_tokens=9))
        backend.connect()
        policy = Policy(OpenBackend(backend, backend.version, journal=journal), asking)
        policy.push()
        policy.answer([Sample(str(i), (), 64, 64, ()) for i in range(4)], seed=1000)
        record, _ = policy.take_notes()
        policy.close()
    assert record["servers"] == [server.model_dump(mode="json") for server in servers]
    assert (record["sync_mode"], record["sync_fallback"]) == ("full", None)
    assert record["weights_version"] == 2
    calls = sorted(record["calls"], key=lambda call: int(call["first"]))
    assert [(c["server"], c["first"], c["count"], c["seed"]) for c in calls] == [
        (servers[0].base_url, 0, 2, 1000),
        (servers[1].base_url, 2, 2, 1002),
    ]
    assert record["decoding"] == {"max_tokens": 9}


class FullWeights:
    """The sync of a run that pushes full weights."""

    mode = "full"
    fallback = None


@pytest.mark.req("REP-01", "REP-04", "CFG-09")
def test_existing_yaml_enables_repeat_aware_behavior_in_vllm_mode(tmp_path: Path) -> None:
    guard = RepeatTerminateConfig(enabled=True, min_new_tokens=4, ngram_size=3, ngram_repeats=5)
    existing = changed("rollout_matching.repeat_terminate", guard.model_dump(), ALIGNED)
    before, after = (
        changed("rollout_matching.rollout_backend", name, existing) for name in ("hf", "vllm")
    )
    asked = parse_config(before).rollout_matching.repeat_terminate
    assert asked == guard
    assert parse_config(after).rollout_matching.repeat_terminate == asked
    run = tmp_path / "train.yaml"
    run.write_text(dump_mapping(after))
    assert run_settings(run, {})["repeat_terminate"] == asked


@pytest.mark.req("REP-04", "WIRE-01")
def test_vllm_v1_rollout_does_not_rely_on_request_time_logits_processors(tmp_path: Path) -> None:
    guard = RepeatTerminateConfig(enabled=True, ngram_size=3, ngram_repeats=5)
    settings = ServerSettings(model=tmp_path, device="cpu", repeat_terminate=guard)
    assert repeat_config_from_environment(engine_environment(settings)) == guard
    with fleet(1) as run:
        run.ask(1)
        (body,) = run.rollouts[0].server.bodies(INFER)
    assert "logits_processors" not in json.dumps(body)
    assert "repeat_terminate" not in json.dumps(body)
    with pytest.raises(ValidationError):
        RequestConfig.model_validate({"logits_processors": ["a.b:C"]})
