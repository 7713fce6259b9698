"""Methods vLLM mixes into each worker (`worker_extension_cls`).

weight_phase    runs a phase of a weight update, by its name, and reports how it ended
repeat_guard    settings and sentinel of this worker's repeat guard (`RepeatReport`)

A worker call that raises is a dead end in vLLM: with tensor parallelism the executor
stops reading at the first worker's failure and takes the next worker's failure for the
answer to its next call. So each phase is called through `weight_phase`, which returns
the failure as text.
"""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.lora.model_manager import LoRAModelManager

from rollout_server.engines.verification import RawPart
from rollout_server.engines.vllm.load_plan import Plan, shared_parameters, trace
from rollout_server.engines.vllm.packed_experts import set_up_anew
from rollout_server.engines.vllm.read_back import Asked, subtotals
from rollout_server.engines.vllm.repeat_processor import RepeatReport
from rollout_server.engines.vllm.replay import Replay
from rollout_server.engines.vllm.staging import AdapterSlot, Arriving, Staged
from rollout_server.engines.vllm.weight_engines import (
    GlooWeightTransferEngine,
    init_info,
    update_info,
)
from shared_contracts.weights import (
    AdapterMeta,
    DtypeName,
    InitCommunicator,
    ParameterMeta,
    Transport,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object

# A manifest and where it lands in this worker's model.
Planned = tuple[list[ParameterMeta], Plan]


class WorkerExtension(RepeatReport, Worker):
    """What a worker can do beyond vLLM's own; vLLM calls no constructor of it."""

    _planned: Planned | None = None
    # The copies of that plan, after a push of its manifest through vLLM's loaders; none has broken
    # since.
    _replay: Replay | None = None
    # The adapter of the update in progress, or of the last one; None where that was of all.
    _arriving: Arriving | None = None
    # What a trial brings, if the update in progress or the last one is a trial.
    _tried: Staged | None = None
    # Whether a push has changed the weights that the engine read from the checkpoint.
    _base_replaced = False

    def weight_phase(self, name: str, arguments: dict[str, Any]) -> tuple[str | None, Any]:
        """Run a phase by its name; (None, what it returned) or (why it failed, None)."""
        try:
            return None, self._weight_phases()[name](**arguments)
        except Exception as error:  # noqa: BLE001  whatever it is, the answer carries it
            traceback.print_exc()
            return f"worker {self.rank}: {type(error).__name__}: {error}", None

    def _weight_phases(self) -> dict[str, Callable[..., Any]]:
        phases = (
            self.join_group,
            self.leave_group,
            # before an engine's first sequence
            self.serve_no_adapter,
            # is it as expected, and may it come? full weights, an adapter, a trial
            self.open_weight_update,
            self.adapter_faults,
            self.check_base,
            self.open_adapter_update,
            self.open_trial,
            # it comes, is put to use, and is compared
            self.receive_weights,
            self.complete_load,
            self.read_back,
            # it broke
            self.abandon_weight_update,
            self.abandon_trial,
        )
        return {phase.__name__: phase for phase in phases}

    def join_group(self, init: dict[str, Any], transport: Transport, rank_offset: int) -> None:
        """Join the weight group of an `InitCommunicator`; the learner is rank 0 of it.

        rank_offset: rank of the engine's first worker.
        """
        asked = InitCommunicator.model_validate(init)
        self.init_weight_transfer_engine(init_info(asked, transport, rank_offset))

    def leave_group(self) -> None:
        self.shutdown_weight_transfer_engine()

    def open_weight_update(
        self, parameters: list[dict[str, Any]], dtype: DtypeName
    ) -> list[dict[str, str]]:
        """Make the layers loadable and check the manifest against them: its faults.

        Where the plan cannot be carried out, the update has to be abandoned; nothing was
        loaded then.
        """
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        model = self.model_runner.get_model()
        self._arriving = self._tried = None
        if self._planned is not None and self._planned[0] == manifest:
            self._open_planned_update()
            return []
        ties = shared_parameters(model)
        self.start_weight_update()
        with set_current_vllm_config(self.vllm_config):
            plan = trace(model, manifest, dtype, ties)
        if not plan.faults:
            self._planned, self._replay = (manifest, plan), None
        return [asdict(fault) for fault in plan.faults]

    def _open_planned_update(self) -> None:
        """Open an update that makes the plan's copies, or runs vLLM's loaders where it cannot."""
        if self._replay is not None and not self._replay.begin():
            self._replay = None
        if self._replay is not None:
            self._set_target(self._replay)
        self.start_weight_update()

    def adapter_faults(
        self, adapter: dict[str, Any], parameters: list[dict[str, Any]]
    ) -> list[str]:
        """Why this worker cannot serve an adapter of these parameters; empty when it can."""
        slot = self._adapter_slot()
        if slot is None:
            return ["the server was started without --enable-lora"]
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        faults = slot.faults(AdapterMeta.model_validate(adapter), manifest)
        if self._base_replaced:
            faults.append(
                "full weights were pushed, so the checkpoint's weights under the adapter are gone"
            )
        return faults

    def check_base(
        self,
        parameters: list[dict[str, Any]],
        dtype: DtypeName,
        asked: Sequence[tuple[str, Sequence[int] | None]],
    ) -> tuple[list[dict[str, str]], list[list[RawPart]]]:
        """Hold the learner's base against the model, which stays what it is.

        Returns the faults of its manifest and, when there are none, what `read_back` says.
        """
        try:
            faults = self.open_weight_update(parameters, dtype)
        finally:
            with _nothing_is_loaded():
                self.abandon_weight_update()
        return faults, [] if faults else self.read_back(asked)

    def open_adapter_update(
        self, adapter: dict[str, Any], parameters: list[dict[str, Any]]
    ) -> None:
        """Have an adapter that has no faults staged beside the model."""
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        self._arriving = Arriving(manifest, AdapterMeta.model_validate(adapter))
        self._tried = None
        self._stage(self._arriving)

    def open_trial(self, parameters: list[dict[str, Any]]) -> None:
        """Have parameters staged beside the model, to be compared and forgotten."""
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        self._tried = Staged(manifest)
        self._stage(self._tried)

    def _stage(self, coming: Staged) -> None:
        self._set_target(coming.model)
        self.start_weight_update()

    def _set_target(self, model: nn.Module) -> None:
        """Have the update that starts next come to `model`."""
        engine = self.weight_transfer_engine
        assert engine is not None
        engine.set_weight_update_target(model, engine.model_config)

    def receive_weights(
        self, transport: Transport, parameters: list[dict[str, Any]]
    ) -> dict[str, float]:
        """Receive and load `parameters`; the seconds of `transfer` and `load`.

        Only the gloo engine tells them apart.
        """
        if self._arriving is None and self._tried is None:
            self._base_replaced = True
            set_up_anew(self.model_runner.get_model())
        began = time.monotonic()
        self.update_weights(update_info(transport, parameters))
        if isinstance(self.weight_transfer_engine, GlooWeightTransferEngine):
            return self.weight_transfer_engine.progress.seconds
        return {"transfer": time.monotonic() - began}

    def complete_load(self) -> dict[str, float]:
        """Finish the layers that wait for it and rebuild packed copies; the seconds of it.

        An adapter is put to use; after full weights none is left in use. What a trial brought
        is only kept to be compared.
        """
        began = time.monotonic()
        if self._tried is not None:
            self._stop_staging()
            return {"load": time.monotonic() - began}
        if self._arriving is None and self._replay is not None:
            with set_current_vllm_config(self.vllm_config):
                self._replay.finish()
        self.finish_weight_update()
        if self._arriving is None and self._replay is None:
            assert self._planned is not None
            model = self.model_runner.get_model()
            self._replay = Replay(model, self.model_config, self._planned[1])
        slot = self._adapter_slot()
        if slot is not None and self._arriving is not None:
            slot.fill(self._arriving.meta, self._arriving.model.tensors)
        elif slot is not None:
            slot.clear()
        return {"load": time.monotonic() - began}

    def serve_no_adapter(self) -> None:
        """Fill the place of the adapter, which every sequence names, with one of zeros."""
        slot = self._adapter_slot()
        assert slot is not None
        slot.clear()

    def read_back(self, asked: Sequence[tuple[str, Sequence[int] | None]]) -> list[list[RawPart]]:
        """What this worker holds of parameters of the manifest (`verification`).

        After a trial: what came, which `check_base` has held against the model.
        """
        if self._tried is not None:
            return self._tried.subtotals(asked)
        if self._arriving is not None:
            slot = self._adapter_slot()
            assert slot is not None
            return self._arriving.read_back(slot, asked)
        assert self._planned is not None
        manifest, plan = self._planned
        by_name = {parameter.name: parameter for parameter in manifest}
        questions = [Asked(by_name[name], columns) for name, columns in asked]
        with set_current_vllm_config(self.vllm_config):
            return subtotals(self.model_runner.get_model(), plan, questions)

    def _adapter_slot(self) -> AdapterSlot | None:
        """None where the engine has no room for an adapter."""
        if self.vllm_config.lora_config is None:
            return None
        manager: LoRAModelManager = self.model_runner.get_model().lora_manager  # type: ignore[assignment]
        return AdapterSlot(self.model_runner.lora_manager, manager)

    def abandon_weight_update(self) -> None:
        """End an update that broke: put every layer back so that it can be reloaded.

        The weights are a mixture afterwards, unless nothing was loaded. vLLM's loaders load the
        next ones, in case it was the plan that broke them.
        """
        engine = self.weight_transfer_engine
        assert engine is not None
        self._replay = None
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
            engine.reset_weight_update_target()
        self._weight_update_active = False

    def abandon_trial(self) -> None:
        """End a trial that broke, opened or not."""
        self._stop_staging()
        self._tried = None

    def _stop_staging(self) -> None:
        """vLLM's own end of an update would drop the adapter that is served."""
        engine = self.weight_transfer_engine
        assert engine is not None
        engine.reset_weight_update_target()
        self._weight_update_active = False


@contextmanager
def _nothing_is_loaded() -> Iterator[None]:
    """Keep vLLM from warning of each layer that it puts back as it was."""
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = reload.level
    reload.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reload.setLevel(level)
