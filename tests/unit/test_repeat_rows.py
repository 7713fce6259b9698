"""The guard of many sequences at once gives the verdicts of one guard for each."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.vllm.repeat_rows import GuardRows
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig

pytestmark = pytest.mark.req("REP-03", "REP-04")

SLOTS, CONTEXT = 6, 64


@st.composite
def configs(draw: st.DrawFn) -> RepeatTerminateConfig:
    return RepeatTerminateConfig(
        enabled=draw(st.sampled_from([True, True, True, False])),
        min_new_tokens=draw(st.integers(0, 12)),
        max_consecutive_token_repeats=draw(st.integers(0, 5)),
        ngram_size=draw(st.integers(0, 4)),
        ngram_repeats=draw(st.sampled_from([0, 2, 3, 4])),
        max_object_keys=draw(st.none() | st.integers(1, 4)),
    )


ids = st.integers(0, 2)
keys = st.lists(ids, min_size=1, max_size=5)
streams = st.tuples(configs(), st.lists(ids, min_size=1, max_size=8), st.lists(ids, max_size=40))


def verdicts(
    config: RepeatTerminateConfig, key: Sequence[int], generated: Sequence[int]
) -> list[bool]:
    guard = RepeatGuard(config, key)
    return [False, *(guard.push(token_id) for token_id in generated)]


@given(st.lists(streams, min_size=1, max_size=SLOTS), keys, st.data())
def test_every_row_agrees_with_its_guard_at_every_token(
    sequences: list[tuple[RepeatTerminateConfig, list[int], list[int]]],
    key: list[int],
    data: st.DataObject,
) -> None:
    """Prompts of several lengths, ends of several lengths, some begun with ids they had before."""
    tokens = torch.zeros(SLOTS, CONTEXT, dtype=torch.int32)
    rows = GuardRows(SLOTS, tokens, key)
    slots = data.draw(st.permutations(range(SLOTS)))[: len(sequences)]
    known = []
    for slot, (config, prompt, generated) in zip(slots, sequences, strict=True):
        tokens[slot, : len(prompt) + len(generated)] = torch.tensor(prompt + generated)
        known.append(len(prompt) + data.draw(st.integers(0, len(generated))))
        rows.begin(slot, config, len(prompt), known[-1])
    rows.flush()
    found: list[list[bool]] = [[] for _ in sequences]
    for step in range(CONTEXT):
        running = [
            i
            for i, (_, prompt, generated) in enumerate(sequences)
            if known[i] + step <= len(prompt) + len(generated)
        ]
        if not running:
            break
        positions = torch.tensor([known[i] + step - 1 for i in running])
        taken = rows.take(torch.tensor([slots[i] for i in running]), positions)
        for i, triggered in zip(running, taken.tolist(), strict=True):
            found[i].append(triggered)
    for i, (config, prompt, generated) in enumerate(sequences):
        assert found[i] == verdicts(config, key, generated)[known[i] - len(prompt) :]


def test_a_slot_forgets_the_sequence_before() -> None:
    tokens = torch.tensor([[7, 5, 5, 5, 5]])
    rows = GuardRows(1, tokens, [1])
    config = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=3)
    rows.begin(0, config, prompt=1, known=4)
    rows.flush()
    assert rows.take(torch.tensor([0]), torch.tensor([3])).tolist() == [True]
    rows.begin(0, config, prompt=1, known=1)
    rows.flush()
    expected = [False, False, False, True, True]
    found = [rows.take(torch.tensor([0]), torch.tensor([p])).item() for p in range(5)]
    assert found == expected


def test_what_is_read_of_a_prompt_in_pieces_counts_once() -> None:
    """A sequence that comes back with ids of its own is read in pieces, then goes on."""
    tokens = torch.tensor([[7, 7, 5, 5, 5, 5]])
    rows = GuardRows(1, tokens, [1])
    config = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=4)
    rows.begin(0, config, prompt=2, known=5)
    rows.flush()
    found = [rows.take(torch.tensor([0]), torch.tensor([p])).item() for p in (1, 3, 4, 5)]
    assert found == [False, False, False, True]


def test_counting_object_keys_needs_their_token_ids() -> None:
    rows = GuardRows(1, torch.zeros(1, 8, dtype=torch.int32), [])
    with pytest.raises(ContractError):
        rows.begin(0, RepeatTerminateConfig(enabled=True, max_object_keys=3), 1, 1)
    config = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=1)
    rows.begin(0, config, 1, 1)
    rows.flush()
    assert rows.take(torch.tensor([0]), torch.tensor([0])).tolist() == [False]
    assert rows.take(torch.tensor([0]), torch.tensor([1])).tolist() == [True]
