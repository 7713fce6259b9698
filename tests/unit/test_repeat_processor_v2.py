"""The guard in vLLM's model runner V2: its own loader, request states and sampler, on the CPU.

Triton kernels do not run here: `Runner` writes staged ids itself. `test_repeat_rows` has the
verdicts at every token.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.settings.repeat_config import PROCESSOR, PROCESSOR_V2
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.test_repeat_processor import LONG_RUN, A, B, own, params

pytestmark = pytest.mark.req("REP-04")

WIDTH, SLOTS, CONTEXT = 1342, 6, 64


@pytest.fixture(scope="module")
def vllm_config(toy_checkpoint: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(toy_checkpoint), max_model_len=512, enforce_eager=True)
    return args.create_engine_config()


@pytest.fixture(autouse=True)
def buffers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers without pinned memory, as in vLLM's worker for CPUs."""
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils

    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    monkeypatch.setattr(buffer_utils, "get_accelerator_view_from_cpu_tensor", lambda cpu: cpu)


def write_staged(*tensors: Any) -> None:
    """As `_apply_write_kernel`."""
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

    def changes(self, *sequences: tuple[Any, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits before and after the sampler's processors.

        sequences: sampling parameters, and what was generated after a prompt of one token.
        """
        states = self.states
        for number, (parameters, generated) in enumerate(sequences):
            states.add_request(str(number), 1, [B, *generated], 0, CONTEXT - 1)
            self.sampler.add_request(states.req_id_to_index[str(number)], parameters)
        write_staged(states.all_token_ids, states.total_len, states.num_computed_tokens)
        states.prompt_len.copy_to_uva()
        states.prefill_len.copy_to_uva()
        self.sampler.apply_staged_writes()
        slots = [states.req_id_to_index[str(number)] for number in range(len(sequences))]
        mapping, lengths = torch.tensor(slots, dtype=torch.int32), [len(g) for _, g in sequences]
        before = torch.arange(len(slots) * 2000.0).reshape(-1, 2000)[:, :WIDTH].contiguous()
        after = self.sampler.apply_sampling_params(
            before.clone(),
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=mapping.numpy(),
            pos=torch.tensor(lengths),
            input_ids=torch.tensor([generated[-1] for _, generated in sequences]),
            expanded_local_pos=torch.zeros_like(mapping),
            seq_lens_upper_bound_np=np.array(lengths) + 1,
        )
        for number in range(len(sequences)):
            assert states.remove_request(str(number)) is not None
        return before, after


@pytest.mark.req("REP-02", "REP-05")
def test_the_sentinel_is_hidden_and_forced_where_the_request_stops_at_it(vllm_config: Any) -> None:
    """The second time in other slots, as after a preemption."""
    runner = Runner(vllm_config)
    sentinel = runner.processor.sentinel
    stops = params(temperature=0, stop_token_ids=[sentinel], extra_args=own(LONG_RUN))
    free = params(temperature=0, extra_args=own(False))
    for _ in range(2):
        before, after = runner.changes((stops, [A] * 3), (stops, [A, B, A]), (free, [A] * 9))
        assert after.argmax(dim=1).tolist() == [
            sentinel,
            WIDTH - 1 - (sentinel == WIDTH - 1),
            WIDTH - 1,
        ]
        assert after[1, sentinel] == -torch.inf
        after[:2, sentinel] = before[:2, sentinel]
        assert torch.equal(after, before)


def test_each_runner_refuses_the_processor_of_the_other(vllm_config: Any) -> None:
    from vllm.v1.sample.logits_processor import build_logitsprocs

    with pytest.raises(ValueError, match="not a subclass"):
        Runner(vllm_config, PROCESSOR)
    with pytest.raises(ValueError, match="must be a subclass"):
        build_logitsprocs(vllm_config, torch.device("cpu"), False, False, [PROCESSOR_V2])


@pytest.mark.req("REP-06")
def test_a_worker_of_either_runner_reports_its_guard(vllm_config: Any) -> None:
    from rollout_server.engines.vllm.worker_extension import WorkerExtension

    runner = Runner(vllm_config)
    worker: Any = SimpleNamespace(use_v2_model_runner=True, model_runner=runner)
    expected = {
        "config": RepeatTerminateConfig().model_dump(),
        "sentinel": runner.processor.sentinel,
        "entry": runner.processor.entry,
    }
    assert WorkerExtension.repeat_guard(worker) == expected
    runner.sampler.logits_processors.remove(runner.processor)
    assert WorkerExtension.repeat_guard(worker) is None
    processors = SimpleNamespace(all=[runner.processor])
    v1 = SimpleNamespace(sampler=None, input_batch=SimpleNamespace(logitsprocs=processors))
    worker = SimpleNamespace(use_v2_model_runner=False, model_runner=v1)
    assert WorkerExtension.repeat_guard(worker) == expected
