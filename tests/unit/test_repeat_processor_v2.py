"""The guard in vLLM's model runner V2: its own loader, request states and sampler, on the CPU.

Triton kernels do not run here. Three are left out: what writes staged ids, what appends a sampled
id (both are done by `Runner`), and what draws from the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.stages.tokens import encode_answer
from rollout_server.settings.repeat_config import (
    EXTRA_ARG,
    PROCESSOR,
    PROCESSOR_V2,
    repeat_environment,
)
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import (
    ENTRY_CONTEXTS,
    RepeatGuard,
    RepeatTerminateConfig,
    entry_token_ids,
)
from tests.unit.answers import CAT, DOG, encode
from tests.unit.test_repeat_processor import configs, own, params

pytestmark = pytest.mark.req("REP-04")

# Ids of the toy tokenizer's text.
A, B = 65, 66
WIDTH, SLOTS, CONTEXT = 1342, 6, 64
OFF = RepeatTerminateConfig()


@pytest.fixture(scope="module")
def vllm_config(toy_checkpoint: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(toy_checkpoint), max_model_len=512, enforce_eager=True)
    return args.create_engine_config()


@pytest.fixture(scope="module")
def key(toy_checkpoint: Path) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(toy_checkpoint)
    return entry_token_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False), "object_keys"
    )


@pytest.fixture(scope="module", autouse=True)
def buffers_of_the_cpu() -> Any:
    """vLLM's own in place of those in pinned memory, as its worker for CPUs does it."""
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
        patch.setattr(buffer_utils, "get_accelerator_view_from_cpu_tensor", lambda cpu: cpu)
        yield


def write_staged(*tensors: Any) -> None:
    """What `_apply_write_kernel` does."""
    for tensor in tensors:
        table = tensor.gpu.reshape(tensor.num_rows, -1)
        begin = 0
        for slot, start, end in zip(
            tensor._staged_write_indices,
            tensor._staged_write_starts,
            tensor._staged_write_cu_lens,
            strict=True,
        ):
            ids = torch.tensor(tensor._staged_write_contents[begin:end], dtype=tensor.dtype)
            table[slot, start : start + len(ids)] = ids
            begin = end
        tensor.clear_staged_writes()


@dataclass
class Sequence_:
    """forced: for each number of generated ids, whether the guard forced the next one.

    read: ids that the runner has computed, where it reads them in pieces.
    """

    name: str
    params: Any
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    forced: dict[int, bool] = field(default_factory=dict)
    read: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.generated


class Runner:
    """The part of the model runner V2 around its sampler."""

    def __init__(self, config: Any, processor: str = PROCESSOR_V2) -> None:
        from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        device = torch.device("cpu")
        self.states = RequestState(SLOTS, CONTEXT, CONTEXT, 0, WIDTH, device)
        custom = build_custom_logits_processors(config, self.states, False, [processor])
        self.processor: Any = custom[0]
        self.sampler = Sampler(
            config, SLOTS, WIDTH, device, self.states, custom_logits_processors=custom
        )
        self.rows: list[Sequence_] = []

    def add(self, sequence: Sequence_, read: int = 0) -> None:
        """It may have ids of its own, which it generated before it was preempted."""
        prompt, ids = len(sequence.prompt), sequence.ids
        self.states.add_request(sequence.name, prompt, ids, 0, CONTEXT - prompt)
        slot = self.states.req_id_to_index[sequence.name]
        self.sampler.add_request(slot, sequence.params)
        sequence.read = read or len(ids)
        self.rows.append(sequence)
        states = self.states
        write_staged(states.all_token_ids, states.total_len, states.num_computed_tokens)
        states.prompt_len.copy_to_uva()
        states.prefill_len.copy_to_uva()
        self.sampler.apply_staged_writes()

    def remove(self, sequence: Sequence_) -> None:
        assert self.states.remove_request(sequence.name) is not None
        self.rows = [row for row in self.rows if row is not sequence]

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Before and after the sampler's processors."""
        slots = [self.states.req_id_to_index[row.name] for row in self.rows]
        mapping = torch.tensor(slots, dtype=torch.int32)
        before = torch.arange(len(slots) * 2000.0).reshape(-1, 2000)[:, :WIDTH].contiguous()
        after = self.sampler.apply_sampling_params(
            before.clone(),
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=mapping.numpy(),
            pos=torch.tensor([row.read - 1 for row in self.rows]),
            input_ids=torch.tensor([row.ids[row.read - 1] for row in self.rows]),
            expanded_local_pos=torch.zeros_like(mapping),
            seq_lens_upper_bound_np=np.array([row.read for row in self.rows]),
        )
        return before, after

    def step(self, streams: Sequence[list[int]]) -> None:
        """One forward: note which rows are forced, and give each the next id of its stream."""
        if not self.rows:
            return
        before, after = self.logits()
        for row, stream, untouched, logits in zip(self.rows, streams, before, after, strict=True):
            if row.read < len(row.ids):  # nobody samples from what is read in pieces
                row.read += 1
                continue
            changed = (logits != untouched).nonzero().flatten().tolist()
            row.forced[len(row.generated)] = bool(changed)
            assert not changed or (logits.argmax().item() == changed[0] and len(changed) == 1)
            row.generated.append(stream[len(row.generated)])
            row.read = len(row.ids)
            slot = self.states.req_id_to_index[row.name]
            self.states.all_token_ids.gpu[slot, len(row.ids) - 1] = row.generated[-1]


def verdicts(config: RepeatTerminateConfig, key: list[int], stream: Sequence[int]) -> list[bool]:
    guard = RepeatGuard(config, key)
    return [False, *(guard.push(token_id) for token_id in stream)]


@pytest.mark.req("REP-03")
@given(
    data=st.data(),
    told=st.lists(configs(), min_size=5, max_size=5),
    turns=st.lists(st.integers(0, 2**5 - 1), min_size=30, max_size=30),
)
def test_sequences_may_come_go_return_and_be_read_in_pieces(
    vllm_config: Any,
    key: list[int],
    data: st.DataObject,
    told: list[RepeatTerminateConfig],
    turns: list[int],
) -> None:
    """One that returns has another slot, and brings what it had generated."""
    ids = st.sampled_from([A, B, *key])
    streams = data.draw(st.lists(st.lists(ids, min_size=31, max_size=31), min_size=5, max_size=5))
    runner = Runner(vllm_config)
    everyone = [
        Sequence_(str(i), params(temperature=0, extra_args=own(config)), [A] * (1 + 3 * i))
        for i, config in enumerate(told)
    ]
    for bits in turns:
        for i, sequence in enumerate(everyone):
            if bits >> i & 1:
                if any(row is sequence for row in runner.rows):
                    runner.remove(sequence)
                else:
                    pieces = data.draw(st.integers(0, 3))
                    runner.add(sequence, read=max(len(sequence.ids) - pieces, 1))
        runner.step([streams[int(row.name)] for row in runner.rows])
    for sequence, config in zip(everyone, told, strict=True):
        expected = verdicts(config, key, sequence.generated)
        assert sequence.forced == {i: expected[i] for i in range(len(sequence.generated))}


@pytest.mark.req("FMT-01", "REP-01")
@pytest.mark.parametrize("name", ENTRY_CONTEXTS)
def test_the_entries_of_the_engine_s_format_are_counted(
    vllm_config: Any, toy_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of an answer of three objects, the last id of the second entry is the last that is free."""
    guard = RepeatTerminateConfig(enabled=True, max_object_keys=2, answer_format=name)
    for variable, value in repeat_environment(guard).items():
        monkeypatch.setenv(variable, value)
    tokenizer: Any = AutoTokenizer.from_pretrained(toy_checkpoint)
    answers = load_registered(ANSWER_FORMATS, name)
    stream = encode_answer(tokenizer, answers.write([CAT, DOG, CAT], "desc_first"))
    (marker,) = entry_token_ids(partial(encode, tokenizer), name)
    second = [place for place, token in enumerate(stream) if token == marker][1]
    runner = Runner(vllm_config)
    sequence = Sequence_("one", params(temperature=0), [A])
    runner.add(sequence)
    for _ in stream[: second + 2]:
        runner.step([stream])
    assert sequence.forced == {place: place > second for place in range(second + 2)}


def long_run(**more: Any) -> dict[str, Any]:
    return {EXTRA_ARG: {"enabled": True, "max_consecutive_token_repeats": 3, **more}}


@pytest.mark.req("REP-02", "REP-05")
def test_the_sentinel_is_hidden_and_forced_where_the_request_stops_at_it(
    vllm_config: Any,
) -> None:
    runner = Runner(vllm_config)
    sentinel = runner.processor.sentinel
    stops = {"temperature": 0, "stop_token_ids": [sentinel]}
    runner.add(Sequence_("repeats", params(**stops, extra_args=long_run()), [B], [A] * 3))
    runner.add(Sequence_("does not", params(**stops, extra_args=long_run()), [B], [A, B, A]))
    runner.add(Sequence_("left alone", params(temperature=0, extra_args=own(False)), [B], [A] * 9))
    before, after = runner.logits()
    assert after.argmax(dim=1).tolist() == [
        sentinel,
        WIDTH - 1 - (sentinel == WIDTH - 1),
        WIDTH - 1,
    ]
    assert after[1, sentinel] == -torch.inf
    after[:2, sentinel] = before[:2, sentinel]
    assert torch.equal(after, before)


def test_what_is_forced_is_drawn_also_from_what_may_not_be(vllm_config: Any) -> None:
    """As in the guard's own test, where only one other id is allowed."""
    runner = Runner(vllm_config)
    given_ = params(temperature=1.0, extra_args=long_run(), ignore_eos=True)
    runner.add(Sequence_("repeats", given_, [B], [A] * 3))
    logits = torch.full((1, WIDTH), -torch.inf)
    logits[0, A] = 30.0
    slot = torch.tensor([runner.states.req_id_to_index["repeats"]])
    ctx: Any = SimpleNamespace(expanded_idx_mapping=slot, pos=torch.tensor([3]))
    drawn = runner.processor.apply(logits, ctx).softmax(dim=1)
    (forced,) = drawn.nonzero()[:, 1].tolist()
    assert forced not in (A, runner.processor.sentinel)
    assert drawn[0, forced] == 1.0


def test_a_request_that_is_not_guarded_costs_nothing(vllm_config: Any) -> None:
    runner = Runner(vllm_config)
    runner.add(Sequence_("left alone", params(temperature=0, extra_args=own(False)), [B], [A] * 9))
    assert not runner.sampler.needs_logits_processing.any()


def test_each_runner_refuses_the_processor_of_the_other(vllm_config: Any) -> None:
    from vllm.v1.sample.logits_processor import build_logitsprocs

    with pytest.raises(ValueError, match="not a subclass"):
        Runner(vllm_config, PROCESSOR)
    with pytest.raises(ValueError, match="must be a subclass"):
        build_logitsprocs(vllm_config, torch.device("cpu"), False, False, [PROCESSOR_V2])


@pytest.mark.parametrize("said", [True, "off", {"ngram_repeats": 1}])
def test_wrong_settings_of_a_request_are_refused_by_the_validator_of_vllm(said: Any) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample.logits_processor import (
        build_custom_logits_processors_params_validator as validator,
    )

    with pytest.raises(VLLMValidationError, match="repeat_terminate"):
        validator([PROCESSOR_V2])(params(extra_args={EXTRA_ARG: said}))


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ({"speculative_config": object()}, "speculative_config"),
        (
            {"parallel_config": SimpleNamespace(enable_batch_sharded_sampling=True)},
            "enable_batch_sharded_sampling",
        ),
    ],
)
def test_what_the_state_cannot_follow_is_refused(
    vllm_config: Any, part: dict[str, Any], option: str
) -> None:
    parts = {
        "model_config": vllm_config.model_config,
        "speculative_config": None,
        "parallel_config": vllm_config.parallel_config,
    }
    with pytest.raises(ContractError) as error:
        Runner(SimpleNamespace(**parts | part))
    assert error.value.where == option


@pytest.mark.req("REP-06")
def test_a_worker_of_either_runner_tells_what_guards_it(vllm_config: Any) -> None:
    from rollout_server.engines.vllm.worker_extension import WorkerExtension

    runner = Runner(vllm_config)
    worker: Any = SimpleNamespace(use_v2_model_runner=True, model_runner=runner)
    told = {
        "config": OFF.model_dump(),
        "sentinel": runner.processor.sentinel,
        "entry": runner.processor.entry,
    }
    assert WorkerExtension.repeat_guard(worker) == told
    runner.sampler.logits_processors.remove(runner.processor)
    assert WorkerExtension.repeat_guard(worker) is None
    all_ = SimpleNamespace(all=[runner.processor])
    v1 = SimpleNamespace(sampler=None, input_batch=SimpleNamespace(logitsprocs=all_))
    worker = SimpleNamespace(use_v2_model_runner=False, model_runner=v1)
    assert WorkerExtension.repeat_guard(worker) == told
