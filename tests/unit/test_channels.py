"""From samples and hand-made answers to segments: what each channel supervises and counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.models.load import LoadedModel, load_model
from learner.models.packs import Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.runs.metrics import rollout_payload
from learner.runs.rollout_log import LoggedAnswer
from learner.stages.targets import build_ground_truth_target
from learner.stages.tokens import decode_exactly
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.types import AnswerFault, GroundTruthObject, Role, RolloutOutput, Sample, Shape
from tests.unit.answers import entry
from tests.unit.config_faults import ALIGNED, WARMUP, changed
from tests.unit.refusals import refused
from tests.unit.small_run import small_config, written
from tests.unit.toy_learner import PROMPT, ToyLearner

CAT = GroundTruthObject("red ellipse", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("blue triangle", Shape("bbox_2d", (500, 510, 700, 710)))
GHOST = GroundTruthObject("green rectangle", Shape("bbox_2d", (800, 0, 999, 90)))


@pytest.fixture(scope="module")
def loaded(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    return load_model(small_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("out")))


@pytest.fixture(scope="module")
def scene(scenes: list[Sample]) -> Sample:
    """A scene whose annotation is CAT and DOG, whatever its image shows."""
    return replace(scenes[0], objects=(CAT, DOG))


class Answering(ToyLearner):
    def __init__(
        self, loaded: LoadedModel, scene: Sample, mapping: dict[str, Any] = WARMUP
    ) -> None:
        super().__init__(loaded)
        self.scene = scene
        self.channel = ChannelB(self.encoding, parse_config(mapping))

    def rollout(self, text: str) -> RolloutOutput:
        return self.answer(self.scene, text)

    def segments(self, *texts: str) -> tuple[list[Segment], dict[str, float]]:
        segments, assessed = self.channel.segments(
            [self.scene] * len(texts), [self.rollout(text) for text in texts]
        )
        return segments, rollout_payload(assessed).metrics()

    def target_text(self, segment: Segment) -> str:
        return decode_exactly(self.tokenizer, segment.target.token_ids)


@pytest.fixture
def answering(loaded: LoadedModel, scene: Sample) -> Answering:
    return Answering(loaded, scene)


def supervised(segment: Segment) -> list[tuple[tuple[float, ...], bool]]:
    return [(group.bins, group.matched) for group in segment.target.coord_groups]


B = "stage2_ab/channel_b"


def counted(metrics: dict[str, float], *names: str) -> dict[str, float]:
    return {name: metrics[f"{B}/{name}"] for name in names}


def drop_reasons(metrics: dict[str, float]) -> dict[str, float]:
    drops = f"{B}/strict_drop/"
    return {k.removeprefix(drops): n for k, n in metrics.items() if k.startswith(drops) and n}


@pytest.mark.req("CLEAN-01", "CLEAN-02")
def test_a_duplicate_is_removed_and_its_departure_is_of_the_pack(
    loaded: LoadedModel, scene: Sample
) -> None:
    answering = Answering(loaded, scene, changed("stage2_ab.channel_b.prefix", "clean"))
    (first, second), stats = answering.segments(written(CAT, CAT, DOG), written(CAT, DOG))
    assert answering.target_text(first) == written(CAT, DOG) + "<|im_end|>"
    assert stats["dup/removed"] == stats["dup/answers"] == stats["dup/departures"] == 1
    assert answering.segments(written(CAT, DOG))[1]["dup/removed"] == 0
    assert counted(stats, "N_valid_pred", "matched") == {"N_valid_pred": 4, "matched": 4}
    row = make_pack([second, first]).supervision
    ((position, token),) = row.departures.tolist()
    assert position >= len(second) + len(first.prompt.ids)
    assert int(row.input_ids[position]) != token
    text = decode_exactly(answering.tokenizer, [*row.input_ids[len(second) : position].tolist()])
    assert text.endswith(', "object_2": {"desc": "')


@pytest.mark.req("CHB-01", "APPEND-02", "LOSS-03", "LOSS-04")
@pytest.mark.scenario("Channel-B geometry includes matched and FN but excludes FP")
def test_what_was_missed_is_appended_and_a_ghost_is_not_supervised(answering: Answering) -> None:
    (segment,), stats = answering.segments(written(CAT, GHOST))
    whole = written(CAT, GHOST)[:-1] + ", " + entry(3, DOG.desc, DOG.shape.coords) + "}<|im_end|>"
    assert answering.target_text(segment) == whole
    assert supervised(segment) == [(CAT.shape.coords, True), (DOG.shape.coords, False)]
    assert Role.FALSE_POSITIVE in segment.target.role
    names = ("matched", "fn_appended", "false_positives", "match_rate")
    assert tuple(counted(stats, *names).values()) == (1, 1, 1, 1 / 2)


@pytest.mark.req("RES-32", "PARSE-05")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Sure: {", "prose_before"),
        (" \n```json\n{", "fenced"),
        ('{"objects": []}', "other_format"),
        ("{} so", "text_behind"),
        ("garbage", None),
    ],
)
def test_an_answer_that_is_not_read_to_its_end_is_counted_by_the_reason(
    answering: Answering, text: str, named: str | None
) -> None:
    _, (assessed,) = answering.channel.segments([answering.scene], [answering.rollout(text)])
    stats = rollout_payload([assessed]).metrics()
    expected = {name: float(name == named) for name in get_args(AnswerFault)}
    assert counted(stats, *expected) == expected
    assert stats[f"{B}/invalid_rollout"] == (not text.lstrip(" \n").startswith("{"))


@pytest.mark.req("MET-02")
@pytest.mark.parametrize(
    ("text", "finish", "rate"),
    [("Let me", "length", 1), ("Let me", "stop", 0), ("{}", "length", 0), ("{", "stop", 1)],
)
def test_an_answer_that_is_cut_before_its_first_brace_is_truncated(
    answering: Answering, text: str, finish: str, rate: int
) -> None:
    cut = replace(answering.rollout(text), finish_reason=finish)
    _, assessed = answering.channel.segments([answering.scene], [cut])
    assert rollout_payload(assessed).metrics()["rollout/parse_truncated_rate"] == rate
    assert LoggedAnswer.of(assessed[0]).parse.truncated == rate


@pytest.mark.req("PARSE-04", "RES-02")
def test_a_polygon_counts_where_polygons_are_allowed(
    answering: Answering, loaded: LoadedModel, scene: Sample
) -> None:
    roof = '"object_1": {"desc": "roof", "poly": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", '
    roof += '"<|coord_4|>", "<|coord_5|>", "<|coord_6|>"]}'
    (dropping,), stats = answering.segments(f"{{{roof}}}")
    assert dropping.has_dropped
    assert drop_reasons(stats) == {"poly_unsupported": 1}
    assert stats[f"{B}/N_valid_pred"] == 0
    (whole,), stats = Answering(loaded, scene, ALIGNED).segments(f"{{{roof}}}")
    assert not whole.has_dropped
    assert not drop_reasons(stats)
    assert stats[f"{B}/N_valid_pred"] == 1


@pytest.mark.req("ROLL-01", "RES-16")
@pytest.mark.parametrize(
    ("kept", "more", "theirs"),
    [(-1, [65], "65 'b'"), (5, [], "no token"), (0, [], "no token"), (None, [65, 66], "65 'b'")],
    ids=["another token", "shorter", "nothing", "longer"],
)
def test_other_prompt_ids_of_the_server_stop_the_step(
    answering: Answering, kept: int | None, more: list[int], theirs: str
) -> None:
    answer = answering.rollout(written(CAT))
    own = answer.prompt_token_ids
    other = replace(answer, prompt_token_ids=own[:kept] + more)
    position = len(own[:kept])
    ours = "no token"
    if position < len(own):
        ours = f"{own[position]} {decode_exactly(answering.tokenizer, [own[position]])!r}"
    place = f"prompt of {answering.scene.sample_id}, position {position}"
    lengths = f"(lengths {len(own)} and {len(other.prompt_token_ids)})"
    found = f"the learner has {ours}, the server {theirs} {lengths}"
    with refused(place, found, "chat template"):
        answering.channel.segments([answering.scene], [other])


@pytest.mark.req("LOSS-02", "MET-02", "MET-03")
@pytest.mark.scenario("Closure marker resolution failure is dropped and counted")
def test_a_sample_without_a_closure_is_left_out_noted_and_counted(
    loaded: LoadedModel, scene: Sample
) -> None:
    odd = GroundTruthObject("ends <|im_end|> here", CAT.shape)
    answering = Answering(loaded, replace(scene, objects=(odd, DOG)))
    segments, assessed = answering.channel.segments([answering.scene], [answering.rollout("{}")])
    assert segments == []
    (left_out,) = assessed
    assert left_out.target is None
    assert left_out.left_out
    metrics = rollout_payload(assessed).metrics()
    assert counted(metrics, "closure_supervision/N_drop", "fn_appended") == {
        "closure_supervision/N_drop": 1,
        "fn_appended": 0,
    }


@pytest.mark.req("MET-02", "PARSE-04")
@pytest.mark.scenario("Drop diagnostics include valid and invalid counts")
def test_the_metrics_of_a_step_are_counted_by_hand(answering: Answering) -> None:
    three = entry(1, CAT.desc, CAT.shape.coords[:3])
    far = replace(CAT, shape=Shape("bbox_2d", (10, 20, 90, 100)))
    texts = [
        written(CAT, DOG),
        written(CAT, GHOST),
        f"{{{three}}}",
        "garbage",
        written(far)[:-1],
        written(CAT).replace("coord", "c\\u006ford"),
    ]
    answers = [answering.rollout(text) for text in texts]
    answers[0] = replace(answers[0], repeat_terminated=True)
    _, assessed = answering.channel.segments([answering.scene] * len(texts), answers)
    metrics = rollout_payload(assessed).metrics()
    lengths = [len(answer.response_token_ids) for answer in answers]
    assert metrics["rollout/parse_truncated_rate"] == pytest.approx(1 / 6)
    assert metrics["rollout/parse_dropped_invalid"] == 2
    assert metrics["rollout/gen_new_tokens_mean"] == pytest.approx(sum(lengths) / 6)
    assert sorted(lengths)[-2] <= metrics["rollout/gen_new_tokens_p99"] <= max(lengths)
    assert metrics["rollout/repeat_terminate_triggered_sequences"] == 1
    assert metrics[f"{B}/invalid_rollout"] == 1
    assert metrics[f"{B}/N_valid_pred"] == 5
    assert metrics[f"{B}/N_drop_invalid"] == 2
    assert metrics[f"{B}/strict_drop/wrong_arity"] == 1
    assert metrics[f"{B}/coord_unaligned"] == 1
    assert metrics[f"{B}/matched"] == 3
    assert metrics[f"{B}/false_positives"] == 2
    assert metrics[f"{B}/fn_appended"] == 9
    assert metrics[f"{B}/match_rate"] == pytest.approx(3 / 12)
    assert metrics[f"{B}/closure_supervision/N_drop"] == 0
    assert metrics[f"{B}/gated"] >= 1


def test_a_step_without_rollouts_has_finite_metrics() -> None:
    metrics = rollout_payload([]).metrics()
    assert metrics["rollout/parse_truncated_rate"] == 0
    assert metrics["rollout/gen_new_tokens_p99"] == 0


def test_channel_a_teaches_the_annotation_and_names_a_sample_it_cannot_teach(
    loaded: LoadedModel, scene: Sample
) -> None:
    prompt = PromptEncoder(loaded.processor, PROMPT, None)
    channel = ChannelA(Encoding(loaded.inner, prompt, loaded.tokenizer, "geometry_first"))
    segment, _ = channel.segments([scene, scene])
    expected = build_ground_truth_target((CAT, DOG), loaded.tokenizer, "geometry_first")
    assert segment.target.token_ids == expected.token_ids
    assert segment.target.prefix_len == 0
    assert supervised(segment) == [(CAT.shape.coords, False), (DOG.shape.coords, False)]
    assert not segment.has_dropped
    assert segment.sample_id == scene.sample_id
    broken = replace(scene, objects=(replace(CAT, desc="a <|im_end|> cat"), DOG))
    with refused(scene.sample_id):
        channel.segments([scene, broken])
