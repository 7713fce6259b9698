"""The guard of many sequences at once gives the verdicts of one guard for each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.vllm.repeat_rows import GuardRows
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.test_repeat_guard import configs, verdicts

pytestmark = pytest.mark.req("REP-03", "REP-04")

SLOTS, CONTEXT = 6, 64


ids = st.integers(0, 2)
keys = st.lists(ids, min_size=1, max_size=5)
streams = st.tuples(configs(), st.lists(ids, min_size=1, max_size=8), st.lists(ids, max_size=40))


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
        assert found[i] == [False, *verdicts(config, generated, key)][known[i] - len(prompt) :]


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
