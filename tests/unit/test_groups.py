"""Groups of answers: rewards, advantages, whole answers as targets, and steps over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.config import load_config
from learner.config.rollout_matching import GroupRelativeConfig, MatchingConfig
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import StartModel
from learner.models.packs import Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.rollout.distribution import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout.policy import Policy, request_settings
from learner.runs.metrics import StepReport
from learner.stages.matching import match_objects
from learner.stages.rewards import token_advantages, with_rewards
from learner.stages.targets import assess, kept_logprobs, with_target
from learner.stages.tokens import Tokenizer
from learner.training.channels import recipe_of
from learner.training.step import StepRunner
from learner.types import (
    NEG_CATEGORIES,
    NOT_EXHAUSTIVE_CATEGORIES,
    AssessedRollout,
    GroundTruthObject,
    Reward,
    Role,
    Sample,
)
from tests.unit.answers import encode, entry, text_in_role, text_of
from tests.unit.config_faults import CONFIGS
from tests.unit.grouped import POLICY_GRADIENT, REWARD, SIZE, TOKEN_CE, Answering, group_config
from tests.unit.mixed_samples import box
from tests.unit.packed_logits import packed_logits
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.small_run import rollout, written
from tests.unit.streams import InChunks
from tests.unit.toy_learner import with_awake_adapters

CAT, DOG = box("cat", 0, 0, 100, 100), box("dog", 500, 500, 700, 700)
BOTH = (CAT, DOG)
RESOLUTION = MatchingConfig().maskiou_resolution
GROUPS = load_config(CONFIGS / "stage2_group_relative/base.yaml")
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}


def assessed_as(
    tokenizer: Tokenizer,
    text: str,
    truths: Sequence[GroundTruthObject] = (CAT, DOG),
    finish_reason: str = "stop",
    metadata: dict[str, Any] | None = None,
) -> AssessedRollout:
    sample = Sample("line:1", (), 64, 64, tuple(truths), metadata or {})
    output = replace(rollout([1], encode(tokenizer, text)), finish_reason=finish_reason)
    match = partial(match_objects, config=MatchingConfig())
    return assess(sample, output, tokenizer, match, allow_poly=False)


def groups_of(size: int = 2, advantage: str = "mean", **reward: float) -> GroupRelativeConfig:
    section = {"group_size": size, "advantage": advantage, "reward": REWARD | reward}
    return GroupRelativeConfig.model_validate(section)


def rewarded(config: GroupRelativeConfig, *answers: AssessedRollout) -> list[AssessedRollout]:
    return with_rewards(answers, config, RESOLUTION)


def rewards_of(config: GroupRelativeConfig, *answers: AssessedRollout) -> list[Reward]:
    rewards = [found.reward for found in rewarded(config, *answers)]
    assert all(rewards)
    return [reward for reward in rewards if reward]


EVERYTHING = box("sky", 0, 0, 999, 999)
# IoU 0.8 with CAT: a hit at 7 of the 10 thresholds.
NEAR = box("cat", 0, 0, 100, 80)


@pytest.mark.req("GROUP-01")
@pytest.mark.parametrize(
    ("text", "truths", "parts"),
    [
        # f1, duplicates, oversized, invalid, total
        (written(CAT, DOG), BOTH, (1.0, 0, 0, 0, 1.0)),
        (written(CAT), BOTH, (2 / 3, 0, 0, 0, 2 / 3)),
        (written(NEAR), BOTH, (2 * 0.7 / 3, 0, 0, 0, 2 * 0.7 / 3)),
        (written(CAT, CAT, DOG), BOTH, (4 / 5, 1 / 3, 0, 0, 4 / 5 - 0.5 / 3)),
        (written(CAT, DOG, EVERYTHING, EVERYTHING), BOTH, (4 / 6, 1 / 4, 2 / 4, 0, 4 / 6 - 0.25)),
        # Half of the image, on the right and below.
        (written(CAT, DOG, box("sky", 500, 0, 999, 999)), BOTH, (4 / 5, 0, 0, 0, 4 / 5)),
        (written(CAT, DOG, box("sky", 0, 500, 999, 999)), BOTH, (4 / 5, 0, 0, 0, 4 / 5)),
        (f"{{{entry(1, 'cat', (0, 0, 100))}}}", BOTH, (0.0, 0, 0, 1.0, -2.0)),
        (written(box("dog", 0, 0, 100, 100)), BOTH, (0.0, 0, 0, 0, 0.0)),
        ("garbage", BOTH, (0.0, 0, 0, 0, 0.0)),
        (written(CAT)[:-1] + ', "object_2": {"de', BOTH, (2 / 3, 0, 0, 1 / 2, 2 / 3 - 1.0)),
        # An image without objects, and one object as large as the image.
        ("{}", (), (1.0, 0, 0, 0, 1.0)),
        (written(CAT), (), (0.0, 0, 0, 0, 0.0)),
        (written(EVERYTHING), (EVERYTHING,), (1.0, 0, 0, 0, 1.0)),
    ],
)
def test_a_reward_is_the_f1_of_the_answer_less_its_faults(
    tokenizer: Tokenizer, text: str, truths: tuple[GroundTruthObject, ...], parts: tuple[float, ...]
) -> None:
    reward, _ = rewards_of(groups_of(), *[assessed_as(tokenizer, text, truths)] * 2)
    assert reward[:5] == pytest.approx(parts)


@pytest.mark.req("GROUP-01")
def test_what_lvis_leaves_open_is_not_judged(tokenizer: Tokenizer) -> None:
    answer = written(CAT, EVERYTHING)
    left_open = assessed_as(tokenizer, answer, (CAT,), metadata={NEG_CATEGORIES: []})
    reward, _ = rewards_of(groups_of(), left_open, left_open)
    assert (reward.total, reward.oversized) == (1.0, 0.0)


@pytest.mark.req("GROUP-01")
def test_advantages_are_relative_to_the_group_and_0_without_spread(tokenizer: Tokenizer) -> None:
    right, half, wrong = (
        assessed_as(tokenizer, text) for text in (written(CAT, DOG), written(CAT), "garbage")
    )
    answers = [right, half, wrong, half, half, half]
    mean = rewards_of(groups_of(3), *answers)
    of_mean = [reward.advantage for reward in mean]
    middle = 5 / 9
    assert of_mean == pytest.approx([1 - middle, 2 / 3 - middle, -middle, 0, 0, 0])
    spread = (sum((each - middle) ** 2 for each in (1, 2 / 3, 0)) / 3) ** 0.5
    assert [reward.spread for reward in mean] == pytest.approx([spread] * 3 + [0] * 3)
    of_std = [reward.advantage for reward in rewards_of(groups_of(3, "mean_std"), *answers)]
    assert of_std == pytest.approx([each / (spread + 1e-6) for each in of_mean])
    assert of_std[3:] == [0, 0, 0]


@pytest.mark.req("GROUP-01")
@pytest.mark.parametrize("advantage", ["mean", "mean_std"])
def test_equal_rewards_have_no_spread_also_where_their_mean_is_rounded(
    tokenizer: Tokenizer, advantage: str
) -> None:
    config = groups_of(3, advantage, duplicate_weight=0.0)
    for reward in rewards_of(config, *[assessed_as(tokenizer, written(CAT, CAT, DOG))] * 3):
        assert np.full(3, reward.total).std() > 0
        assert (reward.spread, reward.advantage) == (0, 0)


@pytest.mark.req("GROUP-01")
@pytest.mark.parametrize("advantage", ["mean", "mean_std"])
def test_an_object_has_what_it_adds_to_the_reward_of_the_objects_before_it(
    tokenizer: Tokenizer, advantage: str
) -> None:
    config = groups_of(3, advantage).model_copy(update={"credit": "object"})
    unfinished = ', "object_2": {"de'
    texts = (written(CAT, CAT, DOG), written(DOG)[:-1] + unfinished, "garbage")
    rewards: list[list[float]] = [
        [0, 2 / 3, 2 / 4 - 0.5 / 2, 4 / 5 - 0.5 / 3, 4 / 5 - 0.5 / 3],
        [0, 2 / 3, 2 / 3 - 2 / 2],
        [0, 0],
    ]
    parts = [[after - before for before, after in pairwise(totals)] for totals in rewards]
    scale = 1.0 if advantage == "mean" else np.std([*chain(*parts)]) + 1e-6
    found = rewarded(config, *(assessed_as(tokenizer, text) for text in texts))
    for text, answer, own in zip(texts, found, parts, strict=True):
        assert answer.reward is not None
        credits = answer.reward.credits or ()
        assert credits == pytest.approx([part / scale for part in own])
        ids = answer.rollout.response_token_ids
        tokens = token_advantages(answer, len(ids))
        assert token_advantages(answer, 2) == tokens[:2]
        runs = [(key, [*run]) for key, run in groupby(zip(tokens, ids, strict=True), itemgetter(0))]
        ends = len(runs) if text.endswith("}") else len(own)  # the last `}}` may be one token
        assert tuple(key for key, _ in runs) == credits[:ends]
        for number, (_, run) in enumerate(runs[: len(own) - 1], start=1):
            assert f'"object_{number}"' in text_of(tokenizer, [token for _, token in run])


# Of three cats, the most hits with the largest IoUs leave the second one unjudged. At 0.55 to 0.7
# it would be a hit, and the third one is none.
CATS = (box("cat", 200, 200, 300, 300), box("cat", 216, 200, 316, 300))
SAID = (CATS[0], box("cat", 200, 200, 272, 300), box("cat", 264, 200, 316, 300))


@pytest.mark.req("GROUP-01")
@pytest.mark.parametrize(
    ("said", "truths", "totals"),
    [
        (SAID, CATS, (0, 2 / 3, 2 / 3, 2 * 1.1 / 4)),
        ((CAT, EVERYTHING, DOG), BOTH, (0, 2 / 3, 2 / 4 - 0.25 / 2, 4 / 5 - 0.25 / 3)),
        # A hit with an IoU of 0.52 is not oversized.
        ((EVERYTHING,), (box("sky", 0, 0, 519, 999),), (0, 2 * 0.1 / 2)),
    ],
    ids=["unjudged", "oversized", "hit"],
)
def test_faults_count_from_their_object_on(
    tokenizer: Tokenizer,
    said: tuple[GroundTruthObject, ...],
    truths: tuple[GroundTruthObject, ...],
    totals: tuple[float, ...],
) -> None:
    lists = {NOT_EXHAUSTIVE_CATEGORIES: ["cat"]}
    answer = assessed_as(tokenizer, written(*said), truths, metadata=lists)
    config = groups_of(duplicate_weight=0.0).model_copy(update={"credit": "object"})
    reward, _ = rewards_of(config, answer, answer)
    assert reward.credits is not None
    steps = [after - before for before, after in pairwise([*totals, totals[-1]])]
    assert reward.credits == pytest.approx(steps)


@pytest.mark.req("GROUP-02")
@pytest.mark.parametrize("ended", [True, False])
def test_a_whole_answer_is_the_target_with_the_roles_of_its_objects(
    tokenizer: Tokenizer, ended: bool
) -> None:
    text = written(CAT, box("ghost", 800, 800, 900, 900))
    text = text if ended else text[:-12]
    found = assessed_as(tokenizer, text, finish_reason="stop" if ended else "length")
    target = with_target(found, tokenizer, GROUPS).target
    assert target is not None
    response = found.rollout.response_token_ids
    assert (target.prefix_len, target.fn_keys, target.coord_groups) == (len(response), [], [])
    assert text_of(tokenizer, target.token_ids) == text + ("<|im_end|>" if ended else "")
    assert text_in_role(tokenizer, target, Role.MATCHED_DESC) == "cat"
    assert "ghost" in text_in_role(tokenizer, target, Role.FALSE_POSITIVE)
    closure = text_in_role(tokenizer, target, Role.CLOSURE)
    assert closure in (("}<|im_end|>", "<|im_end|>") if ended else ("",))  # `}}` may be one token
    with_logprobs = replace(found.rollout, logprobs=[-1.0] * len(response))
    assert len(kept_logprobs(with_logprobs, target)) == len(response)


@pytest.mark.req("GROUP-02")
def test_an_answer_without_a_token_is_left_out(tokenizer: Tokenizer) -> None:
    found = assessed_as(tokenizer, "", finish_reason="length")
    found = with_target(found, tokenizer, GROUPS)
    assert (found.target, found.left_out) == (None, "the answer has no token")


Gradients = dict[str, Tensor]


@dataclass
class Ran:
    report: StepReport
    loss: float
    gradients: Gradients
    seeds: list[int]


def in_training(config: Config) -> LoadedModel:
    torch.manual_seed(0)
    loaded = load_model(config)
    loaded.model.train()
    return with_awake_adapters(loaded)


class Scene:
    """A recipe on a model in training, with scripted answers.

    given: the model; None: it is loaded, which threads cannot do at the same time.
    """

    def __init__(
        self, config: Config, samples: Sequence[Sample], given: LoadedModel | None = None
    ) -> None:
        self.config, self.samples = config, samples
        self.loaded = given or in_training(config)
        prompt = PromptEncoder(self.loaded.processor, config.template.prompt, None)
        self.answers = Answering(samples, self.loaded.tokenizer, prompt)
        self.start = StartModel(config, self.loaded) if config.needs_start else None
        self.recipe = recipe_of(config, self.loaded, self.start)

    @property
    def gradients(self) -> Gradients:
        named = self.loaded.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def segments(self, seed: int) -> tuple[list[Segment], list[AssessedRollout]]:
        policy = Policy(self.answers, request_settings(self.config))
        policy.push()
        asked = [sample for sample in self.samples for _ in range(SIZE)]
        return self.recipe.channel_b.segments(asked, policy.answer(asked, seed))


def run_step(
    config: Config,
    samples: Sequence[Sample],
    peers: Peers = SINGLE_PROCESS,
    given: LoadedModel | None = None,
) -> Ran:
    scene = Scene(config, samples, given)
    policy = Policy(InChunks(scene.answers, 3), request_settings(config))
    runner = StepRunner(config, scene.recipe, policy, peers=peers)
    own = len(samples) // peers.count
    mine = samples[peers.rank * own : (peers.rank + 1) * own]
    loss, report = runner.run(scene.loaded.model, mine, 0, PlainAccelerator())
    return Ran(report, loss.item(), scene.gradients, scene.answers.seeds)


def close(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    assert largest > 0
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * largest)


@pytest.fixture(scope="module")
def scenes(scenes: list[Sample]) -> list[Sample]:
    return scenes[:4]


ConfigOf = Callable[..., Config]


@pytest.fixture
def config_of(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> ConfigOf:
    def of(*objective: dict[str, Any], **sections: Any) -> Config:
        if objective:
            sections["stage2_ab"] = {"pipeline": {"objective": [*objective]}}
        return group_config(toy_checkpoint, toy_data, tmp_path, **sections)

    return of


def with_kl(weight: float) -> dict[str, Any]:
    return POLICY_GRADIENT | {"config": POLICY_GRADIENT["config"] | {"kl_weight": weight}}


@pytest.mark.req("GROUP-01", "GROUP-03", "PACK-04", "SEED-01")
@pytest.mark.parametrize("credit", ["answer", "object"])
def test_a_step_is_the_mean_over_the_tokens_of_all_its_answers(
    config_of: ConfigOf, scenes: list[Sample], credit: str
) -> None:
    config = config_of(global_max_length=400, group_relative={"credit": credit})
    ran = run_step(config, scenes)
    metrics = ran.report.metrics
    assert metrics["packing/post_rollout_segments"] == SIZE * len(scenes)
    assert metrics["packing/post_rollout_packs"] > 1
    first = request_seed(rank_seed_base(rollout_seed_base(11, 0), 0), 0, 0)
    assert ran.seeds == list(range(first, first + SIZE * len(scenes)))
    assert metrics["stage2_ab/channel_b/fn_appended"] == 0
    assert metrics["reward/no_spread"] == 0
    assert metrics["reward/spread"] > 0
    assert metrics["loss/B_answer/policy_gradient"] == pytest.approx(ran.loss, rel=1e-4)
    assert "policy_gradient/kl" not in metrics

    scene = Scene(config, scenes)
    segments, assessed = scene.segments(first)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for segment, each in zip(segments, assessed, strict=True):
        pack = make_pack([segment])
        assert pack.supervision.kept_positions.numel() == len(each.rollout.response_token_ids)
        log_p = packed_logits(scene.loaded.model, pack).double().log_softmax(-1)
        places = pack.supervision.kept_positions
        chosen = log_p[places - 1, pack.supervision.input_ids[places]]
        ratio = (chosen - pack.supervision.kept_logprobs.double()).exp()
        assert each.reward is not None
        advantage = torch.full((len(places),), each.reward.advantage).double()
        if each.reward.credits is not None:
            ends = [end + 1 for end, _ in each.parsed.entry_ends]
            spans = pairwise([0, *ends, len(places)])
            for (start, end), own in zip(spans, each.reward.credits, strict=True):
                advantage[start:end] = own
        held = ratio.clamp(0.8, 1.3)
        total = total - torch.minimum(ratio * advantage, held * advantage).sum()
        tokens += len(places)
    (total / tokens).backward()
    assert ran.loss == pytest.approx((total / tokens).item(), rel=1e-4)
    close(ran.gradients, scene.gradients)


@pytest.mark.req("GROUP-03", "DDP-02")
def test_two_processes_make_the_step_of_one(config_of: ConfigOf, scenes: list[Sample]) -> None:
    """Answers of unequal lengths in unequal numbers of packs; gradients are averaged."""
    config = config_of(with_kl(0.5), tuner=LORA, global_max_length=300)
    ordered = sorted(scenes, key=lambda scene: len(scene.objects))
    one = run_step(config, ordered)
    models = [in_training(config), in_training(config)]
    done = in_ranks(2, lambda peers: run_step(config, ordered, peers, models[peers.rank]))
    ranks = [future.result() for future in done]
    assert ranks[0].seeds != ranks[1].seeds
    means = {n: (g + ranks[1].gradients[n]) / 2 for n, g in ranks[0].gradients.items()}
    close(means, one.gradients)
    assert sum(rank.loss for rank in ranks) / 2 == pytest.approx(one.loss, rel=1e-4)


@pytest.mark.req("GROUP-02", "GROUP-03")
def test_both_methods_append_missed_objects_beside_the_policy_gradient(
    config_of: ConfigOf, scenes: list[Sample]
) -> None:
    config = config_of(TOKEN_CE, POLICY_GRADIENT)
    assert config_of().whole_answers
    assert not config.whole_answers
    metrics = run_step(config, scenes).report.metrics
    missed = sum(len(scene.objects) - 1 for scene in scenes)
    assert metrics["stage2_ab/channel_b/fn_appended"] == missed > 0
    losses = {key for key in metrics if key.startswith("loss/")}
    assert losses == {
        "loss/B_answer/policy_gradient",
        "loss/B_rollout_text/struct_ce",
        "loss/B_rollout_text/desc_ce",
    }


@pytest.mark.req("GROUP-04")
@pytest.mark.parametrize("tuner", [{"train_type": "full"}, LORA], ids=["full", "lora"])
def test_the_start_stays_what_it_was_and_the_trained_model_has_its_gradients(
    config_of: ConfigOf, scenes: list[Sample], tuner: dict[str, Any]
) -> None:
    config = config_of(with_kl(0.3), tuner=tuner)
    loaded = load_model(config)
    model = loaded.model.train()
    scene = Scene(config, scenes, loaded)
    recipe, start = scene.recipe, scene.start
    assert start is not None
    pack = make_pack(scene.segments(1)[0])

    def forward() -> tuple[Tensor, dict[str, float]]:
        model.zero_grad()
        found = recipe.loss(model, pack, "B")
        found.total.backward()
        reader = recipe.objective.reader(recipe.objective.select(pack.supervision, "B"))
        return start.forward(pack, reader.kept), found.atoms

    before, atoms = forward()
    assert atoms["loss/B_answer/kl"] == pytest.approx(0, abs=1e-9)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.02 * torch.randn(weight.shape, generator=draw))
    after, atoms = forward()
    assert torch.equal(after, before)
    assert atoms["loss/B_answer/kl"] > 1e-6
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trained)
