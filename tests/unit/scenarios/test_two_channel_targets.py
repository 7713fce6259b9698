"""Scenarios of what either channel is taught, and which of its text (seed 001).

Each runs on the toy tokenizer and on Qwen's own.
"""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from learner.config import parse_config
from learner.objectives.token_ce import TokenCEConfig, token_weights
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.targets import build_ground_truth_target
from learner.types import FieldOrder, ParsedObject, Role, Target
from tests.unit.answers import BIRD, CAT, DOG, encode, entry, text_of
from tests.unit.config_faults import WARMUP
from tests.unit.scenarios.test_parsing_and_append import CAT_ENTRY, answer_of, parse, train_on

GHOST = entry(2, "ghost", (900, 900, 999, 999))
MIXED = f"{{{CAT_ENTRY}, {GHOST}}}"
GEOMETRY_FIRST, DESC_FIRST = ["bbox_2d", "desc"], ["desc", "bbox_2d"]


# --- What is written --------------------------------------------------------------------


@pytest.mark.req("PARSE-05", "APPEND-02")
@pytest.mark.parametrize("cut", [0, 1, 3, 30])
def test_rollout_prefix_fn_append_produces_a_valid_teacher_forced_target(
    tokenizer: PreTrainedTokenizerFast, cut: int
) -> None:
    """The rollout's text up to its last complete object, and JSON from there on."""
    said = text_of(tokenizer, encode(tokenizer, MIXED)[: -cut or None])
    target = train_on(tokenizer, said, CAT, DOG)
    whole = GHOST in said
    kept = MIXED.removesuffix("}") if whole else f"{{{CAT_ENTRY}"
    appended = f", {entry(3 if whole else 2, 'red dog', DOG.shape.coords)}}}"
    assert text_of(tokenizer, target.token_ids[: target.prefix_len]) == kept
    assert text_of(tokenizer, target.token_ids[target.prefix_len : -1]) == appended
    assert len(answer_of(tokenizer, target)) == (3 if whole else 2)


@pytest.mark.req("APPEND-01")
def test_channel_b_uses_geometry_first_for_fn_append_when_configured(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    orders: tuple[FieldOrder, ...] = ("desc_first", "geometry_first")
    before, target = (train_on(tokenizer, MIXED, CAT, DOG, order=order) for order in orders)
    assert target.fn_keys == ["object_3"]
    assert list(answer_of(tokenizer, target)["object_3"]) == GEOMETRY_FIRST
    same = slice(target.prefix_len)
    assert target.token_ids[same] == before.token_ids[same]
    assert target.role[same].tolist() == before.role[same].tolist(), "masks are those of before"
    taught = [[(group.bins, group.matched) for group in t.coord_groups] for t in (before, target)]
    assert taught[0] == taught[1]


@pytest.mark.req("APPEND-01")
def test_default_desc_first_behavior_is_preserved_in_both_channels(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert "object_field_order" not in WARMUP["custom"]
    order = parse_config(WARMUP).custom.object_field_order
    channel_a = build_ground_truth_target([CAT, DOG], tokenizer, order)
    channel_b = train_on(tokenizer, MIXED, CAT, DOG, order=order)
    for target in (channel_a, channel_b):
        assert {tuple(item) for item in answer_of(tokenizer, target).values()} == {
            tuple(DESC_FIRST)
        }


@pytest.mark.req("PARSE-03", "APPEND-01")
def test_geometry_first_does_not_change_rollout_appearance_order_handling(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(9, "red dog", DOG.shape.coords) + ", " + entry(2) + "}"
    assert [found.key for found in parse(tokenizer, rollout).objects] == ["object_9", "object_2"]
    target = train_on(tokenizer, rollout, CAT, BIRD, DOG, order="geometry_first")
    answer = answer_of(tokenizer, target)
    assert list(answer) == ["object_9", "object_2", "object_10"]
    assert [list(item) for item in answer.values()] == [DESC_FIRST, DESC_FIRST, GEOMETRY_FIRST]


@pytest.mark.req("PARSE-04", "APPEND-02")
@pytest.mark.parametrize(
    "rollout", ["nothing here", "{}", "{" + entry(1, "", (1, 2, 3, 4)) + ", " + GHOST[:-9]]
)
def test_no_valid_predictions_fall_back_to_canonical_gt_order(
    tokenizer: PreTrainedTokenizerFast, rollout: str
) -> None:
    assert parse(tokenizer, rollout).objects == []
    truth = (DOG, BIRD, CAT)
    target = train_on(tokenizer, rollout, *truth)
    appended = [answer_of(tokenizer, target)[key]["desc"] for key in target.fn_keys]
    assert appended == [item.desc for item in truth]
    taught = [(group.bins, group.matched) for group in target.coord_groups]
    assert taught == [(item.shape.coords, False) for item in truth]


# --- Which of its text is supervised ----------------------------------------------------


TAUGHT = TokenCEConfig(
    desc_ce_weight=1.0,
    rollout_fn_desc_weight=0.25,
    rollout_matched_prefix_struct_weight=0.75,
    self_context_struct_ce_weight=0.0,
)
SILENT = TAUGHT.model_copy(
    update={"rollout_fn_desc_weight": 0.0, "rollout_matched_prefix_struct_weight": 0.0}
)


def ce_weights(target: Target, config: TokenCEConfig = TAUGHT) -> list[float]:
    """Of each token of a channel-B target; (T,)."""
    kept_all = torch.zeros(len(target.role), dtype=torch.bool)
    weights: list[float] = token_weights(
        torch.from_numpy(target.role), kept_all, config, "B"
    ).tolist()
    return weights


def objects_in(target: Target, tokenizer: PreTrainedTokenizerFast) -> list[ParsedObject]:
    """As the strict parser finds them in a finished target."""
    return parse_rollout(target.token_ids, tokenizer).objects


def structure_of(found: ParsedObject) -> set[int]:
    """Tokens of its entry that are neither description nor coordinate.

    The last one is left out: it may be fused with the start of the entry that follows.
    """
    start, end = found.token_span
    return set(range(start, end - 1)) - {*found.desc_token_indices, *found.coord_token_indices}


@pytest.mark.req("LOSS-01")
def test_ce_masking_follows_matched_fp_fn_policy(tokenizer: PreTrainedTokenizerFast) -> None:
    target = train_on(tokenizer, MIXED, CAT, DOG)
    weights = ce_weights(target)
    matched, ghost, appended = objects_in(target, tokenizer)
    assert {weights[i] for i in range(*ghost.token_span)} == {0.0}
    for found, structure, desc in ((matched, 0.75, 0.0), (appended, 1.0, 0.25)):
        assert {weights[i] for i in structure_of(found)} == {structure}
        assert {weights[i] for i in found.desc_token_indices} == {desc}
        assert {weights[i] for i in found.coord_token_indices} == {0.0}


@pytest.mark.req("LOSS-02", "RES-05")
def test_closure_supervision_brace_target_is_the_same_brace_used_for_injection(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    odd = entry(1, '}} {\\" }', CAT.shape.coords)
    for rollout in ("{" + odd + "}", "{" + odd, MIXED, "{}", "{", "nothing"):
        target = train_on(tokenizer, rollout, CAT, DOG)
        answer_of(tokenizer, target)  # valid JSON, so that its last `}` closes the outermost `{`
        assert text_of(tokenizer, target.token_ids[:-1]).endswith("}")
        length = len(target.token_ids)
        closure = [i for i, role in enumerate(target.role) if role == Role.CLOSURE]
        assert closure == [length - 2, length - 1]
        assert max(o.token_span[0] for o in objects_in(target, tokenizer)) < closure[0]
        assert [ce_weights(target)[i] for i in closure] == [1.0, 1.0]


@pytest.mark.req("RES-05", "LOSS-01")
@pytest.mark.parametrize("config", [TAUGHT, SILENT])
def test_channel_b_supervises_top_level_closure_and_im_end(
    tokenizer: PreTrainedTokenizerFast, config: TokenCEConfig
) -> None:
    for truth in ((CAT,), (CAT, DOG)):
        target = train_on(tokenizer, MIXED, *truth)
        assert text_of(tokenizer, target.token_ids).endswith("}<|im_end|>")
        assert all(weight >= 1.0 for weight in ce_weights(target, config)[-2:])


@pytest.mark.req("RES-05", "LOSS-01")
def test_stop_neutral_masking_is_not_applied(tokenizer: PreTrainedTokenizerFast) -> None:
    """All text without cross-entropy lies in the false positive or a matched description."""
    target = train_on(tokenizer, MIXED, CAT, DOG)
    matched, ghost, appended = objects_in(target, tokenizer)
    masked = {i for i, weight in enumerate(ce_weights(target)) if weight == 0.0}
    values = {*matched.desc_token_indices, *matched.coord_token_indices}
    values |= {*appended.coord_token_indices}
    led_up_to = range(matched.token_span[1] - 1, ghost.token_span[0])
    assert masked - set(led_up_to) == values | set(range(*ghost.token_span))
