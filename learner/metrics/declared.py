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

from learner.types import Channel, DropReason

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


STEP = (
    Metric("step/channel_b", "flag", "0 or 1", "the step ran channel B"),
    Metric("packing/post_rollout_segments", "counter", "samples", "that were trained on"),
    Metric("packing/post_rollout_packs", "counter", "packs", "that were forwarded"),
    Metric("packing/post_rollout_selected_total_len", "counter", "tokens", "in the packs"),
    Metric("packing/post_rollout_fill", "rate", "1", "tokens in the packs / room in them"),
    Metric("packing/post_rollout_buffer", "counter", "samples", "kept for a later step"),
    Metric(
        "time/push_s", "seconds", "s", "bringing new weights to who generates", when=_B_OR_BESIDE
    ),
    Metric("time/rollout_s", "seconds", "s", "waiting for the answers", _B),
    Metric("time/target_s", "seconds", "s", "from samples and answers to segments"),
    Metric("time/pack_s", "seconds", "s", "from segments to packs"),
    Metric("time/wait_s", "seconds", "s", "waiting for packs, those of other processes too"),
    Metric("time/learn_s", "seconds", "s", "forwards and backwards"),
    Metric("time/step_s", "seconds", "s", "the whole step but the optimizer's update"),
    Metric("step/replays", "counter", "forwards", "of weight zero, beside processes with more"),
)

ROLLOUT = (
    Metric(
        "rollout/seed_base",
        "peak",
        "seed",
        "what the seeds of the step start from",
        _B,
        "answers made within the step",
    ),
    Metric("rollout/decode_greedy", "flag", "0 or 1", "answers are decoded greedily", _B),
    Metric("rollout/decode_sampling", "flag", "0 or 1", "answers are sampled", _B),
    Metric("rollout/decode_beam", "flag", "0 or 1", "answers are the best of several beams", _B),
    Metric(
        "rollout/repeat_terminate_active", "flag", "0 or 1", "answers that repeat are ended", _B
    ),
    Metric(
        "rollout/repeat_terminate_triggered_sequences",
        "counter",
        "answers",
        "ended because they repeated, as the backend says",
        _B,
    ),
    Metric(
        "rollout/per_second",
        "rate",
        "1/s",
        "answers / seconds of waiting for them, of a process",
        _B,
    ),
    Metric("rollout/gen_new_tokens_mean", "rate", "tokens", "tokens of answers / answers", _B),
    Metric(
        "rollout/gen_new_tokens_p99",
        "peak",
        "tokens",
        "99th percentile of the lengths of answers, of the process where it is highest",
        _B,
    ),
    Metric("rollout/parse_truncated_rate", "rate", "1", "truncated answers / answers", _B),
    Metric("rollout/parse_dropped_invalid", "counter", "objects", "dropped as invalid", _B),
    Metric("sync/weights_version", "peak", "version", "of the weights that answered", _B),
)

_ASYNC = "stage2_ab/async"

ASYNC = (
    Metric(
        f"{_ASYNC}/b_step_skipped_due_to_queue",
        "flag",
        "0 or 1",
        "channel A runs in place of B, as a process had no share ready",
        ("A",),
        f"{_BESIDE}, and only if so",
    ),
    Metric(
        f"{_ASYNC}/ready_packs",
        "counter",
        "packs",
        "ready when the step began, of all processes",
        when=_BESIDE,
    ),
    Metric(
        f"{_ASYNC}/version_lag",
        "peak",
        "versions",
        "from the oldest weights that answered to the newest, of the process where it is longest",
        _B,
        _BESIDE,
    ),
    Metric(
        f"{_ASYNC}/dropped_oldest",
        "counter",
        "packs",
        "dropped for newer ones, as the queue was full; their samples are asked for again",
        when=_BESIDE,
    ),
    Metric(
        f"{_ASYNC}/dropped_stale",
        "counter",
        "packs",
        "dropped as too old for `version_window`; their samples are asked for again",
        when=_BESIDE,
    ),
    Metric(
        f"{_ASYNC}/prefetch_idle_s",
        "seconds",
        "s",
        "the prefetcher had enough packs ready and asked for nothing, of the idlest process",
        when=_BESIDE,
    ),
)

_DROPS: dict[DropReason, str] = {
    "key_invalid": "not closed, no JSON, keys that repeat or nest, or no `object_n`",
    "missing_desc": "no description",
    "missing_geom": "no geometry",
    "unknown_geom": "a geometry of another name",
    "non_coord_token": "a value that is not one coordinate token",
    "wrong_arity": "too few or too many coordinates",
    "bbox_invalid": "a box whose corners are the wrong way round",
    "poly_unsupported": "a polygon in stage2_two_channel",
}


def _channel_b() -> Iterator[Metric]:
    def counter(name: str, unit: str, meaning: str) -> Metric:
        return Metric(f"stage2_ab/channel_b/{name}", "counter", unit, meaning, _B)

    yield counter("N_valid_pred", "objects", "predicted and valid")
    yield counter("N_drop_invalid", "objects", "predicted and dropped as invalid")
    for reason in get_args(DropReason):
        yield counter(f"strict_drop/{reason}", "objects", f"of those: {_DROPS[reason]}")
    yield counter(
        "invalid_rollout", "answers", "without a `{`, or with more than white space before it"
    )
    yield counter("matched", "objects", "predicted and matched to a ground truth")
    yield counter("false_positives", "objects", "predicted, valid and not matched")
    yield counter("fn_appended", "objects", "ground truths that were missed, and appended")
    yield counter("gated", "pairs", "of too little overlap to be matched")
    key = "stage2_ab/channel_b/match_rate"
    yield Metric(key, "rate", "1", "matched ground truths / ground truths", _B)
    meaning = "left out: their finished target cannot be read back, or its end not located"
    yield counter("closure_supervision/N_drop", "samples", meaning)


CHANNEL_B = tuple(_channel_b())

_TEXT_LOSSES = {
    "struct_ce": "cross-entropy of structure and closure",
    "desc_ce": "cross-entropy of descriptions",
}
_COORD_LOSSES = {
    "bbox_smoothl1": "SmoothL1 of decoded coordinates",
    "bbox_ciou": "complete-IoU loss of decoded boxes",
    "coord_ce": "cross-entropy of the nearest bin",
    "coord_soft_ce": "cross-entropy against a Gaussian around the bin",
    "coord_w1": "W1 distance to that Gaussian",
    "coord_gate": "mass outside of the coordinate tokens at coordinates",
    "text_gate": "mass of the coordinate tokens at text",
}
_ITERATED = "`n_softctx_iter` above 1"


def _losses() -> Iterator[Metric]:
    def loss(family: str, name: str, meaning: str, channel: Channel, when: str) -> Metric:
        return Metric(f"loss/{family}/{name}", "loss", "loss", meaning, (channel,), when)

    weighed = "with a weight above 0"
    for name, meaning in _TEXT_LOSSES.items():
        yield loss("A1_text", name, f"{meaning}, first forward", "A", weighed)
    meaning = f"{_TEXT_LOSSES['struct_ce']}, last forward"
    yield loss("A2_text", "struct_ce", meaning, "A", f"{weighed} and {_ITERATED}")
    for name, meaning in _COORD_LOSSES.items():
        yield loss("A2_coord", name, f"{meaning}, last forward", "A", weighed)
    for name, meaning in _TEXT_LOSSES.items():
        yield loss("B_rollout_text", name, meaning, "B", weighed)
    for name, meaning in _COORD_LOSSES.items():
        yield loss("B_coord", name, meaning, "B", weighed)


LOSSES = tuple(_losses())

_DIAGNOSTICS = {
    "acc_top1": ("1", "coordinates whose likeliest bin is the ground truth's / coordinates"),
    "acc_top5": ("1", "those with it among the five likeliest / coordinates"),
    "p_gt_mean": ("1", "mean probability of the ground truth's bin"),
    "expected_bin_mae": ("bins", "mean distance of the expected bin to the ground truth"),
    "entropy_mean": ("nats", "mean entropy of the distribution over the bins"),
    "coord_mass_mean": ("1", "mean probability of all coordinate tokens in the vocabulary"),
}


def _coord_diag() -> Iterator[Metric]:
    declared = "with `coord_diag` declared"
    sources: tuple[tuple[str, Channel, str], ...] = (
        ("A1", "A", declared),
        ("A2", "A", f"{declared} and {_ITERATED}"),
        ("B", "B", declared),
    )
    for provenance, channel, when in sources:
        for name, (unit, meaning) in _DIAGNOSTICS.items():
            key = f"coord_diag/{provenance}/{name}"
            yield Metric(key, "rate", unit, meaning, (channel,), when)


COORD_DIAG = tuple(_coord_diag())

SYNC_PHASES = {
    "start": "until the server expects the manifest's parameters",
    "pause": "of the server, until its engines are idle",
    "send": "of the learner, from the first parameter to the last",
    "transfer": "of the server, waiting for parameters",
    "load": "of the server, loading them",
    "finish": "until the server is ready again",
    "verify": "of the server, comparing digests",
    "caches": "of the server, dropping what old weights have cached",
    "total": "the whole push",
}


def _servers() -> Iterator[Metric]:
    def metric(key: str, kind: Kind, unit: str, meaning: str, when: str) -> Metric:
        return Metric(key, kind, unit, meaning, when=when)

    served = f"from servers: {_B_OR_BESIDE}"
    pushed = "after a push to servers"
    yield metric("rollout/servers_healthy", "peak", "servers", "that may be asked", served)
    yield metric("rollout/servers_lost", "counter", "times", "a process gave a server up", served)
    yield metric("rollout/retries", "counter", "calls", "made again", served)
    yield metric("rollout/splits", "counter", "parts", "of a lost server's requests", served)
    yield metric("sync/fell_back", "flag", "0 or 1", "full weights replace the adapter", served)
    yield metric("sync/pushes", "counter", "pushes", "that servers took", served)
    yield metric("sync/repushes", "counter", "pushes", "to servers that were lost", served)
    for phase, meaning in SYNC_PHASES.items():
        yield metric(f"sync/{phase}_s", "seconds", "s", f"slowest push: {meaning}", pushed)
    yield metric("sync/bytes", "peak", "bytes", "slowest push: payload of a replica", pushed)
    yield metric("sync/gb_per_s", "rate", "GB/s", "slowest push: payload / `send`", pushed)


SERVERS = tuple(_servers())


_AREAS = {"small": "up to 32^2", "medium": "from there to 96^2", "large": "above 96^2"}
_DETECTION = "with `eval_detection.enabled`"


def _evaluation() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, unit: str, meaning: str) -> Metric:
        return Metric(f"eval/{name}", kind, unit, meaning, ())

    def precision(name: str, meaning: str, when: str = _DETECTION) -> Metric:
        return Metric(f"eval/{name}", "whole", "1", meaning, (), when)

    yield metric("precision", "rate", "1", "hits / predicted objects")
    yield metric("recall", "rate", "1", "hits / ground truths")
    yield metric("f1", "rate", "1", "2 hits / (predicted objects + ground truths)")
    yield metric("box_f1", "rate", "1", "the same, descriptions ignored")
    yield metric("predicted", "counter", "objects", "predicted and valid")
    yield metric("ground_truths", "counter", "objects", "annotated")
    yield metric("dropped", "counter", "objects", "predicted and dropped as invalid")
    yield precision("ap", "COCO's average precision of boxes, IoU 0.50 to 0.95")
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
METRICS = STEP + ROLLOUT + ASYNC + CHANNEL_B + LOSSES + COORD_DIAG + SERVERS + EVALUATION

GROUPS = (
    Group("The step", STEP),
    Group("Rollouts", ROLLOUT),
    Group("Asynchronous rollouts", ASYNC),
    Group("What became of the answers", CHANNEL_B),
    Group("Losses", LOSSES),
    Group("Coordinate distributions", COORD_DIAG),
    Group("Servers and pushes", SERVERS),
    Group("Evaluation", EVALUATION),
)

# Logged by transformers' Trainer itself, next to ours.
TRAINER = {
    "loss": "the step's loss",
    "grad_norm": "norm of the gradient before it is clipped",
    "learning_rate": "of the first parameter group",
    "epoch": "passes over the data so far",
    "train_loss": "mean over the steps since the run was last started; at its end",
    "train_runtime": "seconds since the run was last started; at its end",
    "train_samples_per_second": "at the end of a run",
    "train_steps_per_second": "at the end of a run",
    "total_flos": "Trainer's estimate of operations; at the end of a run",
}


def declared_keys() -> frozenset[str]:
    """Every key that a line of `metrics.jsonl` may have besides `step`."""
    notes = (f"eval/{metric.key}" for metric in SERVERS)
    return frozenset([*TRAINER, *notes, *(metric.key for metric in METRICS)])
