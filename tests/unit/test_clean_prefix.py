"""Duplicates leave the prefix of an answer, and where they depart from its target."""

import json
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import parse_config
from learner.config.rollout_matching import MatchingConfig
from learner.objectives.duplicate_ul import LEAST_NLL, unlikelihood
from learner.stages.clean_prefix import without_false_positives
from learner.stages.formats import AnswerFormat
from learner.stages.formats.coord_json import COORD_JSON, CoordJson
from learner.stages.matching import match_objects
from learner.stages.targets import assess, with_target
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout, GroundTruthObject, Role, Sample, Target
from tests.unit.answers import CAT, DOG, ROOF, coords, encode, entry, pieces, text_of
from tests.unit.config_faults import changed
from tests.unit.small_run import rollout

MATCHING = MatchingConfig()
VERBATIM = parse_config(changed("stage2_ab.channel_b", {"prefix": "verbatim"}))
MATCHED = parse_config(changed("stage2_ab.channel_b", {"prefix": "matched"}))
CAT_BINS, DOG_BINS = CAT.shape.coords, DOG.shape.coords
NEAR_CAT = (12, 20, 300, 400)


def assessed_of(
    tokenizer: Tokenizer,
    answer: str | list[int],
    truths: list[GroundTruthObject],
    duplicate_iou: float | None = 0.9,
    answers: AnswerFormat = COORD_JSON,
) -> AssessedRollout:
    sample = Sample("train.jsonl:1", (), 100, 100, tuple(truths))
    ids = encode(tokenizer, answer) if isinstance(answer, str) else answer
    match = partial(match_objects, config=MATCHING)
    keys: dict[str, Any] = {"allow_poly": True, "answers": answers, "duplicate_iou": duplicate_iou}
    found = assess(sample, rollout([], ids), tokenizer, match, **keys)
    return with_target(found, tokenizer, VERBATIM)


def prefix_text(tokenizer: Tokenizer, assessed: AssessedRollout) -> str:
    return text_of(tokenizer, assessed.parsed.prefix_token_ids)


def departing(tokenizer: Tokenizer, target: Target) -> list[tuple[str, str, str]]:
    """(text before, token of the duplicate, token of the target) of each departure."""
    return [
        (
            text_of(tokenizer, target.token_ids[:position]),
            text_of(tokenizer, [token]),
            text_of(tokenizer, [target.token_ids[position]]),
        )
        for position, token in target.departures
    ]


# ---- the prefix ----------------------------------------------------------------------


ROOF_SAID = '"object_%d": {"desc": "roof", "poly": ' + coords(0, 0, 500, 0, 500, 500) + "}"


@pytest.mark.req("CLEAN-01", "EVAL-02")
@pytest.mark.parametrize(
    ("first", "second", "removed"),
    [
        (entry(1), entry(2, "cat", (60, 20, 300, 400)), False),
        (entry(1, "caf\u00e9"), entry(2, "cafe\u0301"), True),
        (ROOF_SAID % 1, ROOF_SAID % 2, True),
    ],
    ids=["far", "another Unicode form", "polygon"],
)
def test_a_duplicate_has_the_description_and_nearly_the_place(
    tokenizer: Tokenizer, first: str, second: str, removed: bool
) -> None:
    found = assessed_of(tokenizer, "{" + first + ", " + second + "}", [CAT])
    assert bool(found.duplicates) == removed


@pytest.mark.req("CLEAN-01")
def test_what_cannot_be_spelled_without_its_duplicates_is_left_out(tokenizer: Tokenizer) -> None:
    class Clumsy(CoordJson):
        def keep(self, *_: object) -> list[int]:
            return encode(tokenizer, "{" + entry(1, "dog"))

    answer = "{" + entry(1) + ", " + entry(2) + "}"
    found = assessed_of(tokenizer, answer, [CAT], answers=Clumsy())
    assert found.target is None
    assert found.left_out is not None
    assert "without 1 of its objects it is read differently" in found.left_out
    assert len(found.parsed.objects) == 2


# ---- the prefix of matched objects ----------------------------------------------------


@pytest.mark.req("CLEAN-01", "CHB-01", "APPEND-02")
def test_a_matched_prefix_has_no_false_positive(tokenizer: Tokenizer) -> None:
    broken = '"object_4": {"desc": "hat"}'
    entries = [
        entry(1, "dog", (700, 700, 800, 800)),
        entry(2, "cat", NEAR_CAT),
        entry(3, "cat", NEAR_CAT),
        broken,
    ]
    verbatim = assessed_of(tokenizer, "{" + ", ".join(entries) + "}", [CAT, DOG], None)
    found = with_target(verbatim._replace(target=None), tokenizer, MATCHED)
    assert (found.parsed, found.match.pairs) == (verbatim.parsed, verbatim.match.pairs)
    assert len(found.match.false_positives) == 2, "scores are those of the answer"
    assert found.target is not None
    kept = [entry(1, "cat", NEAR_CAT), broken, entry(5, "red dog", DOG_BINS)]
    assert text_of(tokenizer, found.target.token_ids) == "{" + ", ".join(kept) + "}<|im_end|>"
    assert [group.bins for group in found.target.coord_groups] == [CAT_BINS, DOG_BINS]
    assert found.target.departures == []
    passed_over = found.target.role == Role.FALSE_POSITIVE
    assert "hat" in text_of(tokenizer, np.array(found.target.token_ids)[passed_over].tolist())


@pytest.mark.req("CLEAN-01")
def test_the_match_of_a_matched_prefix_counts_its_own_objects(tokenizer: Tokenizer) -> None:
    answer = "{" + entry(1, "dog", DOG_BINS) + ", " + ROOF_SAID % 2 + ", " + entry(3) + "}"
    found = assessed_of(tokenizer, answer, [CAT, ROOF], None)
    rest, match = without_false_positives(
        found.parsed, found.match, tokenizer, COORD_JSON, allow_poly=True
    )
    assert [each.desc for each in rest.objects] == ["roof", "cat"]
    assert (match.pairs, match.false_positives) == ([(0, 1), (1, 0)], [])
    assert np.array_equal(match.mask_iou, found.match.mask_iou[1:], equal_nan=True)


@pytest.mark.req("CLEAN-01", "CHB-01", "APPEND-02")
@given(
    said=st.lists(st.sampled_from([CAT, DOG, GroundTruthObject("cat", DOG.shape)]), max_size=5),
    truths=st.lists(st.sampled_from([CAT, DOG]), max_size=3),
)
def test_a_target_of_matched_objects_is_the_annotation_in_the_order_of_the_answer(
    said: list[GroundTruthObject], truths: list[GroundTruthObject], tokenizer: Tokenizer
) -> None:
    answer = COORD_JSON.write(said, "desc_first")
    found = assessed_of(tokenizer, answer, truths, None)
    match = found.match
    found = with_target(found._replace(target=None), tokenizer, MATCHED)
    assert found.target is not None
    again = COORD_JSON.parse(found.target.token_ids, tokenizer)
    matched = [truths[truth] for _, truth in sorted(match.pairs)]
    missed = [truths[truth] for truth in match.false_negatives]
    assert [(each.desc, each.shape) for each in again.objects] == [
        (said[prediction].desc, said[prediction].shape) for prediction, _ in sorted(match.pairs)
    ] + [(each.desc, each.shape) for each in missed]
    assert [each.index for each in again.objects] == list(range(1, len(truths) + 1))
    taught = [group.bins for group in found.target.coord_groups]
    assert sorted(taught) == sorted(each.shape.coords for each in (*matched, *missed))


# ---- departures ----------------------------------------------------------------------


@pytest.mark.req("CLEAN-02")
@pytest.mark.parametrize(
    ("said", "truths", "expected"),
    [
        (
            [entry(1), entry(2), entry(3, "dog", DOG_BINS)],
            [CAT, DOG],
            [('{"desc": "', "cat", "dog")],
        ),
        (
            [entry(1), entry(2, "cat", NEAR_CAT), entry(3, "cat", DOG_BINS)],
            [CAT],
            [('{"desc": "cat", "bbox_2d": ["', "<|coord_12|>", "<|coord_500|>")],
        ),
        (
            [entry(1), entry(2), entry(3), entry(4, "red dog", DOG_BINS), entry(5)],
            [CAT, DOG],
            [('"object_2": {"desc": "', "cat", "red dog"), ("", None, None)],
        ),
        ([entry(1), entry(2)], [CAT], [("", None, None)]),
        ([entry(1), entry(2)], [CAT, CAT], []),
        (
            [entry(1), entry(2, "red dog", DOG_BINS), entry(3), entry(4, "red dog", DOG_BINS)],
            [CAT, DOG, CAT],
            [],
        ),
    ],
    ids=["description", "coordinate", "in a row", "at the end", "the same words", "behind these"],
)
def test_a_duplicate_departs_where_the_target_differs(
    tokenizer: Tokenizer,
    said: list[str],
    truths: list[GroundTruthObject],
    expected: list[tuple[str, str | None, str | None]],
) -> None:
    """expected: the end of the text before, and what begins there; None: the answer should end."""
    target = assessed_of(tokenizer, "{" + ", ".join(said) + "}", truths).target
    assert target is not None
    found = departing(tokenizer, target)
    assert len(found) == len(expected)
    for (before, token, taught), (end, wrong, right) in zip(found, expected, strict=True):
        if wrong is None or right is None:
            whole = text_of(tokenizer, target.token_ids[:-1])
            assert (before + token).startswith(whole.removesuffix("}") + ",")
        else:
            assert before.endswith(end)
            assert wrong.startswith(token)
            assert right.startswith(taught)
            assert token != taught


@pytest.mark.req("CLEAN-02")
def test_a_duplicate_can_depart_within_a_character(tokenizer: Tokenizer) -> None:
    one, other = "\U00020000", "\U00020001"  # four bytes each, of which the last one differs
    missed = GroundTruthObject(other, ROOF.shape)
    said = [entry(1, one), entry(2, "red dog", DOG_BINS), entry(3, one)]
    target = assessed_of(tokenizer, "{" + ", ".join(said) + "}", [DOG, missed]).target
    assert target is not None
    ((before, wrong, right),) = departing(tokenizer, target)
    assert before.endswith('{"desc": "\ufffd')
    assert wrong == right == "\ufffd"


# ---- any answer ----------------------------------------------------------------------

SHAPES = [CAT_BINS, NEAR_CAT, DOG_BINS, (0, 0, 999, 999)]
OBJECTS = st.lists(
    st.tuples(st.sampled_from(["cat", "cats", "猫", "red dog"]), st.sampled_from(SHAPES)),
    min_size=1,
    max_size=8,
)


@pytest.mark.req("CLEAN-01", "CLEAN-02")
@given(OBJECTS, st.lists(st.sampled_from([CAT, DOG]), max_size=3), st.booleans())
def test_any_answer_is_the_same_without_its_duplicates(
    tokenizer: Tokenizer,
    said: list[tuple[str, tuple[int, ...]]],
    truths: list[GroundTruthObject],
    closed: bool,
) -> None:
    answer = "{" + ", ".join(entry(n, *each) for n, each in enumerate(said, start=1))
    said_ids = encode(tokenizer, answer + "}" * closed)
    found = assessed_of(tokenizer, said_ids, truths)
    # The plain meaning of the rule: objects in order, those that repeat one before left out.
    cats = {CAT_BINS, NEAR_CAT}
    kept = [
        (desc, bins)
        for n, (desc, bins) in enumerate(said)
        if not any(
            desc == other and (bins == there or {bins, there} <= cats) for other, there in said[:n]
        )
    ]
    clean = "{" + ", ".join(entry(n, *each) for n, each in enumerate(kept, start=1))
    assert prefix_text(tokenizer, found) == clean
    assert found.duplicates is not None
    assert len(kept) + len(found.duplicates) == len(said)
    if len(kept) == len(said):
        assert (
            found.parsed.prefix_token_ids
            == assessed_of(tokenizer, said_ids, truths, duplicate_iou=None).parsed.prefix_token_ids
        )
    assert found.target is not None
    json.loads(text_of(tokenizer, found.target.token_ids[:-1]))
    keys = re.findall(r"object_(\d+)", text_of(tokenizer, found.target.token_ids))
    assert keys == [str(n) for n in range(1, len(keys) + 1)]
    assert len(found.target.departures) <= len(found.duplicates)
    pieces_of = pieces(tokenizer, found.target.token_ids)
    for position, token in found.target.departures:
        assert text_of(tokenizer, [token]) != pieces_of[position]
        rest = "".join(pieces_of[position:])
        assert not rest.startswith(text_of(tokenizer, [token]))


# ---- the objective -------------------------------------------------------------------


@pytest.mark.req("CLEAN-02", "LOSS-05")
@pytest.mark.parametrize("nll", [0.0, 1e-12, 1e-7, 1e4])
def test_unlikelihood_is_finite_however_sure_the_model_is(nll: float) -> None:
    given = torch.tensor([nll], requires_grad=True)
    loss = unlikelihood(given).sum()
    loss.backward()
    assert 0 <= loss.item() <= -math.log(LEAST_NLL) + 1e-3
    assert given.grad is not None
    assert torch.isfinite(given.grad).all()
    if nll < LEAST_NLL:
        assert given.grad.item() == pytest.approx(-1 / LEAST_NLL, rel=0.01)
