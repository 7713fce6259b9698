"""Methods vLLM mixes into each worker (`worker_extension_cls`).

weight_phase    runs a phase of a weight update, by its name, and reports how it ended:
    open_weight_update, receive_weights, complete_load, read_back, abandon_weight_update,
    and vLLM's own init_weight_transfer_engine, shutdown_weight_transfer_engine
repeat_guard    what guards this worker's sequences

A worker call that raises is a dead end in vLLM: with tensor parallelism the executor
stops reading at the first worker's failure and takes the next worker's failure for the
answer to its next call. So each phase is called through `weight_phase`, which returns
the failure as text.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config

from rollout_server.placement import Plan, shared_parameters, trace
from rollout_server.readback import Asked, subtotals
from rollout_server.repeat_processor import RepeatProcessor
from rollout_server.verification import RawPart
from rollout_server.weight_engine_gloo import GlooWeightTransferEngine
from shared_contracts.weights import DtypeName, ParameterMeta

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object

# A manifest and where it lands in this worker's model.
Planned = tuple[list[ParameterMeta], Plan]


class WorkerExtension(Worker):
    # vLLM mixes this class in without calling its constructor.
    _planned: Planned | None = None

    def weight_phase(self, name: str, arguments: dict[str, Any]) -> tuple[str | None, Any]:
        """Run the worker's method `name`; (None, what it returned) or (why it failed, None)."""
        try:
            return None, getattr(self, name)(**arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, the answer carries it
            traceback.print_exc()
            return f"worker {self.rank}: {type(error).__name__}: {error}", None

    def open_weight_update(
        self, parameters: list[dict[str, Any]], dtype: DtypeName
    ) -> list[dict[str, str]]:
        """Make the layers loadable and check the manifest against them: its faults.

        Where the plan cannot be carried out, the update has to be abandoned; nothing was
        loaded then.
        """
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        model = self.model_runner.get_model()
        if self._planned is not None and self._planned[0] == manifest:
            self.start_weight_update()
            return []
        ties = shared_parameters(model)
        self.start_weight_update()
        with set_current_vllm_config(self.vllm_config):
            plan = trace(model, manifest, dtype, ties)
        if not plan.faults:
            self._planned = (manifest, plan)
        return [asdict(fault) for fault in plan.faults]

    def receive_weights(self, update_info: dict[str, Any]) -> dict[str, float]:
        """Receive and load what the manifest lists; the seconds of `transfer` and `load`.

        Only the gloo engine tells them apart.
        """
        began = time.monotonic()
        self.update_weights(update_info)
        if isinstance(self.weight_transfer_engine, GlooWeightTransferEngine):
            return self.weight_transfer_engine.progress.seconds
        return {"transfer": time.monotonic() - began}

    def complete_load(self) -> dict[str, float]:
        """Finish the layers that wait for it and rebuild packed copies; the seconds of it."""
        began = time.monotonic()
        self.finish_weight_update()
        return {"load": time.monotonic() - began}

    def read_back(self, asked: Sequence[tuple[str, Sequence[int] | None]]) -> list[list[RawPart]]:
        """What this worker holds of parameters of the manifest (`verification`)."""
        assert self._planned is not None
        manifest, plan = self._planned
        by_name = {parameter.name: parameter for parameter in manifest}
        questions = [Asked(by_name[name], columns) for name, columns in asked]
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        with set_current_vllm_config(self.vllm_config):
            return subtotals(self.model_runner.get_model(), plan, questions, on_cpu)

    def abandon_weight_update(self) -> None:
        """End an update that broke: put every layer back so that it can be reloaded.

        The weights are a mixture afterwards, unless nothing was loaded.
        """
        engine = self.weight_transfer_engine
        assert engine is not None
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
            engine.reset_weight_update_target()
        self._weight_update_active = False

    def repeat_guard(self) -> dict[str, Any] | None:
        """Settings and sentinel of this worker's `RepeatProcessor`; None without one."""
        for processor in self.model_runner.input_batch.logitsprocs.all:
            if isinstance(processor, RepeatProcessor):
                return {"config": processor.config.model_dump(), "sentinel": processor.sentinel}
        return None
