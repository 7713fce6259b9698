"""Terminal output of a replay: what differs, and the details of an answer."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.text import Text

from learner.analysis.replay.rebuild import Difference, first_difference, rebuild
from learner.analysis.report.answers import faults_of
from learner.config.schema import Config
from learner.data.show import Table, plain, print_tables
from learner.runs.console import counted
from learner.runs.declared import DROPS
from learner.runs.rollout_log import LoggedTarget, StepAnswer
from learner.runs.run_folder import RunFolder
from learner.stages.tokens import Tokenizer, decode_exactly
from learner.types import AssessedRollout, Role, Shape, Target
from shared_contracts.errors import ContractError

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
# Largest number of differing answers that are listed.
_LISTED = 20


def replay(
    run: RunFolder, steps: Sequence[int], sample: str | None, config: Config, tokenizer: Tokenizer
) -> bool:
    """Compute steps again and print what differs; return whether all answers are identical.

    sample: print all details of its answers. `/data/train.jsonl:12` is also `train.jsonl:12`.

    Raises ContractError if no answer is to this sample.
    """
    details, differences, count = list[Table](), list[Difference](), 0
    bar = Console(stderr=True)
    for step in track(steps, "Steps", console=bar, transient=True, disable=not bar.is_terminal):
        answers = run.answers(step)
        count += len(answers)
        for answer, assessed in zip(answers, rebuild(answers, config, tokenizer), strict=True):
            if sample is not None and f"/{answer.sample_id}".endswith((f"/{sample}", f":{sample}")):
                details += _details(answer, assessed, tokenizer)
            if (difference := first_difference(answer, assessed)) is not None:
                differences.append(difference)
    if sample is not None and not details:
        do = "Name a sample as FILE:LINE of its data"
        raise ContractError("--sample", f"no logged answer is to a sample {sample!r}", do)
    whole = f"{counted(count, 'answer')} of {counted(len(steps), 'step')}"
    verdict = f"Identical: {whole} are rebuilt bit for bit."
    if differences:
        details += _differences(differences)
        verdict = f"Different: {len(differences):,} of {whole} are not rebuilt as they were logged."
    print_tables(details)
    print(verdict)
    return not differences


def _details(
    answer: StepAnswer, assessed: AssessedRollout, tokenizer: Tokenizer
) -> Iterator[Table]:
    """Yield tables with all details of an answer."""
    yield _named(f"Step {answer.step}, sample {answer.sample_id}", *_facts(answer))
    yield _named("Answer", ("", decode_exactly(tokenizer, answer.response_token_ids)))
    yield _objects(assessed)
    yield _truths(assessed)
    title = "Target"
    if assessed.target is None:
        left_out = f"nothing, the answer is left out: {assessed.left_out}"
        yield _named(title, ("", left_out))
    else:
        yield _named(title, *_target(assessed.target, answer, tokenizer))


NamedValue = tuple[str, str | Text]


def _named(title: str, *rows: NamedValue) -> Table:
    """Return a table of names and values, without headings."""
    return Table(title, ("", ""), rows)


def _facts(answer: StepAnswer) -> Iterator[NamedValue]:
    segment, reward = answer.segment, answer.reward
    yield from (("image", str(image)) for image in answer.images)
    yield "requested", f"by process {answer.rank}, chunk {answer.chunk}, seed {answer.seed}"
    yield "weights", "version {} at its start, {} at its end".format(*answer.weights_version)
    yield "length", f"{len(answer.response_token_ids)} tokens, ended by {answer.finish_reason}"
    yield "faults", ", ".join(faults_of(answer)) or "none"
    yield "segment", f"{segment.length} tokens, in pack {segment.pack}" if segment else "none"
    if reward is not None:
        *parts, _ = reward._asdict().items()
        yield "reward", " ".join(f"{key} {value:.4f}" for key, value in parts)
        if reward.credits is not None:
            yield "credits", " ".join(f"{credit:+.4f}" for credit in reward.credits)


def _objects(assessed: AssessedRollout) -> Table:
    parsed, match = assessed.parsed, assessed.match
    rows, matched = list[list[str | Text]](), dict(match.pairs)
    for place, item in enumerate(parsed.objects):
        if place in matched:
            iou = match.mask_iou[place, matched[place]]
            result = Text(f"matched to ground truth {matched[place] + 1}, IoU {iou:.2f}", "green")
        else:
            best = np.nanmax(match.mask_iou[place], initial=0.0)
            result = Text(f"not matched, IoU {best:.2f} at most", "red")
        rows.append([item.key, item.desc, _bins(item.shape), result])
    for duplicate in assessed.duplicates or ():
        item = duplicate.found
        result = Text("removed, repeats an earlier object", "yellow")
        rows.append([item.key, item.desc, _bins(item.shape), result])
    for key, reason in parsed.dropped:
        result = Text(f"dropped, {reason}: {DROPS[reason]}", "yellow")
        rows.append([key, "", "", result])
    return Table("Objects of the answer", ("key", "description", "bins", "result"), rows)


def _truths(assessed: AssessedRollout) -> Table:
    match, target = assessed.match, assessed.target
    rows = list[list[str | Text]]()
    finders = {j: assessed.parsed.objects[i].key for i, j in match.pairs}
    keys = iter(target.fn_keys if target else ())
    for place, truth in enumerate(assessed.sample.objects):
        if place in finders:
            result = Text("found as ", "green").append_text(plain(finders[place]))
        else:
            key = next(keys, None)
            result = Text("missed" + (f", appended as {key}" if key else ""), "bold blue")
        rows.append([str(place + 1), truth.desc, _bins(truth.shape), result])
    return Table("Ground truth", ("#", "description", "bins", "result"), rows)


def _bins(shape: Shape) -> str:
    name = "" if shape.kind == "bbox_2d" else "polygon "
    return name + " ".join(map(str, shape.coords))


def _target(target: Target, answer: StepAnswer, tokenizer: Tokenizer) -> Iterator[NamedValue]:
    """Yield the text of a target coloured by role, and the removed end of the answer."""
    kept = LoggedTarget.of(target, answer.response_token_ids).kept
    cut = plain(decode_exactly(tokenizer, answer.response_token_ids[kept:]))
    cut.stylize("strike dim")
    text = Text()
    for role, run in groupby(
        zip(target.role.tolist(), target.token_ids, strict=True), itemgetter(0)
    ):
        own = plain(decode_exactly(tokenizer, [token for _, token in run]))
        text.append(own.plain, _STYLES[Role(role)])
    counts = Counter(map(Role, target.role.tolist()))
    legend = (
        Text(f"{count} {role.name.lower().replace('_', ' ')}", _STYLES[role])
        for role, count in sorted(counts.items())
    )
    yield "length", f"{len(target.token_ids)} tokens; the first {kept} are the answer's"
    yield "text", text
    yield "cut off", cut
    yield "roles", Text(", ").join(legend)
    yield "departures", f"{len(target.departures)} tokens of removed duplicates"


def _differences(differences: Sequence[Difference]) -> Iterator[Table]:
    """Yield tables of the differing answers, and of the first difference with both values."""
    rows = [[str(each.answer.step), each.answer.sample_id, each.field] for each in differences]
    yield Table("Answers that differ", ("#step", "sample", "first field"), rows[:_LISTED])
    first = differences[0]
    yield _named(
        f"First difference: step {first.answer.step}, sample {first.answer.sample_id}, "
        f"process {first.answer.rank}",
        ("field", first.field),
        ("logged", json.dumps(first.logged, ensure_ascii=False)),
        ("rebuilt", json.dumps(first.rebuilt, ensure_ascii=False)),
    )
