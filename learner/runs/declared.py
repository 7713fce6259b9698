"""Every metric the learner may log (MET-01, MET-02); `docs/metrics.md` is written from it.

A key that is not here cannot be logged. How processes combine a metric follows from its kind:

    counter, loss           sum
    seconds, flag, peak     max
    rate                    sum of the numerators / sum of the denominators
    whole                   the same in every process: process 0 has it of all answers together

Losses are additive: each pack counts by its share of the step's samples (LOSS-05). No overlap of
boxes or masks is among the metrics of training; they are for matching alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from learner.objectives import DIAGNOSTICS, OBJECTIVES
from learner.objectives.mismatch import TOKEN_KINDS
from learner.objectives.objective import LOSS_PREFIX
from learner.types import AnswerFault, Channel, DropReason

Kind = Literal["counter", "loss", "seconds", "flag", "peak", "rate", "whole"]
Reduction = Literal["sum", "max", "rate"]

_REDUCTIONS: dict[Kind, Reduction] = {
    "counter": "sum",
    "loss": "sum",
    "seconds": "max",
    "flag": "max",
    "peak": "max",
    "rate": "rate",
    "whole": "max",
}
_BOTH: tuple[Channel, ...] = ("A", "B")
_B: tuple[Channel, ...] = ("B",)
_BESIDE = "asynchronous rollouts"
_B_OR_BESIDE = f"channel B, or {_BESIDE}"


@dataclass(frozen=True)
class Metric:
    """One key of the log.

    channels: whose steps log it; none: not a number of a step.
    when: what else it takes to be logged; empty: nothing.
    """

    key: str
    kind: Kind
    unit: str
    meaning: str
    channels: tuple[Channel, ...] = _BOTH
    when: str = ""

    @property
    def reduction(self) -> Reduction:
        return _REDUCTIONS[self.kind]


@dataclass(frozen=True)
class Group:
    title: str
    metrics: tuple[Metric, ...]


def _read(table: str) -> tuple[Metric, ...]:
    """Metrics of `key | kind | channels | unit | meaning | when`; an indented line goes on."""
    metrics = []
    for row in table.strip().replace("\n    ", " ").splitlines():
        key, kind, channels, unit, meaning, *when = (part.strip() for part in row.split("|"))
        assert kind in _REDUCTIONS, key
        letters = tuple(letter for letter in _BOTH if letter in channels)
        metrics.append(Metric(key, kind, unit, meaning, letters, *when))
    return tuple(metrics)


STEP = _read("""
step/channel_b | flag | A B | 0 or 1 | the step ran channel B
packing/post_rollout_segments | counter | A B | samples | samples that were trained on
packing/post_rollout_packs | counter | A B | packs | packs that were forwarded
packing/post_rollout_selected_total_len | counter | A B | tokens | tokens in the packs
packing/post_rollout_fill | rate | A B | 1 | tokens in the packs / capacity of the packs
time/push_s | seconds | A B | s | pushing new weights | channel B, or asynchronous rollouts
time/rollout_s | seconds | B | s | waiting for the answers
time/target_s | seconds | A B | s | making segments from samples and answers
time/pack_s | seconds | A B | s | making packs from segments
time/wait_s | seconds | A B | s | waiting for packs, also for those of other processes
time/learn_s | seconds | A B | s | forwards and backwards
perf/tokens_per_s | rate | A B | tokens/s | tokens of packs in a second of `time/learn_s`, of each
    learner process
perf/mfu | rate | A B | share | arithmetic of the model in a second of `time/learn_s`, recomputed
    activations not counted, over the most that the GPU can do in bfloat16 | on a GPU of the list
    of `learner estimate`
perf/peak_memory_gib | peak | A B | GiB | most memory of tensors on the GPU in the step; on a CPU,
    of the process so far
time/step_s | seconds | A B | s | the whole step, without the update of the optimizer
step/replays | counter | A B | forwards | forwards of weight zero, because another process has
    more packs
data/bad_samples | counter | A B | samples | bad samples that were replaced by other samples |
    `data.on_bad_sample: skip`
""")

ROLLOUT = _read("""
rollout/seed_base | peak | B | seed | base of the seeds of the answers; the largest of all
    processes
rollout/decode_greedy | flag | B | 0 or 1 | answers are decoded greedily
rollout/decode_sampling | flag | B | 0 or 1 | answers are sampled
rollout/decode_beam | flag | B | 0 or 1 | answers are the best of several beams
rollout/repeat_terminate_active | flag | B | 0 or 1 | the repeat guard is on
rollout/repeat_terminate_triggered_sequences | counter | B | answers | answers that the repeat
    guard ended, as the backend reports
rollout/per_second | rate | B | 1/s | answers / seconds of waiting for them, of a process
rollout/gen_new_tokens_mean | rate | B | tokens | tokens of answers / answers
rollout/gen_new_tokens_p99 | peak | B | tokens | 99th percentile of the lengths of answers; the
    largest of all processes
rollout/parse_truncated_rate | rate | B | 1 | answers cut, opened or not / answers
rollout/parse_dropped_invalid | counter | B | objects | dropped as invalid
sync/weights_version | peak | B | version | version of the weights that answered
""")

ASYNC = _read("""
stage2_ab/async/b_step_skipped_due_to_queue | flag | A | 0 or 1 | channel A runs instead of B,
    because a process has no batch ready | asynchronous rollouts, and only if so
stage2_ab/async/ready_packs | counter | A B | packs | packs that were ready when the step began,
    of all processes | asynchronous rollouts
stage2_ab/async/version_lag | peak | B | versions | from the oldest weights that answered to the
    newest; the largest of all processes | asynchronous rollouts
stage2_ab/async/dropped_oldest | counter | A B | packs | packs dropped because the queue was full;
    their samples are requested again | asynchronous rollouts
stage2_ab/async/dropped_stale | counter | A B | packs | packs dropped because they were too old
    for `version_window`; their samples are requested again | asynchronous rollouts
stage2_ab/async/prefetch_idle_s | seconds | A B | s | time in which the prefetcher requested
    nothing, because enough packs were ready; the longest of all processes | asynchronous rollouts
""")

_DROPS: dict[DropReason, str] = {
    "key_invalid": "not closed, no JSON, keys that repeat or nest, or no `object_n`",
    "missing_desc": "no description",
    "missing_geom": "no geometry",
    "unknown_geom": "a geometry with an unknown name",
    "non_coord_token": "a value that is not one coordinate token",
    "wrong_arity": "too few or too many coordinates",
    "bbox_invalid": "a box whose corners are the wrong way round",
    "poly_unsupported": "a polygon in stage2_two_channel",
}
ANSWER_FAULTS: dict[AnswerFault, str] = {
    "prose_before": "other text before the first bracket",
    "fenced": "a code fence before the first bracket",
    "other_format": "brackets or keys of another answer format",
    "wrong_container": "objects in a bracket too many, or a bracket that is missing",
    "text_behind": "text behind the closed container, which is not read",
}


def _channel_b() -> Iterator[Metric]:
    def counter(name: str, unit: str, meaning: str) -> Metric:
        return Metric(f"stage2_ab/channel_b/{name}", "counter", unit, meaning, _B)

    yield counter("N_valid_pred", "objects", "predicted and valid")
    yield counter("N_drop_invalid", "objects", "predicted and dropped as invalid")
    for reason in get_args(DropReason):
        yield counter(f"strict_drop/{reason}", "objects", f"of those: {_DROPS[reason]}")
    spelled = "of `non_coord_token`: the text spells coordinates, and its ids are not their tokens"
    yield counter("coord_unaligned", "objects", spelled)
    yield counter(
        "invalid_rollout", "answers", "answers without a `{`, or with other text before it"
    )
    for fault, meaning in ANSWER_FAULTS.items():
        yield counter(fault, "answers", f"answers with {meaning}")
    yield counter("matched", "objects", "predicted and matched to a ground truth")
    yield counter("false_positives", "objects", "predicted, valid and not matched")
    yield counter("fn_appended", "objects", "ground truths that were missed, and appended")
    yield counter("gated", "pairs", "pairs with too little overlap to be matched")
    key = "stage2_ab/channel_b/match_rate"
    yield Metric(key, "rate", "1", "matched ground truths / ground truths", _B)
    meaning = "samples left out: their target cannot be read back, or its end cannot be located"
    yield counter("closure_supervision/N_drop", "samples", meaning)
    for name, unit, meaning in (
        ("removed", "objects", "predicted again, and removed"),
        ("answers", "answers", "that had such objects"),
        ("departures", "tokens", "with which they depart from the target; `duplicate_ul`'s"),
    ):
        yield Metric(f"dup/{name}", "counter", unit, meaning, _B, "with `prefix: clean`")


CHANNEL_B = tuple(_channel_b())


def _mismatches() -> Iterator[Metric]:
    asked = "with `rollout_matching.logprobs`"
    tokens = "of answers whose log-probability by the engine is compared with the trainer's"
    yield Metric("mismatch/tokens", "counter", "tokens", tokens, _B, asked)
    for kind, meaning in TOKEN_KINDS.items():
        when = f"{asked}, and there are any"
        mean = f"mean absolute difference of {meaning}"
        yield Metric(f"mismatch/{kind}_mean", "rate", "nats", mean, _B, when)
        p99 = "99th percentile of these differences; the largest of all processes"
        yield Metric(f"mismatch/{kind}_p99", "peak", "nats", p99, _B, when)


MISMATCH = tuple(_mismatches())

_ITERATED = "`n_softctx_iter` above 1"


def _losses() -> Iterator[Metric]:
    """Of every objective in the registry, in the order of the prefixes."""
    for (channel, family), prefix in LOSS_PREFIX.items():
        which = "" if channel == "B" else f", {'first' if family == 'text' else 'last'} forward"
        also = {"context_text": f" and {_ITERATED}", "departure": ", where duplicates depart"}
        when = f"with a weight above 0{also.get(family, '')}"
        for objective in OBJECTIVES:
            for name, meaning in objective.metrics.get(family, {}).items():
                key = f"{prefix}/{name}"
                yield Metric(key, "loss", "loss", f"{meaning}{which}", (channel,), when)


LOSSES = tuple(_losses())


def _diagnostics() -> Iterator[Metric]:
    sources: tuple[tuple[str, Channel, str], ...] = (
        ("A1", "A", ""),
        ("A2", "A", f" and {_ITERATED}"),
        ("B", "B", ""),
    )
    for diagnostic in DIAGNOSTICS:
        (declared,) = get_args(diagnostic.model_fields["name"].annotation)
        for provenance, channel, when in sources:
            for name, (unit, meaning) in diagnostic.metrics.items():
                key = f"{declared}/{provenance}/{name}"
                with_it = f"with `{declared}` declared{when}"
                yield Metric(key, "rate", unit, meaning, (channel,), with_it)


COORD_DIAG = tuple(_diagnostics())

SYNC_PHASES = {
    "pause": "server: until its engines are idle and ready to load",
    "transfer": "server: receiving and loading parameters",
    "finish": "server: until it answers with the new weights",
    "total": "the whole push",
}


def _servers() -> Iterator[Metric]:
    def metric(key: str, kind: Kind, unit: str, meaning: str, when: str) -> Metric:
        return Metric(key, kind, unit, meaning, when=when)

    served = f"from servers: {_B_OR_BESIDE}"
    pushed = "after a push to servers"
    yield metric("rollout/servers_healthy", "peak", "servers", "servers that can be asked", served)
    yield metric("rollout/servers_lost", "counter", "times", "a process lost a server", served)
    yield metric("rollout/retries", "counter", "calls", "calls that were repeated", served)
    yield metric("rollout/splits", "counter", "parts", "parts of a lost server's requests", served)
    yield metric("sync/fell_back", "flag", "0 or 1", "full weights replace the adapter", served)
    yield metric("sync/pushes", "counter", "pushes", "pushes that servers accepted", served)
    yield metric("sync/repushes", "counter", "pushes", "pushes to lost servers", served)
    for phase, meaning in SYNC_PHASES.items():
        yield metric(f"sync/{phase}_s", "seconds", "s", f"slowest push: {meaning}", pushed)
    yield metric("sync/bytes", "peak", "bytes", "slowest push: payload of a replica", pushed)
    yield metric("sync/gb_per_s", "rate", "GB/s", "slowest push: payload / `transfer`", pushed)
    yield metric("sync/probe_s", "seconds", "s", "proof of effect", "after a push that is proven")


SERVERS = tuple(_servers())


_AREAS = {"small": "up to 32^2", "medium": "32^2 to 96^2", "large": "above 96^2"}
_DETECTION = "with `eval_detection.enabled`"


def _evaluation() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, unit: str, meaning: str) -> Metric:
        return Metric(f"eval/{name}", kind, unit, meaning, ())

    def precision(name: str, meaning: str, when: str = _DETECTION) -> Metric:
        return Metric(f"eval/{name}", "whole", "1", meaning, (), when)

    yield metric("precision", "rate", "1", "hits / predicted objects")
    yield metric("recall", "rate", "1", "hits / ground truths")
    yield metric("f1", "rate", "1", "2 hits / (predicted objects + ground truths)")
    yield metric("f1_95", "rate", "1", "the same where a hit needs an IoU of 0.95")
    yield metric("f1_miou", "rate", "1", "mean of the F1 at IoU 0.50, 0.55, ... 0.95")
    yield metric("box_f1", "rate", "1", "F1, descriptions ignored")
    repeats = "predicted with the description of an earlier one and an IoU of at least 0.9 with it"
    yield metric("duplicates", "rate", "objects/answer", repeats)
    whole = "predicted on 95 % of the image or more, and no hit"
    yield metric("oversized", "rate", "objects/answer", whole)
    yield metric("predicted", "counter", "objects", "predicted and valid; by LVIS, judged")
    yield metric("ground_truths", "counter", "objects", "annotated")
    yield metric("dropped", "counter", "objects", "predicted and dropped as invalid")
    yield precision("ap", "COCO's or LVIS's average precision of boxes, IoU 0.50 to 0.95")
    yield precision("ap50", "the same at IoU 0.50")
    yield precision("ap75", "the same at IoU 0.75")
    for size, area in _AREAS.items():
        when = f"{_DETECTION}, and there are any"
        yield precision(f"ap_{size}", f"`eval/ap` of objects of {area} pixels", when)
    yield precision("ar", "COCO's average recall of boxes, 100 detections an image")
    yield precision("box_ap", "`eval/ap`, descriptions ignored")
    yield precision("box_ap50", "`eval/ap50`, descriptions ignored")
    masks = f"{_DETECTION} and polygons"
    for at in ("ap", "ap50", "ap75"):
        yield precision(f"segm_{at}", f"`eval/{at}` of masks in place of boxes", masks)


EVALUATION = tuple(_evaluation())

# Every metric of a payload: of a step, of what its rollouts took, of an evaluation.
METRICS = STEP + ROLLOUT + ASYNC + CHANNEL_B + MISMATCH + LOSSES + COORD_DIAG + SERVERS + EVALUATION

GROUPS = (
    Group("The step", STEP),
    Group("Rollouts", ROLLOUT),
    Group("Asynchronous rollouts", ASYNC),
    Group("What became of the answers", CHANNEL_B),
    Group("Log-probabilities of engine and trainer", MISMATCH),
    Group("Losses", LOSSES),
    Group("Coordinate distributions", COORD_DIAG),
    Group("Servers and pushes", SERVERS),
    Group("Evaluation", EVALUATION),
)

# Logged by transformers' Trainer itself, next to ours.
TRAINER = {
    "loss": "the step's loss",
    "grad_norm": "norm of the gradient before it is clipped",
    "learning_rate": "learning rate of the first parameter group",
    "epoch": "passes over the data so far",
    "train_loss": "mean loss since the run was last started; at the end of a run",
    "train_runtime": "seconds since the run was last started; at the end of a run",
    "train_samples_per_second": "samples per second; at the end of a run",
    "train_steps_per_second": "steps per second; at the end of a run",
    "total_flos": "Trainer's estimate of operations; at the end of a run",
}


def declared_keys() -> frozenset[str]:
    """Every key that a line of `metrics.jsonl` may have besides `step`."""
    notes = (f"eval/{metric.key}" for metric in SERVERS)
    return frozenset([*TRAINER, *notes, *(metric.key for metric in METRICS)])
