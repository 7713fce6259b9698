"""Log-probabilities of kept tokens by the trainer, compared with the engine's (LOGP-01)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.fixed_engines import samples as fixed_samples
from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.models.packs import Pack, Segment, make_pack
from learner.objectives import logit_stats
from learner.objectives.mismatch import Mismatch
from learner.objectives.pipeline import PackLoss
from learner.rollout.policy import Policy, RequestSettings
from learner.runs.metrics import StepReport, mismatch_payload
from learner.stages.packing import Chunk
from learner.stages.tokens import decode_exactly
from learner.training.channels import ChannelB
from learner.training.step import StepRunner
from learner.types import Channel, Role, RolloutOutput, Sample
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig
from tests.unit.answers import entry
from tests.unit.config_faults import changed
from tests.unit.loaded_models import load_small
from tests.unit.mixed_samples import box
from tests.unit.packed_logits import packed_logits
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.small_run import written
from tests.unit.test_forwards import CONFIG, Given, Nobody, Ran, Script, pack
from tests.unit.test_head import CHUNK, VOCABULARY, Products
from tests.unit.toy_learner import ToyLearner, sharpened

pytestmark = pytest.mark.req("LOGP-01")

GHOST = box("ghost", 900, 900, 999, 999)


@pytest.fixture(scope="module")
def learner(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> ToyLearner:
    out = tmp_path_factory.mktemp("out")
    return ToyLearner(sharpened(load_small(toy_checkpoint, toy_data, out), 8))


def texts(samples: Sequence[Sample]) -> list[str]:
    """A right object and a ghost; one with a corner missing; garbage; one that was cut."""
    first = samples[0].objects[0]
    return [
        written(first, GHOST),
        f"{{{entry(1, 'kite', (0, 31, 62))}}}",
        "garbage",
        written(GHOST)[:-6],
    ]


def answers(
    learner: ToyLearner, samples: Sequence[Sample], texts: Sequence[str], logprobs: bool = True
) -> list[RolloutOutput]:
    """logprobs: with random log-probabilities, as from an engine."""
    draw = np.random.default_rng(3)
    rollouts = [learner.answer(*pair) for pair in zip(samples, texts, strict=True)]
    return [
        replace(each, logprobs=(-draw.exponential(3, len(each.response_token_ids))).tolist())
        if logprobs
        else each
        for each in rollouts
    ]


def plain_mismatch(
    learner: ToyLearner, segments: Sequence[Segment], rollouts: Sequence[RolloutOutput]
) -> Mismatch:
    """Compute it by the log-softmax of all logits of the row, in float64."""
    logits = packed_logits(learner.model, make_pack(segments)).detach().double().log_softmax(-1)
    roles, nats = list[int](), list[float]()
    start = 0
    for segment, answer in zip(segments, rollouts, strict=True):
        assert answer.logprobs is not None
        target, first = segment.target, start + len(segment.prompt.ids)
        for place, token in enumerate(target.token_ids[: target.prefix_len]):
            if answer.response_token_ids[place : place + 1] != [token]:
                break
            roles.append(int(target.role[place]))
            nats.append(abs(logits[first + place - 1, token].item() - answer.logprobs[place]))
        start += len(segment)
    return Mismatch(np.array(roles, np.int8), np.array(nats))


def compared(learner: ToyLearner, segments: Sequence[Segment]) -> Mismatch:
    found = learner.loss(make_pack(segments), "B").mismatch
    assert found is not None
    return found


@pytest.mark.req("PACK-04")
@pytest.mark.parametrize("rows", [None, CHUNK], ids=["one chunk", "chunks"])
def test_kept_tokens_of_a_pack_are_compared_with_a_log_softmax_of_whole_logits(
    learner: ToyLearner, samples: list[Sample], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows is not None:
        monkeypatch.setattr(logit_stats, "HEAD_ELEMENTS", rows * VOCABULARY)
    rollouts = answers(learner, samples, texts(samples))
    segments, _ = learner.channel_b.segments(samples, rollouts)
    found, plain = compared(learner, segments), plain_mismatch(learner, segments, rollouts)
    assert found.roles.tolist() == plain.roles.tolist()
    assert found.nats == pytest.approx(plain.nats, abs=1e-5)
    kept = [len(segment.kept_logprobs) for segment in segments]
    assert kept[0] == segments[0].target.prefix_len
    assert 0 < kept[1] <= segments[1].target.prefix_len
    assert kept[2:] == [0, 0]  # of `{"` the target has `{`

    metrics = mismatch_payload(found).metrics()
    of_kind = {
        "all": list(Role),
        "structure": [Role.MATCHED_STRUCTURE, Role.APPENDED_STRUCTURE, Role.CLOSURE],
        "description": [Role.MATCHED_DESC],
        "coordinate": [Role.COORD],
        "false_positive": [Role.FALSE_POSITIVE],
    }
    assert metrics.keys() == {"mismatch/tokens"} | {
        f"mismatch/{kind}_{which}" for kind in of_kind for which in ("mean", "p99")
    }
    assert metrics["mismatch/tokens"] == sum(kept)
    for kind, roles in of_kind.items():
        own = plain.nats[np.isin(plain.roles, roles)]
        assert metrics[f"mismatch/{kind}_mean"] == pytest.approx(own.mean(), abs=1e-5)
        assert metrics[f"mismatch/{kind}_p99"] == pytest.approx(np.percentile(own, 99), abs=1e-5)


@pytest.mark.req("CLEAN-01")
def test_clean_prefix_counts_to_its_first_edit(learner: ToyLearner, samples: list[Sample]) -> None:
    cat, dog = samples[0].objects
    channel = ChannelB(
        learner.encoding, parse_config(changed("stage2_ab.channel_b.prefix", "clean"))
    )
    rollouts = answers(learner, [samples[0]] * 2, [written(cat, cat, dog), written(cat, dog)])
    (edited, whole), _ = channel.segments([samples[0]] * 2, rollouts)
    kept = edited.target.token_ids[: len(edited.kept_logprobs)]
    assert decode_exactly(learner.tokenizer, kept).endswith(', "object_2": {"desc": "')
    assert len(whole.kept_logprobs) == whole.target.prefix_len
    assert edited.target.token_ids == whole.target.token_ids
    found = compared(learner, [edited, whole])
    plain = plain_mismatch(learner, [edited, whole], rollouts)
    assert found.nats == pytest.approx(plain.nats, abs=1e-5)


@pytest.mark.req("FULL-02")
def test_log_probabilities_cost_rows_only_where_there_are_some_and_change_no_gradient(
    learner: ToyLearner, samples: list[Sample]
) -> None:
    def step(logprobs: bool) -> tuple[PackLoss, dict[str, torch.Tensor], int, int]:
        rollouts = answers(learner, samples, texts(samples), logprobs)
        packed = make_pack(learner.channel_b.segments(samples, rollouts)[0])
        selection = learner.pipeline.select(packed.supervision, "B")
        products = Products()
        with products:
            loss = learner.loss(packed, "B")
        rows = sum(products.rows) - selection.head_rows
        return loss, learner.gradients(loss), rows, len(packed.supervision.kept_positions)

    loss, gradients, more, kept = step(logprobs=False)
    assert (loss.mismatch, more, kept) == (None, 0, 0)
    with_them, same, more, kept = step(logprobs=True)
    assert with_them.mismatch is not None
    assert more == kept == len(with_them.mismatch.nats) > 0
    assert torch.equal(with_them.total, loss.total)
    assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items())


def config(bound: float) -> Config:
    rollout = {"logprobs": True, "max_logprob_mismatch": bound}
    return parse_config(merge(CONFIG.model_dump(mode="json"), {"rollout_matching": rollout}))


class Apart(Given):
    """A recipe whose packs have two kept tokens each, of these differences."""

    def __init__(self, config: Config, nats: tuple[float, float]) -> None:
        super().__init__(config, Ran())
        roles = np.array([Role.MATCHED_STRUCTURE, Role.COORD], np.int8)
        self._mismatch = Mismatch(roles, np.array(nats))

    def loss(
        self, model: nn.Module, pack: Pack, channel: Channel, answer_tokens: float | None = None
    ) -> PackLoss:
        return replace(super().loss(model, pack, channel), mismatch=self._mismatch)


def step(
    config: Config, nats: tuple[float, float], peers: Peers = SINGLE_PROCESS, packs: int = 1
) -> StepReport:
    policy = Policy(Nobody(), RequestSettings("", None, RequestConfig()))
    recipe, chunks = Apart(config, nats), iter([Chunk([pack(1)] * packs, last=True)])
    runner = StepRunner(config, recipe, policy, peers=peers, source=Script(chunks))
    model = nn.Linear(1, 1, bias=False)
    return runner.run(model, fixed_samples(packs), 11, PlainAccelerator())[1]


def test_a_step_above_the_bound_ends_the_run_and_names_causes() -> None:
    logged = step(config(bound=0.5), (0.25, 0.75), packs=3).metrics
    assert (logged["mismatch/tokens"], logged["mismatch/all_mean"]) == (6, 0.5)
    assert "mismatch/description_mean" not in logged
    with pytest.raises(RunError) as caught:
        step(config(bound=0.4), (0.25, 0.75))
    message = str(caught.value)
    assert "step 12" in message
    assert "0.5 nats in the mean of 2 tokens (structure 0.25, coordinate 0.75)" in message
    assert "rollout_matching.max_logprob_mismatch, 0.4" in message
    for cause in ("model.torch_dtype", "sync.verify: full", "version_lag"):
        assert cause in message
