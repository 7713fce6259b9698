"""Methods vLLM mixes into each worker (`worker_extension_cls`).

weight_phase    a phase of a weight update that reports       repeat_guard    what guards it

A worker call that raises is a dead end in vLLM: with tensor parallelism the executor
stops reading at the first worker's failure and takes the next worker's failure for the
answer to its next call. So each phase is called through `weight_phase`, which returns
the failure as text.
"""

import traceback
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config

from rollout_server.repeat_processor import RepeatProcessor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object


class WorkerExtension(Worker):
    def weight_phase(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Run the worker's method `name`; None when it succeeded, else why it failed."""
        try:
            getattr(self, name)(**arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, the answer carries it
            traceback.print_exc()
            return f"worker {self.rank}: {type(error).__name__}: {error}"
        return None

    def abandon_weight_update(self) -> None:
        """End an update that broke: put every layer back so that it can be reloaded.

        The weights are a mixture afterwards.
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
