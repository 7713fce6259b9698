"""All that became of one answer, told for a person."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from rich.table import Table
from rich.text import Text

from learner.data.show import new_table, plain
from learner.metrics.declared import METRICS
from learner.replay.logged import listed
from learner.replay.show import facts_table
from learner.rollout_log import Judged, LoggedTarget, StepAnswer
from learner.tokens import Tokenizer, decode_exactly
from learner.types import Role, Shape, Target
from shared_contracts.printable import printable

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
_MEANINGS = {metric.key.rpartition("/")[2]: metric.meaning for metric in METRICS}


def story(
    answer: StepAnswer, judged: Judged, mates: Sequence[StepAnswer], tokenizer: Tokenizer
) -> Iterator[tuple[str, Table]]:
    """Tables under their titles. mates: other answers whose segments are in the same pack."""
    yield f"Sample {answer.sample_id}", _facts(answer, judged, mates)
    yield "Answer", _alone(decode_exactly(tokenizer, answer.response_token_ids))
    if answer.parse.objects or answer.parse.dropped:
        yield "Objects of the answer", _objects(judged)
    yield "Ground truth", _truths(judged)
    title = "What is taught"
    if judged.target is None:
        yield title, _alone(f"nothing, the answer is left out: {judged.left_out}")
    else:
        yield title, _target(judged.target, judged.rollout.response_token_ids, tokenizer)


def _facts(answer: StepAnswer, judged: Judged, mates: Sequence[StepAnswer]) -> Table:
    table = facts_table()
    for image in answer.images:
        table.add_row("image", plain(image))
    begun, ended = answer.weights_version
    weights = str(begun) if begun == ended else f"{begun} when begun, {ended} when ended"
    asked = f"in step {answer.step} by process {answer.rank}, chunk {answer.chunk}"
    table.add_row("asked", f"{asked}, seed {answer.seed}, weights of version {weights}")
    table.add_row("answered", _answered(answer))
    if judged.target is not None and answer.segment is not None:
        prompt, taught = len(answer.prompt_token_ids), len(judged.target.token_ids)
        segment = answer.segment
        table.add_row(
            "segment", f"{prompt + taught} tokens: {prompt} of the prompt, {taught} taught"
        )
        names = listed([mate.sample_id.rpartition("/")[2] for mate in mates])
        beside = f"beside {names}" if mates else "alone"
        came = f"made when {segment.come} segments of the step had come"
        table.add_row("pack", plain(f"number {segment.pack}, {came}; {beside}"))
    return table


def _answered(answer: StepAnswer) -> str:
    said = f"{len(answer.response_token_ids)} tokens, ended by {answer.finish_reason}"
    if answer.repeat_terminated:
        said += ", as it repeated itself"
    if answer.parse.truncated:
        said += "; cut off: its outermost object is not closed"
    if answer.parse.invalid:
        said += "; no object was opened, so nothing of it can be kept"
    return said


def _objects(judged: Judged) -> Table:
    parsed, match = judged.parsed, judged.match
    table = new_table("key", "description", "bins", "what became of it")
    matched = dict(match.pairs)
    for number, found in enumerate(parsed.objects):
        if number in matched:
            iou = match.mask_iou[number, matched[number]]
            became = Text(f"matched to ground truth {matched[number]}, IoU {iou:.2f}", "green")
        else:
            became = Text(f"matched to none{_nearest(match.mask_iou[number])}", "red")
        table.add_row(plain(found.key), plain(found.desc), _shape(found.shape), became)
    for key, reason in parsed.dropped:
        meaning = _MEANINGS[reason].removeprefix("of those: ")
        table.add_row(plain(key), "", "", Text(f"dropped, {reason}: {meaning}", "yellow"))
    return table


def _nearest(overlaps: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> str:
    """The ground truth that a prediction overlaps most, if it was compared with any."""
    if np.isnan(overlaps).all():
        return ""
    best = int(np.nanargmax(overlaps))
    return f"; IoU {overlaps[best]:.2f} with ground truth {best} at most"


def _truths(judged: Judged) -> Table:
    match, target = judged.match, judged.target
    table = new_table("#", "description", "bins", "what became of it")
    finders = {j: judged.parsed.objects[i].key for i, j in match.pairs}
    keys = iter(target.fn_keys if target else ())
    for number, truth in enumerate(judged.sample.objects):
        if number in finders:
            became = Text(f"found as {printable(finders[number])}", "green")
        else:
            key = next(keys, None)
            became = Text("missed" + (f", appended as {key}" if key else ""), "bold blue")
        table.add_row(str(number), plain(truth.desc), _shape(truth.shape), became)
    return table


def _target(target: Target, response: list[int], tokenizer: Tokenizer) -> Table:
    """Its text in parts, coloured by role, and what of the answer is not in it."""
    kept = LoggedTarget.of(target, response).kept
    last = len(target.token_ids) - 1
    table = new_table("part", "#tokens", "text")

    def add(part: str, start: int, end: int) -> None:
        if end > start:
            table.add_row(part, str(end - start), _coloured(target, start, end, tokenizer))

    add("kept", 0, kept)
    add("spelled anew", kept, target.prefix_len)
    add("appended" if target.fn_keys else "closed", target.prefix_len, last)
    add("end", last, last + 1)
    if cut := response[kept:]:
        text = plain(decode_exactly(tokenizer, cut))
        text.stylize("strike dim")
        table.add_row("cut off", str(len(cut)), text)
    counts = {role: int((target.role == role).sum()) for role in Role}
    legend = Text(", ").join(
        Text(f"{count} {role.name.lower().replace('_', ' ')}", _STYLES[role])
        for role, count in counts.items()
        if count
    )
    table.add_row("roles", str(last + 1), legend)
    return table


def _coloured(target: Target, start: int, end: int, tokenizer: Tokenizer) -> Text:
    text = Text()
    for role, run in groupby(range(start, end), lambda i: Role(int(target.role[i]))):
        own = plain(decode_exactly(tokenizer, [target.token_ids[i] for i in run]))
        text.append(own.plain, _STYLES[role])
    return text


def _alone(text: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_row(plain(text))
    return table


def _shape(shape: Shape) -> str:
    name = "" if shape.kind == "bbox_2d" else "polygon "
    return name + " ".join(map(str, shape.coords))
