"""The repeat guard in logits processors, its settings in environment variables, its sentinel."""

import json
import os
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.models.toy import make_toy_tokenizer
from learner.rollout.hf import HfRepeatProcessor
from learner.stages.tokens import encode_answer
from rollout_server.engines import vllm as vllm_room
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.engines.vllm.repeat_processor import active_sentinel, choose_sentinel
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    INJECTION,
    repeat_config_from_environment,
    repeat_environment,
)
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, RepeatTerminateConfig, entry_token_ids
from tests.unit.answers import CAT, DOG, encode
from tests.unit.fleets import fleet
from tests.unit.refusals import refused
from tests.unit.scripted_server import INFER
from tests.unit.test_repeat_guard import configs, repeats_now

# Ids of the toy tokenizer: two of text, and `object_`, which is all of the key's pattern.
A, B = 65, 66
LONG_RUN = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=3)


@pytest.fixture(scope="module")
def vllm_config(toy_checkpoint: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(toy_checkpoint), max_model_len=512, enforce_eager=True)
    return args.create_engine_config()


@pytest.fixture(scope="module")
def tokenizer(toy_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(toy_checkpoint)


@pytest.fixture(scope="module")
def key(tokenizer: Any) -> list[int]:
    return entry_token_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False), "object_keys"
    )


def make_processor(vllm_config: Any, config: RepeatTerminateConfig = LONG_RUN) -> Any:
    from rollout_server.engines.vllm.repeat_processor import RepeatProcessor

    with pytest.MonkeyPatch.context() as patch:
        for name, value in repeat_environment(config).items():
            patch.setenv(name, value)
        return RepeatProcessor(vllm_config, torch.device("cpu"), False)


def params(**options: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(**options)


@dataclass
class Row:
    """A sequence of the batch. stream: what it generates. ids: vLLM's list of what it has."""

    params: Any
    stream: list[int]
    ids: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)


class Batch:
    """vLLM's persistent batch around one processor, with vLLM's own update builder.

    deferred: ids become known after `update_state`, as with asynchronous scheduling.
    """

    def __init__(self, processor: Any, deferred: bool = False) -> None:
        from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder

        self.processor = processor
        assert not processor.is_argmax_invariant(), "vLLM would skip it for greedy rows"
        self.deferred = deferred
        self.rows: list[Row] = []
        self.builder = BatchUpdateBuilder()

    def change(
        self,
        leave: Sequence[Row] = (),
        join: Sequence[Row] = (),
        swap: tuple[int, int] | None = None,
    ) -> None:
        """Rows leave, others take their places or come behind, gaps close, two trade places."""
        slots: list[Row | None] = list(self.rows)
        for row in leave:
            index = next(i for i, each in enumerate(self.rows) if each is row)
            self.builder.removed_append(index)
            slots[index] = None
        for row in join:
            freed = self.builder.pop_removed()
            index = len(slots) if freed is None else freed
            slots[index : index + 1] = [row]
            row.ids = list(row.ids)  # a resumed sequence has a new list
            self.builder.added.append((index, row.params, [1], row.ids))
        self._close_gaps(slots)
        self.rows = [row for row in slots if row is not None]
        if swap is not None and max(swap) < len(self.rows):
            self._swap(*swap)

    def _close_gaps(self, slots: list[Row | None]) -> None:
        from vllm.v1.sample.logits_processor import MoveDirectionality

        while None in slots:
            if slots[-1] is None:
                slots.pop()
                continue
            gap = slots.index(None)
            self.builder.moved.append((len(slots) - 1, gap, MoveDirectionality.UNIDIRECTIONAL))
            slots[gap] = slots.pop()

    def _swap(self, one: int, other: int) -> None:
        from vllm.v1.sample.logits_processor import MoveDirectionality

        self.builder.moved.append((one, other, MoveDirectionality.SWAP))
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def step(self, advance: bool = True) -> torch.Tensor:
        """One forward: note which rows are forced, then give each the next id of its stream."""
        known = [row.ids[-1:] for row in self.rows]
        if self.deferred:
            for row in self.rows:
                row.ids[-1:] = [-1] * len(row.ids[-1:])
        self.processor.update_state(self.builder.get_and_reset(len(self.rows)))
        for row, last in zip(self.rows, known, strict=True):
            row.ids[len(row.ids) - len(last) :] = last
        before = torch.arange(len(self.rows) * 2000.0).reshape(-1, 2000)[:, :1342]
        after: torch.Tensor = self.processor.apply(before.clone())
        for index, row in enumerate(self.rows):
            forced = after[index].isfinite().sum().item() == 1
            row.forced.append(forced)
            assert forced or torch.equal(after[index], before[index])
        for row in self.rows if advance else []:
            row.ids.append(row.stream[len(row.ids)])
        return after


def verdicts(config: RepeatTerminateConfig, key: list[int], stream: Sequence[int]) -> list[bool]:
    """Apply the plain definition before each id of `stream` and behind the last."""
    now = (repeats_now(config, [*stream[:end]], tuple(key)) for end in range(len(stream) + 1))
    return [*accumulate(now, or_)]


@pytest.mark.req("REP-03")
@given(data=st.data(), config=configs(), rows=st.integers(1, 4))
def test_transformers_processor_gives_the_verdicts_of_the_plain_definition(
    tokenizer: Any, key: list[int], data: st.DataObject, config: RepeatTerminateConfig, rows: int
) -> None:
    ids = st.lists(st.sampled_from([A, B, *key]), min_size=20, max_size=20)
    streams = [data.draw(ids) for _ in range(rows)]
    hf = HfRepeatProcessor(
        config, tokenizer, prompt_length=2, eos_token_ids=[tokenizer.eos_token_id]
    )
    forced = []
    for length in range(21):
        tokens = torch.tensor([[A, A, *each[:length]] for each in streams])
        scores = hf(tokens, torch.zeros(rows, len(tokenizer)))
        forced.append([bool(row.isneginf().any()) for row in scores])
    expected = [verdicts(config, key, stream) for stream in streams]
    assert [list(row) for row in zip(*forced, strict=True)] == expected


# Which of five rows come or go (a bit for each); then two trade places, in half of the steps.
TURNS = st.integers(0, 2**5 - 1)
SWAPS = st.sampled_from([None] * 6 + [(one, other) for one in (0, 1) for other in (2, 3, 4)])


@pytest.mark.req("REP-03", "REP-04")
@given(
    data=st.data(),
    config=configs(),
    changes=st.lists(st.tuples(TURNS, SWAPS), min_size=30, max_size=30),
    deferred=st.booleans(),
)
def test_rows_may_come_go_return_and_trade_places(
    vllm_config: Any,
    key: list[int],
    data: st.DataObject,
    config: RepeatTerminateConfig,
    changes: list[tuple[int, tuple[int, int] | None]],
    deferred: bool,
) -> None:
    """vLLM's processor. Preempted rows are left out for some steps, and keep what they had."""
    ids = data.draw(st.lists(st.sampled_from([A, B, *key]), min_size=5 * 31, max_size=5 * 31))
    everyone = [Row(params(), ids[31 * i : 31 * (i + 1)]) for i in range(5)]
    batch = Batch(make_processor(vllm_config, config), deferred)
    for turns, swap in changes:
        turning = [row for i, row in enumerate(everyone) if turns >> i & 1]
        inside = [any(row is each for each in batch.rows) for row in turning]
        batch.change(
            leave=[row for row, there in zip(turning, inside, strict=True) if there],
            join=[row for row, there in zip(turning, inside, strict=True) if not there],
            swap=swap,
        )
        batch.step()
    for row in everyone:
        assert row.forced == verdicts(config, key, row.ids)[:-1]


@pytest.mark.req("REP-04")
def test_unknown_and_discarded_ids_do_not_count(vllm_config: Any) -> None:
    """And a row that does not grow keeps its verdict."""
    batch = Batch(make_processor(vllm_config))
    batch.change(join=[Row(params(), [])])
    (row,) = batch.rows
    history = [
        *([A, A], [A], [A, B], [A, B, B], [A, B, B, B], [A, B, B, B], [A, B, B], [], [A]),
        *([A, A, -1], [A, A, B, -1], [A, A, B, B, B]),
    ]
    for ids in history:
        row.ids[:] = ids
        batch.step(advance=False)
    assert row.forced == [ids[-3:] == [B, B, B] for ids in history]


def changed(processor: Any, rows: Sequence[tuple[Any, list[int]]]) -> list[list[int]]:
    """The ids that each row may continue with, of rows (sampling parameters, generated ids)."""
    from vllm.v1.sample.logits_processor import BatchUpdate

    added = [(index, given, [1], list(ids)) for index, (given, ids) in enumerate(rows)]
    processor.update_state(BatchUpdate(len(rows), [], added, []))
    after = processor.apply(torch.zeros(len(rows), 1342))
    return [row.isfinite().nonzero().flatten().tolist() for row in after]


@pytest.mark.req("REP-02", "REP-05")
def test_only_the_guard_chooses_the_sentinel_that_requests_stop_at(vllm_config: Any) -> None:
    processor = make_processor(vllm_config)
    sentinel = processor.sentinel
    stops = params(stop_token_ids=[sentinel, 7])
    ended, going = changed(processor, [(stops, [A] * 3), (stops, [A, B, A])])
    assert ended == [sentinel]
    assert going == [token_id for token_id in range(1342) if token_id != sentinel]


@pytest.mark.req("REP-04")
def test_without_the_sentinel_the_end_token_is_forced(vllm_config: Any, tokenizer: Any) -> None:
    """The token that vLLM resolved for the request, or the tokenizer's if it is to be ignored."""
    resolved = params()
    resolved.update_from_generation_config({}, B)
    rows = [(resolved, [A] * 3), (params(ignore_eos=True), [A] * 3), (params(), [A] * 2)]
    expected = [[B], [tokenizer.eos_token_id], [*range(1342)]]
    assert changed(make_processor(vllm_config), rows) == expected


@pytest.mark.req("FMT-01", "REP-01", "REP-03")
@pytest.mark.parametrize("name", ENTRY_CONTEXTS)
def test_both_count_the_entries_of_the_format(vllm_config: Any, tokenizer: Any, name: str) -> None:
    """They end an answer of three objects behind the entry that reaches the bound."""
    guard = RepeatTerminateConfig(enabled=True, max_object_keys=2, answer_format=name)
    answers = load_registered(ANSWER_FORMATS, name)
    stream = encode_answer(tokenizer, answers.write([CAT, DOG, CAT], "desc_first"))
    (marker,) = entry_token_ids(partial(encode, tokenizer), name)
    second = [place for place, token in enumerate(stream) if token == marker][1]
    batch = Batch(make_processor(vllm_config, guard))
    row = Row(params(), stream)
    batch.change(join=[row])
    hf = HfRepeatProcessor(
        guard, tokenizer, prompt_length=0, eos_token_ids=[tokenizer.eos_token_id]
    )
    forced = []
    for length in range(second + 2):
        batch.step()
        scores = hf(
            torch.tensor([stream[:length]], dtype=torch.long), torch.zeros(1, len(tokenizer))
        )
        forced.append(bool(scores.isneginf().any()))
    assert forced == row.forced == [place > second for place in range(second + 2)]


@pytest.mark.req("REP-04")
def test_plug_in_for_swift_rollout_refuses_to_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are off leave vLLM as it is. A real `swift rollout` is in the slow tests."""
    from vllm.engine.arg_utils import EngineArgs

    plugin = str(Path(vllm_room.__path__[0]) / "swift_plugin.py")
    untouched = EngineArgs.__post_init__
    with pytest.raises(ContractError, match=f"{CONFIG_JSON}: it is not set"):
        runpy.run_path(plugin)
    monkeypatch.setenv(CONFIG_JSON, RepeatTerminateConfig().model_dump_json())
    runpy.run_path(plugin)
    assert EngineArgs.__post_init__ is untouched


CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=3, ngram_size=4, ngram_repeats=2, max_object_keys=9
)
ON, OFF = '{"enabled": true, "ngram_size": 7}', '{"ngram_size": 7}'
SEVEN = RepeatTerminateConfig(enabled=True, ngram_size=7)


@pytest.mark.req("REP-04")
@pytest.mark.parametrize("config", [CONFIG, RepeatTerminateConfig()], ids=["on", "off"])
def test_written_settings_are_read_again(tmp_path: Path, config: RepeatTerminateConfig) -> None:
    """The engine's variables replace inherited ones; only the guard selects the runner V1."""
    settings = ServerSettings(model=tmp_path, device="cpu", repeat_terminate=config)
    written = engine_environment(settings)
    stale = {INJECTION: "0", CONFIG_JSON: "{", CONFIG_JSON_PATH: "stale.json"}
    assert repeat_config_from_environment(stale | written) == config
    assert written.get("VLLM_USE_V2_MODEL_RUNNER") == ("0" if config.enabled else None)


@pytest.mark.req("REP-04")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({INJECTION: "0"}, None),
        ({CONFIG_JSON: ON, INJECTION: ""}, SEVEN),
        ({CONFIG_JSON: ON, INJECTION: "1"}, SEVEN),
        ({CONFIG_JSON: OFF, INJECTION: "0"}, RepeatTerminateConfig(ngram_size=7)),
        ({CONFIG_JSON: "{", CONFIG_JSON_PATH: "guard.json"}, SEVEN),  # the path wins
    ],
)
def test_enabled_in_the_settings_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    expected: RepeatTerminateConfig | None,
) -> None:
    (tmp_path / "guard.json").write_text(ON)
    monkeypatch.chdir(tmp_path)
    assert repeat_config_from_environment(variables) == expected


@pytest.mark.req("REP-04")
@pytest.mark.parametrize(
    ("variables", "where", "found"),
    [
        ({CONFIG_JSON: ON, INJECTION: "0"}, INJECTION, f"it is 0 and {CONFIG_JSON} has enabled"),
        ({INJECTION: "yes"}, INJECTION, '"yes" is not accepted'),
        ({INJECTION: "1"}, CONFIG_JSON, "it is not set"),
        ({CONFIG_JSON: "{"}, CONFIG_JSON, "it is not JSON"),
        ({CONFIG_JSON: "[]"}, CONFIG_JSON, "[] is not a mapping"),
        ({CONFIG_JSON: '{"ngram_repeats": 1}'}, f"{CONFIG_JSON}.ngram_repeats", "1 is not"),
        ({CONFIG_JSON: ON, CONFIG_JSON_PATH: "gone.json"}, CONFIG_JSON_PATH, "gone.json cannot"),
        ({CONFIG_JSON: ON, CONFIG_JSON_PATH: os.devnull}, CONFIG_JSON_PATH, "it is not JSON"),
    ],
)
def test_a_wrong_variable_is_refused(variables: dict[str, str], where: str, found: str) -> None:
    with refused(where, found):
        repeat_config_from_environment(variables)


def tokenizer_with(*tokens: str) -> PreTrainedTokenizerFast:
    """The toy's: every id is used, and `<|video_pad|>` is its one reserved token but for these."""
    tokenizer = make_toy_tokenizer()
    special = [AddedToken(token, special=True) for token in tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


@pytest.mark.req("REP-05")
def test_the_sentinel_is_the_highest_free_id_or_else_a_reserved_token() -> None:
    tokenizer = tokenizer_with()
    assert choose_sentinel(tokenizer, len(tokenizer) + 64) == len(tokenizer) + 63
    video_pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) == video_pad
    tokenizer = tokenizer_with("<|file_sep|>", "<|fim_pad|>")
    fim_pad = tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) == fim_pad


@pytest.mark.req("REP-05")
@pytest.mark.parametrize("use", ["chat_template", "eos_token", "pad_token", "bos_token"])
def test_a_token_in_use_is_no_sentinel(use: str) -> None:
    tokenizer = tokenizer_with()
    setattr(tokenizer, use, "<|video_pad|>")
    assert choose_sentinel(tokenizer, len(tokenizer)) is None


@pytest.mark.req("REP-05", "REP-06")
@pytest.mark.parametrize(
    ("report", "found"),
    [
        (None, "worker 1 has no such logits processor"),
        ({"config": CONFIG.model_dump() | {"ngram_size": 9}, "sentinel": 7}, "'ngram_size': 9"),
        ({"config": CONFIG.model_dump(), "sentinel": None}, "no id left for the sentinel"),
    ],
)
def test_guard_is_active_if_all_workers_have_it(report: dict[str, Any] | None, found: str) -> None:
    good = {"config": CONFIG.model_dump(), "sentinel": 7}
    assert active_sentinel(CONFIG, [good, good]) == 7
    with pytest.raises(ContractError, match=found):
        active_sentinel(CONFIG, [good, report])


@pytest.mark.req("REP-04", "WIRE-01")
def test_vllm_v1_rollout_does_not_rely_on_request_time_logits_processors() -> None:
    with fleet(1) as run:
        run.ask(1)
        (body,) = run.rollouts[0].server.bodies(INFER)
    assert "logits_processors" not in json.dumps(body)
    assert "repeat_terminate" not in json.dumps(body)
    with pytest.raises(ValidationError):
        RequestConfig.model_validate({"logits_processors": ["a.b:C"]})
