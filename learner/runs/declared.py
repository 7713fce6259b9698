"""Every metric the learner may log (MET-01, MET-02); `docs/metrics.md` is written from it.

A key that is not here cannot be logged. The kind of a metric says how processes combine it:

    counter, loss           sum
    seconds, flag, peak     max
    rate                    sum of the numerators / sum of the denominators
    whole                   computed by process 0 from the answers of all processes

Losses are additive: the weight of a pack is its share of the step's samples (LOSS-05). Metrics of
training have no overlaps of boxes or masks, which only matching uses.
"""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Metric:
    """One key of the log.

    channels: steps of these channels log it; empty: it is no metric of a step.
    when: a further condition for logging it; empty: none.
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


def _read(table: str, prefix: str = "") -> tuple[Metric, ...]:
    """Read rows `key | kind | channels | unit | meaning | when`; indented lines continue a row.

    prefix: put before every key.
    """
    metrics = []
    for row in table.strip().replace("\n    ", " ").splitlines():
        key, kind, channels, unit, meaning, *when = (part.strip() for part in row.split("|"))
        assert kind in _REDUCTIONS, key
        letters = tuple(letter for letter in _BOTH if letter in channels)
        metrics.append(Metric(prefix + key, kind, unit, meaning, letters, *when))
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
stage2_ab/async/version_lag | peak | B | versions | newest version - oldest version that answered;
    the largest of all processes | asynchronous rollouts
stage2_ab/async/dropped_oldest | counter | A B | packs | packs dropped because the queue was full;
    their samples are requested again | asynchronous rollouts
stage2_ab/async/dropped_stale | counter | A B | packs | packs dropped because they were too old
    for `version_window`; their samples are requested again | asynchronous rollouts
stage2_ab/async/prefetch_idle_s | seconds | A B | s | time without requests, because enough packs
    were ready; the longest of all processes | asynchronous rollouts
""")

# Reasons for which the parser drops an object.
DROPS: Mapping[str, str] = {
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
    "wrong_container": "brackets around the objects that are missing or too many, or no end",
    "text_behind": "text behind the closed container, which is not read",
}

_DROP_ROWS = "\n".join(
    f"strict_drop/{reason} | counter | B | objects | of those: {DROPS[reason]}"
    for reason in get_args(DropReason)
)
_FAULT_ROWS = "\n".join(
    f"{fault} | counter | B | answers | answers with {why}" for fault, why in ANSWER_FAULTS.items()
)
CHANNEL_B = _read(
    f"""
N_valid_pred | counter | B | objects | predicted and valid
N_drop_invalid | counter | B | objects | predicted and dropped as invalid
{_DROP_ROWS}
coord_unaligned | counter | B | objects | of `non_coord_token`: the text spells coordinates, and
    its ids are not their tokens
invalid_rollout | counter | B | answers | answers without a `{{`, or with other text before it
{_FAULT_ROWS}
matched | counter | B | objects | predicted and matched to a ground truth
false_positives | counter | B | objects | predicted, valid and not matched
fn_appended | counter | B | objects | ground truths that were missed, and appended
gated | counter | B | pairs | pairs with too little overlap to be matched
match_rate | rate | B | 1 | matched ground truths / ground truths
closure_supervision/N_drop | counter | B | samples | samples left out: their target cannot be read
    back, or its end cannot be located
""",
    "stage2_ab/channel_b/",
) + _read("""
dup/removed | counter | B | objects | duplicates that were removed | with `prefix: clean`
dup/answers | counter | B | answers | answers with removed duplicates | with `prefix: clean`
dup/departures | counter | B | tokens | tokens with which duplicates depart from the target, for
    `duplicate_ul` | with `prefix: clean`
""")

_GROUPED = "in stage2_group_relative"

REWARDS = _read(
    f"""
mean | rate | B | 1 | mean reward of the answers | {_GROUPED}
spread | rate | B | 1 | mean over the groups of the standard deviation of their rewards |
    {_GROUPED}
no_spread | rate | B | 1 | groups whose answers have equal rewards, so that nothing is learned
    from them / groups | {_GROUPED}
f1 | rate | B | 1 | mean F1@mIoU of an answer | {_GROUPED}
duplicates | rate | B | 1 | mean share of the entries of an answer that repeat an earlier one |
    {_GROUPED}
oversized | rate | B | 1 | mean share of the entries that are oversized and no hit | {_GROUPED}
invalid | rate | B | 1 | mean share of the entries that are dropped as invalid | {_GROUPED}
""",
    "reward/",
)


def _of_tokens() -> Iterator[Metric]:
    for objective in OBJECTIVES:
        (declared,) = get_args(objective.model_fields["name"].annotation) or ("",)
        for name, (unit, meaning) in objective.token_metrics.items():
            also = " and a `kl_weight` above 0" if name == "kl" else ""
            when = f"with `{declared}` declared{also}"
            yield Metric(f"{declared}/{name}", "rate", unit, meaning, _B, when)


def _mismatches() -> Iterator[Metric]:
    enabled = "with `rollout_matching.logprobs`"
    tokens = "of answers whose log-probability by the engine is compared with the trainer's"
    yield Metric("mismatch/tokens", "counter", "tokens", tokens, _B, enabled)
    for kind, meaning in TOKEN_KINDS.items():
        when = f"{enabled}, and there are any"
        mean = f"mean absolute difference of {meaning}"
        yield Metric(f"mismatch/{kind}_mean", "rate", "nats", mean, _B, when)
        p99 = "99th percentile of these differences; the largest of all processes"
        yield Metric(f"mismatch/{kind}_p99", "peak", "nats", p99, _B, when)


MISMATCH = tuple(_mismatches())

_ITERATED = "`n_softctx_iter` above 1"


def _losses() -> Iterator[Metric]:
    """Yield the loss metrics of every objective, in the order of the prefixes."""
    for (channel, family), prefix in LOSS_PREFIX.items():
        which = "" if channel == "B" else f", {'first' if family == 'text' else 'last'} forward"
        also = {"context_text": f" and {_ITERATED}", "departure": ", if duplicates depart"}
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

SYNC_PHASES = ("pause", "transfer", "finish", "total")
_SERVED = "from servers: channel B, or asynchronous rollouts"
_PUSHED = "after a push to servers"

SERVERS = _read(f"""
rollout/servers_healthy | peak | A B | servers | servers that can answer | {_SERVED}
rollout/servers_lost | counter | A B | times | a process lost a server | {_SERVED}
rollout/retries | counter | A B | calls | calls that were repeated | {_SERVED}
rollout/splits | counter | A B | parts | parts of a lost server's requests | {_SERVED}
sync/fell_back | flag | A B | 0 or 1 | full weights replace the adapter | {_SERVED}
sync/pushes | counter | A B | pushes | pushes that servers accepted | {_SERVED}
sync/repushes | counter | A B | pushes | pushes to lost servers | {_SERVED}
sync/pause_s | seconds | A B | s | slowest push: server: until its engines are idle and ready to
    load | {_PUSHED}
sync/transfer_s | seconds | A B | s | slowest push: server: receiving and loading parameters |
    {_PUSHED}
sync/finish_s | seconds | A B | s | slowest push: server: until it answers with the new weights |
    {_PUSHED}
sync/total_s | seconds | A B | s | slowest push: the whole push | {_PUSHED}
sync/bytes | peak | A B | bytes | slowest push: payload of a replica | {_PUSHED}
sync/gb_per_s | rate | A B | GB/s | slowest push: payload / `transfer` | {_PUSHED}
sync/probe_s | seconds | A B | s | proof of effect | after a push that is proven
""")

_ENABLED = "with `eval_detection.enabled`"
_ANY = f"{_ENABLED}, and there are any"
_MASKS = f"{_ENABLED} and polygons"

EVALUATION = _read(
    f"""
precision | rate | - | 1 | hits / predicted objects
recall | rate | - | 1 | hits / ground truths
f1 | rate | - | 1 | 2 hits / (predicted objects + ground truths)
f1_95 | rate | - | 1 | the same with hits of an IoU of at least 0.95
f1_miou | rate | - | 1 | mean of the F1 at IoU 0.50, 0.55, ... 0.95
box_f1 | rate | - | 1 | F1, descriptions ignored
duplicates | rate | - | objects/answer | predicted with the description of an earlier one and an
    IoU of at least 0.9 with it
oversized | rate | - | objects/answer | predicted on 95 % of the image or more, and no hit
predicted | counter | - | objects | predicted and valid; by LVIS, judged
ground_truths | counter | - | objects | annotated
dropped | counter | - | objects | predicted and dropped as invalid
ap | whole | - | 1 | COCO's or LVIS's average precision of boxes, IoU 0.50 to 0.95 | {_ENABLED}
ap50 | whole | - | 1 | the same at IoU 0.50 | {_ENABLED}
ap75 | whole | - | 1 | the same at IoU 0.75 | {_ENABLED}
ap_small | whole | - | 1 | `eval/ap` of objects of up to 32^2 pixels | {_ANY}
ap_medium | whole | - | 1 | `eval/ap` of objects of 32^2 to 96^2 pixels | {_ANY}
ap_large | whole | - | 1 | `eval/ap` of objects of above 96^2 pixels | {_ANY}
ar | whole | - | 1 | COCO's average recall of boxes, 100 detections an image | {_ENABLED}
box_ap | whole | - | 1 | `eval/ap`, descriptions ignored | {_ENABLED}
box_ap50 | whole | - | 1 | `eval/ap50`, descriptions ignored | {_ENABLED}
segm_ap | whole | - | 1 | `eval/ap` of masks in place of boxes | {_MASKS}
segm_ap50 | whole | - | 1 | `eval/ap50` of masks in place of boxes | {_MASKS}
segm_ap75 | whole | - | 1 | `eval/ap75` of masks in place of boxes | {_MASKS}
""",
    "eval/",
)

# Groups of metrics by title, in the order of a payload.
GROUPS = {
    "The step": STEP,
    "Rollouts": ROLLOUT,
    "Asynchronous rollouts": ASYNC,
    "What became of the answers": CHANNEL_B,
    "Rewards": REWARDS + tuple(_of_tokens()),
    "Log-probabilities of engine and trainer": MISMATCH,
    "Losses": LOSSES,
    "Coordinate distributions": COORD_DIAG,
    "Servers and pushes": SERVERS,
    "Evaluation": EVALUATION,
}

METRICS = tuple(metric for group in GROUPS.values() for metric in group)

# Metrics that transformers' Trainer logs.
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
